"""Weights & Biases: scalars by step, the recipe as configuration, report and checkpoint.

It works without an account: without an API key, or if W&B cannot be reached, the run is recorded
offline in the run folder and can be uploaded later with `wandb sync`.
"""

import os
import shlex
import uuid
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from largebatch.errors import LONGEST_NAME, TrackerError, clip, reason_of
from largebatch.optional import require_wandb
from largebatch.tracking.events import LOG, Start, Summary
from largebatch.tracking.scalars import (
    Plotted,
    Scalars,
    ScalarTracker,
    artifacts,
    is_id,
    read_id,
    write_id,
)

WAITS = {"init_timeout": 30.0, "finish_timeout": 120.0}
"""Seconds to wait for W&B at the start and at the end of a run, unless the environment sets
WANDB_INIT_TIMEOUT or WANDB_FINISH_TIMEOUT. Data that was not sent by then is on the disk."""

_KINDS = {"report": "report", "checkpoint": "model"}
"""W&B's types of artifacts; it lists the type model among its models."""


class Wandb(ScalarTracker):
    """A Tracker for one W&B run, which belongs to one run folder.

    `note` records a remark on the run. `identity` is the run's id in W&B if the folder has lost
    it; `checkpoint` uploads the last checkpoint. Raises TrackerError for an invalid value in the
    environment.
    """

    def __init__(
        self,
        folder: Path,
        config: Mapping[str, object],
        *,
        note: Callable[[str], None],
        identity: str | None = None,
        checkpoint: bool = False,
    ) -> None:
        self._wandb = require_wandb()
        self._folder, self._config, self._note = folder, dict(config), note
        self._checkpoint = checkpoint
        self._run: Any = None
        self._first_row = 0
        followed = read_id(folder, "wandb", otherwise=identity)
        self._followed = followed is not None
        self._scalars = Scalars(folder / LOG if followed else None)
        self._identity = followed or _chosen_id() or uuid.uuid4().hex[:8]
        _check_environment(self._wandb.Settings())

    def _open(self, start: Start) -> None:
        """Open the run, offline if W&B cannot be reached; a resumed run keeps its id."""
        if self._run is not None:  # the run is rolled back to a checkpoint
            return
        write_id(self._folder, "wandb", self._identity)
        chosen = os.environ.get("WANDB_MODE")
        offline = chosen is None and not self._wandb.login(prompt=False, verify=False)
        earlier = self._followed or start.resume_step  # a followed run may have saved nothing
        resume = "allow" if earlier else None
        try:
            self._run = self._init("offline" if offline else None, self._identity, resume)
        except Exception as error:  # W&B's service keeps that id reserved
            self._run = self._init("offline", f"{self._identity}-offline", None)
            self._note(
                f"W&B cannot be reached ({reason_of(error)}); the run is recorded offline, "
                f"to be sent with: {self._sync}"
            )
        # a run in W&B whose log the folder has lost has rows that are unknown here
        self._first_row = max(0, self._run.step - self._scalars.count)
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
            project=os.environ.get("WANDB_PROJECT") or "largebatch",
            name=os.environ.get("WANDB_NAME") or self._folder.name,
            id=identity,
            resume=resume,
            dir=str(self._folder),
            config=self._config,
            mode=mode,
            settings=self._wandb.Settings(silent=True, **waits),
        )

    def _write(self, values: Mapping[str, float], event: Plotted) -> None:
        self._log({"step": event.step, **values}, row=self._scalars.count)

    def _log(self, values: Mapping[str, object], *, row: int) -> None:
        """Add a row; rows count over all parts of the run, because W&B drops a repeated one."""
        self._run.log(values, step=self._first_row + row, commit=True)

    def _close(self, summary: Summary) -> None:
        self._run.summary.update(asdict(summary))
        files = artifacts(self._folder, summary, checkpoint=self._checkpoint)
        image = files.pop("overview", None)
        if image is not None:
            row = self._scalars.count + 1  # the start of the next part skips this row
            self._log({"report": self._wandb.Image(str(image))}, row=row)
        for kind, path in files.items():
            kept = self._wandb.Artifact(f"{self._identity}-{kind}", type=_KINDS[kind])
            kept.add_file(str(path))
            self._run.log_artifact(kept)
        offline = self._run.offline
        self._run.finish(exit_code=0 if summary.status in {"finished", "paused"} else 1)
        if offline:
            self._note(f"W&B has this run offline only; to send it: {self._sync}")

    @property
    def _sync(self) -> str:
        """Command that uploads every part of the run; each part has its own folder."""
        return f"wandb sync {shlex.quote(str(self._folder))}/wandb/offline-run-*"


def _check_environment(settings: Any) -> None:  # noqa: ANN401 -- W&B's
    """Raise TrackerError for a variable that W&B refuses; W&B names its own field at best."""
    for name, value in os.environ.items():
        try:
            settings.update_from_env_vars({name: value})
        except Exception as error:  # W&B raises several types
            reason = reason_of(error)
            if isinstance(error, ValidationError):
                reason = error.errors()[0]["msg"]
            shown = "not usable" if "KEY" in name else clip(repr(value), LONGEST_NAME)
            raise TrackerError(
                f"tracking: [wandb]: {name} is {shown}; W&B: {reason}; correct or unset it"
            ) from None


def _chosen_id() -> str | None:
    """Return the run id in the environment, which the agent of a sweep sets."""
    chosen = os.environ.get("WANDB_RUN_ID")
    if chosen and not is_id(chosen):
        raise TrackerError(
            f"tracking: [wandb]: WANDB_RUN_ID is {clip(repr(chosen), LONGEST_NAME)}; expected at "
            "most 64 letters, digits, '_', '-' and '.', with no '.' in front"
        )
    return chosen
