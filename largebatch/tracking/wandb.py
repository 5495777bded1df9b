"""Weights & Biases: scalars by step, the recipe as configuration, and the report.

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

from largebatch.errors import reason_of
from largebatch.optional import require_wandb
from largebatch.tracking.events import LOG, REPORT, Start, Summary
from largebatch.tracking.scalars import (
    Plotted,
    Scalars,
    ScalarTracker,
    read_id,
    write_id,
)


class Wandb(ScalarTracker):
    """A Tracker for one W&B run, which belongs to one run folder.

    `note` records a remark on the run.
    """

    def __init__(
        self,
        folder: Path,
        config: Mapping[str, object],
        *,
        note: Callable[[str], None],
    ) -> None:
        self._wandb = require_wandb()
        self._folder, self._config, self._note = folder, dict(config), note
        self._run: Any = None
        followed = read_id(folder, "wandb")
        self._resume = "allow" if followed else None
        self._scalars = Scalars(folder / LOG if followed else None)
        self._identity = followed or os.environ.get("WANDB_RUN_ID") or uuid.uuid4().hex[:8]

    def _open(self, start: Start) -> None:  # noqa: ARG002 -- the base's signature
        write_id(self._folder, "wandb", self._identity)
        chosen = os.environ.get("WANDB_MODE")
        offline = chosen is None and not self._wandb.login(prompt=False, verify=False)
        try:
            self._run = self._init("offline" if offline else None, self._identity, self._resume)
        except Exception as error:  # W&B's service keeps that id reserved
            self._run = self._init("offline", f"{self._identity}-offline", None)
            self._note(f"W&B cannot be reached ({reason_of(error)}); the run is recorded offline")
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def _init(self, mode: str | None, identity: str, resume: str | None) -> Any:  # noqa: ANN401 -- W&B's
        return self._wandb.init(
            project=os.environ.get("WANDB_PROJECT") or "largebatch",
            name=os.environ.get("WANDB_NAME") or self._folder.name,
            id=identity,
            resume=resume,
            dir=str(self._folder),
            config=self._config,
            mode=mode,
            settings=self._wandb.Settings(silent=True),
        )

    def _write(self, values: Mapping[str, float], event: Plotted) -> None:
        # rows count over all parts of the run, because W&B drops a repeated one
        self._run.log({"step": event.step, **values}, step=self._scalars.count, commit=True)

    def _close(self, summary: Summary) -> None:
        self._run.summary.update(asdict(summary))
        report = self._folder / REPORT
        if report.exists():
            kept = self._wandb.Artifact(f"{self._identity}-report", type="report")
            kept.add_file(str(report))
            self._run.log_artifact(kept)
        offline = self._run.offline
        self._run.finish(exit_code=0 if summary.status in {"finished", "paused"} else 1)
        if offline:  # every part of the run has its own folder there
            parts = f"{shlex.quote(str(self._folder))}/wandb/offline-run-*"
            self._note(f"W&B has this run offline only; to send it: wandb sync {parts}")
