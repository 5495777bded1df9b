"""MLflow: scalars by step, the recipe as parameters, the report as an artifact.

MLflow reads the place from MLFLOW_TRACKING_URI, by default the file mlflow.db in the current
folder, and from MLFLOW_EXPERIMENT_NAME, by default largebatch.
"""

import os
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from largebatch.errors import clip
from largebatch.formatting import dotted
from largebatch.optional import require_mlflow
from largebatch.recipe.keys import Tracking
from largebatch.tracking.events import LOG, REPORT, Start, StepEvent, Summary, System
from largebatch.tracking.followed import FollowedRun
from largebatch.tracking.scalars import NewNumbers, Plotted, ScalarTracker, read_id, write_id

WAITS = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2", "MLFLOW_HTTP_REQUEST_TIMEOUT": "20"}
"""How long each request waits for a server, unless the environment sets it; MLflow's own defaults
are many minutes."""

FLUSH_SECONDS = 2.0  # of updates that are sent in one request; after a kill, when it is resumed

_MOST_PARAMETERS = 100
"""Parameters per request that every version of MLflow accepts."""

_LONGEST_PARAMETER = 460
"""Characters of a parameter that every version of MLflow accepts."""

_MOST_METRICS = 1000  # metrics per request

_STATUS = {"finished": "FINISHED", "paused": "FINISHED", "failed": "FAILED"}
"""MLflow's status of a run by ours; any other is KILLED."""


class MLflow(ScalarTracker):
    """A Tracker for one MLflow run, which belongs to one run folder."""

    def __init__(self, folder: Path, config: Mapping[str, object], tracking: Tracking) -> None:
        self._mlflow = require_mlflow()
        self._folder = folder
        self._config = config
        self._tracking = tracking
        self._run = read_id(folder, "mlflow")
        super().__init__(folder / LOG if self._run else None)
        self._there: dict[str, Counter[int]] = {}
        self._client: Any = None
        self._waiting: list[Any] = []
        self._sent = time.monotonic()

    @classmethod
    def follow(cls, run: FollowedRun) -> Self:
        """Return the tracker of a run."""
        return cls(run.folder, run.config, run.tracking)

    def _open(self, start: Start) -> None:  # noqa: ARG002 -- the base's signature
        for name, value in WAITS.items():
            os.environ.setdefault(name, value)
        self._client = self._mlflow.MlflowClient()
        entities = self._mlflow.entities
        if self._run is None:
            experiment_id = os.environ.get("MLFLOW_EXPERIMENT_ID")
            if not experiment_id:
                name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or "largebatch"
                experiment = self._client.get_experiment_by_name(name)
                if experiment is None:
                    experiment_id = self._client.create_experiment(name)
                else:
                    experiment_id = experiment.experiment_id
            name = self._tracking.name or self._folder.resolve().name
            run = self._client.create_run(experiment_id, run_name=name, tags=self._tags())
            self._run = str(run.info.run_id)
            parameters = [
                entities.Param(name, clip(str(value), _LONGEST_PARAMETER))
                for name, value in dotted(self._config)
            ]
            for first in range(0, len(parameters), _MOST_PARAMETERS):
                part = parameters[first : first + _MOST_PARAMETERS]
                self._client.log_batch(self._run, params=part)
            write_id(self._folder, "mlflow", self._run)
        # The end of an earlier part has closed it.
        self._client.update_run(self._run, status="RUNNING")

    def _tags(self) -> dict[str, str]:
        from mlflow.tracking.context.registry import resolve_tags

        tracking = self._tracking
        commit = str(self._config.get("commit") or "")
        tags = {
            "mlflow.note.content": tracking.notes,
            "mlflow.source.git.commit": commit.removesuffix("+"),
            "group": tracking.group,
            "job_type": tracking.job_type,
            **dict.fromkeys(tracking.tags, "true"),
        }
        resolved: dict[str, str] = resolve_tags({key: tag for key, tag in tags.items() if tag})
        return resolved

    def _lacking(self, new: NewNumbers, event: Plotted, position: int) -> dict[str, float]:  # noqa: ARG002 -- the base's signature
        # The numbers of an event were sent in order, so one that has its last has all: one request
        # to MLflow and not one for each name.
        *others, last = new.values
        if self._take(last, event.step):
            return {}
        lacking = [name for name in others if not self._take(name, event.step)]
        return {name: new.values[name] for name in (*lacking, last)}

    def _take(self, name: str, step: int) -> bool:
        """Return True if MLflow has one more of these; stages may evaluate after one update."""
        if name not in self._there:
            history = self._client.get_metric_history(self._run, name)
            self._there[name] = Counter(metric.step for metric in history)
        has_one = self._there[name][step] > 0
        self._there[name][step] -= has_one
        return has_one

    def _write(self, values: Mapping[str, float], event: Plotted) -> None:
        now = int(time.time() * 1000)
        metric = self._mlflow.entities.Metric
        self._waiting += [metric(name, value, now, event.step) for name, value in values.items()]
        # A request for each update would cost a fast run more than its updates; other events are
        # rare.
        late = time.monotonic() - self._sent > FLUSH_SECONDS
        if late or not isinstance(event, StepEvent | System):
            self._send()

    def _send(self) -> None:
        waiting = self._waiting
        self._waiting = []
        # A server refuses a request with more, and with it all of its numbers.
        for first in range(0, len(waiting), _MOST_METRICS):
            self._client.log_batch(self._run, metrics=waiting[first : first + _MOST_METRICS])
        self._sent = time.monotonic()

    def _close(self, summary: Summary) -> None:
        self._send()
        report = self._folder / REPORT
        if report.exists():
            self._client.log_artifact(self._run, str(report))
        self._client.set_terminated(self._run, status=_STATUS.get(summary.status, "KILLED"))
