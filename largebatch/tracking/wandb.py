"""Weights & Biases: metrics by step, the recipe as configuration, the report's picture.

Works without an account: where no API key is known, the run is recorded offline in the run folder
and can be uploaded later with `wandb sync`.
"""

import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from largebatch.optional import require_wandb
from largebatch.storage import write_whole


class Wandb:
    """A Tracker for one W&B run, which belongs to one run folder."""

    def __init__(self, folder: Path) -> None:
        self._wandb = require_wandb()
        self._folder = folder
        self._run: Any = None

    def start(self, config: Mapping[str, object], *, resume_step: int) -> None:
        """Open the run; a resumed one goes on under the same id."""
        wandb = self._wandb
        chosen = os.environ.get("WANDB_MODE")
        offline = chosen is None and not wandb.login(prompt=False, verify=False)
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "largebatch"),
            name=self._folder.name,
            id=self._identity(),
            resume="allow" if resume_step else None,
            dir=str(self._folder),
            config=dict(config),
            mode="offline" if offline else None,
            settings=wandb.Settings(silent=True),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def record(self, record: Mapping[str, object]) -> None:
        """Log numbers under `train/`, `val/`, `held_out/` and `drift/`, by optimizer step."""
        match record["event"]:
            case "step":
                keys = ("loss", "lr", "images_per_second", "epoch")
                values = {f"train/{key}": record[key] for key in keys}
            case "evaluation":
                values = {f"val/{key}": record[key] for key in ("top1", "top5", "loss")}
            case "decision":
                values = {"held_out/top1": record["after"], "held_out/kept": record["kept"]}
            case "drift":
                values = {
                    f"drift/{layer['name']}/{key}": layer[key]
                    for layer in record["layers"]  # type: ignore[attr-defined]  # a list of dicts
                    for key in ("mean_shift", "log_variance_ratio")
                }
            case _:
                return
        self._run.log({"step": record["step"], **values})

    def finish(self, summary: Mapping[str, object]) -> None:
        """Log the summary and the report's picture, and end the run."""
        self._run.summary.update(dict(summary))
        picture = self._folder / "report.png"
        if picture.exists():
            self._run.log({"report": self._wandb.Image(str(picture))})
        self._run.finish(exit_code=0 if summary["status"] == "finished" else 1)

    def _identity(self) -> str:
        """Return the id this run folder has had from its first start on."""
        path = self._folder / "wandb-id"
        if not path.exists():
            write_whole(path, uuid.uuid4().hex[:8].encode())
        return path.read_text(encoding="utf-8")
