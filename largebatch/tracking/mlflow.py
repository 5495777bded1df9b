"""MLflow: scalars by step, the recipe as parameters, the report as an artifact.

MLflow reads the place from MLFLOW_TRACKING_URI, by default the file mlflow.db in the current
folder, and from MLFLOW_EXPERIMENT_NAME, by default largebatch.
"""

import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from largebatch.errors import LONGEST_NAME, TrackerError, clip, reason_of
from largebatch.optional import require_mlflow
from largebatch.tracking.events import LOG, Event, Start, Step, Summary, System
from largebatch.tracking.scalars import (
    Plotted,
    Scalars,
    ScalarTracker,
    artifacts,
    logged,
    read_id,
    write_id,
)

WAITS = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2", "MLFLOW_HTTP_REQUEST_TIMEOUT": "20"}
"""How long each request waits for a server, unless the environment sets it; MLflow's own defaults
are many minutes."""

FLUSH_SECONDS = 2.0
"""Seconds of updates that are sent in one request."""

_SENT = "largebatch.sent"
"""Tag that holds what has arrived, so that a resumed run sends what a killed one lost."""

_MOST_PARAMETERS, _LONGEST_PARAMETER = 100, 500
"""Parameters per request, and characters per parameter, that every version of MLflow accepts."""

_MOST_METRICS = 1000
"""Metrics per request."""

_STATUS = {"finished": "FINISHED", "paused": "FINISHED", "failed": "FAILED"}
"""MLflow's status of a run by ours; any other is KILLED."""


class MLflow(ScalarTracker):
    """A Tracker for one MLflow run, which belongs to one run folder.

    `identity` is the run's id in MLflow if the folder has lost it; `checkpoint` uploads the last
    checkpoint. If the server or database cannot be used, TrackerError is raised: at once for a new
    run, and by the first record of a `resumed` one, which continues without MLflow.
    """

    def __init__(
        self,
        folder: Path,
        config: Mapping[str, object],
        *,
        identity: str | None = None,
        checkpoint: bool = False,
        resumed: bool = False,
    ) -> None:
        mlflow = require_mlflow()
        for name, value in WAITS.items():
            os.environ.setdefault(name, value)
        self._folder, self._config, self._checkpoint = folder, config, checkpoint
        self._entities = mlflow.entities
        self._run = read_id(folder, "mlflow", otherwise=identity)
        self._waiting: list[Any] = []
        self._sent = time.monotonic()
        self._unusable: TrackerError | None = None
        try:
            self._client = mlflow.MlflowClient()
            self._experiment = self._find_experiment()
            self._scalars = Scalars(given=self._find_sent())
        except Exception as error:
            self._unusable = TrackerError(
                f"tracking: [mlflow]: {mlflow.get_tracking_uri()} cannot be used: "
                f"{clip(reason_of(error), 3 * LONGEST_NAME)}; set MLFLOW_TRACKING_URI to a server "
                "or a database that is there, or leave mlflow out"
            )
        if self._unusable is not None and not resumed:
            raise self._unusable

    def _find_experiment(self) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "largebatch")
        found = self._client.get_experiment_by_name(name)
        return str(found.experiment_id if found else self._client.create_experiment(name))

    def _find_sent(self) -> dict[str, int]:
        """Return what MLflow has of earlier parts; start a new run if it does not know this one."""
        from mlflow.exceptions import MlflowException

        if self._run is None:
            return {}
        try:
            tags = self._client.get_run(self._run).data.tags
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            self._run = None
            return {}
        sent: dict[str, int] = json.loads(tags.get(_SENT, "{}"))
        return sent

    def record(self, event: Event) -> None:
        """Write the numbers of an event; raise TrackerError if MLflow cannot be used."""
        if self._unusable is not None:
            raise self._unusable
        super().record(event)

    def _write(self, values: Mapping[str, float], event: Plotted) -> None:
        self._queue(values, event)
        late = time.monotonic() - self._sent > FLUSH_SECONDS
        if late or not isinstance(event, Step | System):
            self._send()

    def _queue(self, values: Mapping[str, float], event: Plotted) -> None:
        now = int(time.time() * 1000)
        self._waiting += [
            self._entities.Metric(name, value, now, event.step) for name, value in values.items()
        ]

    def _catch_up(self, start: Start) -> None:
        for event in _history(self._folder / LOG, start):
            self._queue(self._scalars.take(event), event)
            if len(self._waiting) >= _MOST_METRICS:
                self._send()
        if self._waiting:
            self._send()

    def _open(self, start: Start) -> None:
        if self._run is None:
            run = self._client.create_run(self._experiment, run_name=self._folder.resolve().name)
            self._run = str(run.info.run_id)
            parameters = [
                self._entities.Param(name, clip(str(value), _LONGEST_PARAMETER - 40))
                for name, value in _dotted(self._config)
            ]
            for first in range(0, len(parameters), _MOST_PARAMETERS):
                part = parameters[first : first + _MOST_PARAMETERS]
                self._client.log_batch(self._run, params=part)
        write_id(self._folder, "mlflow", self._run)
        self._client.update_run(self._run, status="RUNNING")
        self._catch_up(start)

    def _send(self) -> None:
        waiting, self._waiting = self._waiting, []
        for first in range(0, len(waiting), _MOST_METRICS):
            self._client.log_batch(self._run, metrics=waiting[first : first + _MOST_METRICS])
        sent = self._entities.RunTag(_SENT, json.dumps(self._scalars.last))
        self._client.log_batch(self._run, tags=[sent])
        self._sent = time.monotonic()

    def _close(self, summary: Summary) -> None:
        self._send()
        for path in artifacts(self._folder, summary, checkpoint=self._checkpoint).values():
            self._client.log_artifact(self._run, str(path))
        self._client.set_terminated(self._run, status=_STATUS.get(summary.status, "KILLED"))


def _history(log: Path, start: Start) -> Iterable[Plotted]:
    """Return the valid records of a log up to a start: those that were not repeated later."""
    valid: dict[tuple[str, str, int], Plotted] = {}
    for event in (*logged(log), start):
        if isinstance(event, Start):
            first = event.resume_step
            valid = {key: old for key, old in valid.items() if _stays(old, first)}
        elif isinstance(event, Plotted):
            valid[event.event, event.stage, event.step] = event
    return valid.values()


def _stays(event: Plotted, resume_step: int) -> bool:
    """Return True if a record is still valid when a run resumes at the update `resume_step`."""
    if event.step == resume_step:
        return not isinstance(event, Step | System)
    return event.step < resume_step


def _dotted(config: Mapping[str, object], above: str = "") -> Iterator[tuple[str, object]]:
    """Yield the settings by their dotted keys.

    >>> list(_dotted({"seed": 1, "optimizer": {"eta": 0.001}}))
    [('seed', 1), ('optimizer.eta', 0.001)]
    """
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _dotted(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value
