"""Weights & Biases: metrics by step, the recipe as configuration, the report's image.

Works without an account: where no API key is known, the run is recorded offline in the run folder
and can be uploaded later with `wandb sync`.
"""

import os
import uuid
from collections.abc import Mapping
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


class Wandb:
    """A Tracker for one W&B run, which belongs to one run folder."""

    def __init__(self, folder: Path, config: Mapping[str, object]) -> None:
        self._wandb = require_wandb()
        self._folder, self._config = folder, dict(config)
        self._run: Any = None

    def _open(self, start: Start) -> None:
        """Open the run; a resumed one goes on under the same id."""
        wandb = self._wandb
        chosen = os.environ.get("WANDB_MODE")
        offline = chosen is None and not wandb.login(prompt=False, verify=False)
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "largebatch"),
            name=self._folder.name,
            id=self._identity(),
            resume="allow" if start.resume_step else None,
            dir=str(self._folder),
            config=self._config,
            mode="offline" if offline else None,
            settings=wandb.Settings(silent=True),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def record(self, event: Event) -> None:
        """Log numbers under `train/`, `val/`, `held_out/` and `drift/`, by optimizer step."""
        match event:
            case Start():
                self._open(event)
            case Step():
                self._log(event.step, _values("train", event, "loss lr images_per_second epoch"))
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
        """Log the summary and the report's image, and end the run."""
        self._run.summary.update(asdict(summary))
        image = self._folder / OVERVIEW
        if image.exists():
            self._run.log({"report": self._wandb.Image(str(image))})
        self._run.finish(exit_code=0 if summary.status == "finished" else 1)

    def _identity(self) -> str:
        """Return the id this run folder has had from its first start on."""
        path = self._folder / "wandb-id"
        if not path.exists():
            write_whole(path, uuid.uuid4().hex[:8].encode())
        return path.read_text(encoding="utf-8")


def _values(group: str, event: Event, keys: str) -> dict[str, object]:
    return {f"{group}/{key}": getattr(event, key) for key in keys.split()}
