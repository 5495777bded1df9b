"""Weights & Biases: metrics by step, the recipe as configuration, the report's image.

Works without an account: where no API key is known, or W&B cannot be reached, the run is recorded
offline in the run folder and can be uploaded later with `wandb sync`.
"""

import math
import os
import re
import shlex
import uuid
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from largebatch.optional import require_wandb
from largebatch.storage import write_whole
from largebatch.tracking.events import (
    OVERVIEW,
    Decision,
    Drift,
    Evaluation,
    Event,
    Finish,
    Start,
    Step,
    Summary,
)

WAITS = {"init_timeout": 30.0, "finish_timeout": 120.0}
"""Seconds that a run waits for W&B when it begins and when it ends, unless the environment has
WANDB_INIT_TIMEOUT or WANDB_FINISH_TIMEOUT. What was not sent by then is on the disk."""

_ID = "wandb-id"
_IS_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
"""What becomes part of a path; an id may come from a stranger's checkpoint."""


_OF_A_STEP = "loss lr images_per_second epoch data_seconds reduction_seconds"


class Wandb:
    """A Tracker for one W&B run, which belongs to one run folder.

    `note` takes a remark on the run. `identity` is the run's id in W&B where the folder lost it.
    """

    def __init__(
        self,
        folder: Path,
        config: Mapping[str, object],
        *,
        note: Callable[[str], None],
        identity: str | None = None,
    ) -> None:
        self._wandb = require_wandb()
        self._folder, self._config, self._note = folder, dict(config), note
        self._run: Any = None
        known = str(wandb_id(folder) or identity or "")  # which anything may have written
        self._identity = known if _IS_ID.fullmatch(known) else uuid.uuid4().hex[:8]

    def _open(self, start: Start) -> None:
        """Open the run, offline where W&B is not reached; a resumed one goes on under its id."""
        write_whole(self._folder / _ID, self._identity.encode())
        chosen = os.environ.get("WANDB_MODE")
        offline = chosen is None and not self._wandb.login(prompt=False, verify=False)
        resume = "allow" if start.resume_step else None
        try:
            self._run = self._init("offline" if offline else None, self._identity, resume)
        except Exception as error:  # W&B's service holds on to that id
            self._run = self._init("offline", f"{self._identity}-offline", None)
            reason = str(error).strip().split("\n")[0]
            self._note(
                f"W&B cannot be reached ({reason}); the run is recorded offline, to be sent with: "
                + self._sync
            )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def _init(self, mode: str | None, identity: str, resume: str | None) -> Any:  # noqa: ANN401 -- W&B's
        known = self._wandb.Settings.model_fields  # finish_timeout came after 0.30
        waits = {
            name: float(os.environ.get(f"WANDB_{name.upper()}", seconds))
            for name, seconds in WAITS.items()
            if name in known
        }
        return self._wandb.init(
            project=os.environ.get("WANDB_PROJECT", "largebatch"),
            name=self._folder.name,
            id=identity,
            resume=resume,
            dir=str(self._folder),
            config=self._config,
            mode=mode,
            settings=self._wandb.Settings(silent=True, **waits),
        )

    def record(self, event: Event) -> None:
        """Log numbers under `train/`, `val/`, `held_out/` and `drift/`, by optimizer step."""
        match event:
            case Start():
                self._open(event)
            case Step():
                measured = _OF_A_STEP + " noise_scale" * math.isfinite(event.noise_scale)
                self._log(event.step, _values("train", event, measured))
            case Evaluation():
                self._log(event.step, _values("val", event, "top1 top5 loss"))
            case Decision():
                values = {"held_out/top1": event.after, "held_out/kept": event.kept}
                self._log(event.step, values)
            case Drift():
                values = {
                    f"drift/{layer.name}/{key}": getattr(layer, key)
                    for layer in event.layers
                    for key in ("mean_shift", "log_variance_ratio")
                }
                self._log(event.step, values)
            case Finish():
                self._finish(event.summary)

    def _log(self, step: int, values: Mapping[str, object]) -> None:
        self._run.log({"step": step, **values})

    def _finish(self, summary: Summary) -> None:
        """Log the summary and the report's image, end the run; note how to send one offline."""
        self._run.summary.update(asdict(summary))
        image = self._folder / OVERVIEW
        if image.exists():
            self._run.log({"report": self._wandb.Image(str(image))})
        offline = self._run.offline
        self._run.finish(exit_code=0 if summary.status in {"finished", "paused"} else 1)
        if offline:
            self._note(f"W&B has this run offline only; to send it: {self._sync}")

    @property
    def _sync(self) -> str:
        """The command that sends every part of the run, of which each has a folder of its own."""
        return f"wandb sync {shlex.quote(str(self._folder))}/wandb/offline-run-*"


def wandb_id(folder: Path) -> str | None:
    """Return the id that a run folder has in W&B from its first start on, None without one."""
    path = folder / _ID
    return path.read_text(encoding="utf-8") if path.exists() else None


def _values(group: str, event: Event, keys: str) -> dict[str, object]:
    return {f"{group}/{key}": getattr(event, key) for key in keys.split()}
