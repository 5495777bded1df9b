"""Weights & Biases: a row of history per update, the recipe as configuration, and the report.

It works without an account: without an API key, or if W&B cannot be reached, the run is recorded
offline in the run folder and can be uploaded later with `wandb sync`. Later parts are then recorded
offline too until it is uploaded, because W&B would overwrite what it gets late.
"""

import json
import math
import os
import shlex
import uuid
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

from largebatch.errors import reason_of
from largebatch.formatting import plural
from largebatch.optional import require_wandb
from largebatch.recipe.keys import Tracking
from largebatch.storage import write_whole
from largebatch.tracking.events import LOG, METRICS, REPORT, EvaluationEvent, Start, Summary
from largebatch.tracking.followed import FollowedRun
from largebatch.tracking.scalars import (
    NewNumbers,
    Plotted,
    ScalarTracker,
    logged,
    read_id,
    write_id,
)

_CONFIGURED = {"recipe", "commit", "workers", "global_batch", "device_batch", "accumulation"}
_CONFIGURED |= {"folder"}
"""Keys of a summary that the configuration has."""

_BEST = {"top1": max, "top5": max, "loss": min}  # how the best of an evaluation is found
_VARIABLES = {
    name: f"WANDB_{'RUN_GROUP' if name == 'group' else name.upper()}"
    for name in ("entity", "group", "job_type", "name", "notes", "project", "tags")
}
"""Variables that W&B reads itself, by the argument that would override them."""


PARTS = "wandb-parts.json"
"""File in a run folder: how many events of the log W&B's closed parts have, and the open part."""

_ALERTS = {"failed": "ERROR", "interrupted": "WARN", "stopped": "WARN"}
"""Level of the alert at the end of a run, by its status."""


class Wandb(ScalarTracker):
    """A Tracker for one W&B run, which belongs to one run folder.

    `note` records a remark on the run.
    """

    def __init__(
        self,
        folder: Path,
        config: Mapping[str, object],
        tracking: Tracking,
        *,
        note: Callable[[str], None],
    ) -> None:
        self._wandb = require_wandb()
        self._folder = folder
        self._config = dict(config)
        self._note = note
        self._run: Any = None
        followed = read_id(folder, "wandb")
        name = tracking.name or (None if followed else folder.resolve().name)
        self._arguments = {"project": "largebatch", **dict(tracking), "name": name}
        self._resume = "allow" if followed else None
        super().__init__(folder / LOG if followed else None)
        self._rows = 0
        self._events = 0
        self._identity = followed or os.environ.get("WANDB_RUN_ID") or uuid.uuid4().hex[:8]

    @classmethod
    def follow(cls, run: FollowedRun) -> Self:
        """Return the tracker of a run."""
        return cls(run.folder, run.config, run.tracking, note=run.note)

    def _open(self, start: Start) -> None:  # noqa: ARG002 -- the base's signature
        chosen = os.environ.get("WANDB_MODE")
        # `wandb sync` leaves a file beside each part that it has sent.
        parts = self._folder.glob("wandb/offline-run-*/*.wandb")
        unsent = any(not part.with_name(f"{part.name}.synced").exists() for part in parts)
        offline = chosen is None and (unsent or not self._wandb.login(prompt=False, verify=False))
        try:
            self._run = self._init("offline" if offline else None)
        except Exception as error:  # W&B's service keeps that id reserved
            self._identity += "-offline"
            self._run = self._init("offline")
            self._note(f"W&B cannot be reached ({reason_of(error)}); the run is recorded offline")
        write_id(self._folder, "wandb", self._identity)
        self._rows = self._run.starting_step
        self._events = self._set_aside_killed()
        self._write_parts(self._events, Path(self._run.settings.sync_dir).name)
        # Plotted by the update and not by W&B's rows: an update with two evaluations takes two of
        # them.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        for name, best in _BEST.items():
            summary = f"{best.__name__},last"
            self._run.define_metric(f"val/{name}", step_metric="step", summary=summary)

    def _init(self, mode: str | None) -> Any:  # noqa: ANN401 -- W&B's
        commit = str(self._config.get("commit") or "").removesuffix("+")
        return self._wandb.init(
            id=self._identity,
            resume=self._resume,
            dir=str(self._folder),
            config=self._config,
            mode=mode,
            settings=self._wandb.Settings(silent=True, git_commit=commit or None),
            # An argument would override the variable that the user has set for this run.
            **{
                name: self._arguments[name]
                for name, variable in _VARIABLES.items()
                if self._arguments[name] and not os.environ.get(variable)
            },
        )

    def _set_aside_killed(self) -> int:
        """Return the number of events of the log that need not be written again offline.

        W&B writes a file in blocks, so a killed offline part lacks its end, or everything. What was
        logged since the part before is written again, and the killed part renamed, so that it is
        not sent. What a killed part sent to W&B is not known offline: nothing is written again.
        """
        path = self._folder / PARTS
        if not path.exists():  # the first part
            return 0
        parts = json.loads(path.read_bytes())
        killed = self._folder / "wandb" / Path(str(parts["open"])).name
        if parts["open"] is None or killed.name.startswith("offline-run-"):
            if parts["open"] is not None and killed.is_dir():
                killed.rename(killed.with_name(f"killed-{killed.name}"))
            return int(parts["events"])
        return self._count_events()

    def _write_parts(self, events: int, part: str | None) -> None:
        text = json.dumps({"events": events, "open": part})
        write_whole(self._folder / PARTS, text.encode())

    def _count_events(self) -> int:
        return sum(1 for _ in logged(self._folder / LOG))

    def _lacking(self, new: NewNumbers, event: Plotted, position: int) -> dict[str, float]:  # noqa: ARG002 -- the base's signature
        if self._run.offline:
            return {} if position < self._events else new.values
        return {} if new.row < self._rows else new.values

    def _write(self, values: Mapping[str, float], event: Plotted) -> None:
        self._scalars.row = max(self._scalars.row, self._rows)  # W&B drops earlier rows
        self._run.log({"step": event.step, **values}, step=self._scalars.row)

    def _close(self, summary: Summary) -> None:
        self._run.log({}, commit=True)  # the last row; W&B would set its own summary after ours
        values_at_end = {
            key: value for key, value in asdict(summary).items() if key not in _CONFIGURED
        }
        values_at_end["final"] = {name: values_at_end.pop(name) for name in METRICS}
        values_at_end["stages"] = {stage.pop("name"): stage for stage in values_at_end["stages"]}
        evaluations = [
            event for event in logged(self._folder / LOG) if isinstance(event, EvaluationEvent)
        ]
        for name, best in _BEST.items() if evaluations else ():  # W&B has those of this part
            values = [getattr(evaluation, name) for evaluation in evaluations]
            known = best(filter(math.isfinite, values), default=values[-1])
            values_at_end[f"val/{name}"] = {best.__name__: known, "last": values[-1]}
        self._run.summary.update(values_at_end)
        report = self._folder / REPORT
        if report.exists():
            artifact = self._wandb.Artifact(f"{self._identity}-report", type="report")
            artifact.add_file(str(report))
            self._run.log_artifact(artifact)
        # A run that its scheduler starts again needs nobody's attention.
        level = _ALERTS.get(summary.status)
        if level and not summary.is_requeued:
            done = f"after {plural(summary.steps, 'update')}"
            text = f"{self._folder}: {summary.diverged or summary.reason or ''} ({done})"
            self._run.alert(f"Run {summary.status}", text, level=level)
        offline = self._run.offline
        self._run.finish(exit_code=0 if summary.status in {"finished", "paused"} else 1)
        self._write_parts(self._count_events(), None)  # when it is all on the disk
        if offline:  # every part of the run has its own folder there
            parts = f"{shlex.quote(str(self._folder))}/wandb/offline-run-*"
            self._note(f"W&B has this run offline only; to send it: wandb sync {parts}")
