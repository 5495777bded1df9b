"""MLflow: the numbers of a run by step, the recipe as parameters, the report as an artifact.

Where, is MLflow's own matter: MLFLOW_TRACKING_URI, by default the file mlflow.db in the folder that
the run is started in; and MLFLOW_EXPERIMENT_NAME, by default largebatch.
"""

import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from largebatch.errors import LONGEST_NAME, TrackerError, clip
from largebatch.optional import require_mlflow
from largebatch.tracking.events import (
    EVENTS,
    LOG,
    Event,
    Finish,
    Start,
    Step,
    Summary,
    System,
)
from largebatch.tracking.identity import read_id, write_id
from largebatch.tracking.scalars import Plotted, Scalars, artifacts

WAITS = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2", "MLFLOW_HTTP_REQUEST_TIMEOUT": "20"}
"""Unless the environment has these: how long the run waits for a server, which by MLflow's own
numbers is many minutes, in every request."""

FLUSH_SECONDS = 2.0
"""The updates of so long are sent together."""

_SENT = "largebatch.sent"
"""The tag that says what has arrived, so that a resumed run sends again what a killed one lost."""

_MOST_PARAMETERS, _LONGEST_PARAMETER = 100, 500
"""Of one request, and the characters of one: what every version of MLflow takes."""

_MOST_METRICS = 1000
"""Of one request."""

_STATUS = {"finished": "FINISHED", "paused": "FINISHED", "failed": "FAILED"}
"""MLflow's words for how a run ended; the others are KILLED."""


class MLflow:
    """A Tracker for one MLflow run, which belongs to one run folder.

    `identity` is the run's id in MLflow where the folder lost it; `checkpoint` lets it have the
    last one. Where the tracking server or database cannot be used, TrackerError is raised: at once
    of a run that begins, and by the first record of one that is `resumed`, which goes on without.
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
            reason = (str(error).strip() or type(error).__name__).split("\n")[0]
            self._unusable = TrackerError(
                f"tracking: [mlflow]: {mlflow.get_tracking_uri()} cannot be used: "
                f"{clip(reason, 3 * LONGEST_NAME)}; set MLFLOW_TRACKING_URI to a server or a "
                "database that is there, or leave mlflow out"
            )
        if self._unusable is not None and not resumed:
            raise self._unusable

    def _find_experiment(self) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "largebatch")
        found = self._client.get_experiment_by_name(name)
        return str(found.experiment_id if found else self._client.create_experiment(name))

    def _find_sent(self) -> dict[str, int]:
        """Return what MLflow has of an earlier part; forget a run that it does not know."""
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
        """Send the numbers of an event, as tracking.scalars names them."""
        if self._unusable is not None:
            raise self._unusable
        match event:
            case Start():
                self._open()
                self._catch_up(event)
            case Finish():
                self._finish(event.summary)
            case _:
                self._take(event)
                late = time.monotonic() - self._sent > FLUSH_SECONDS
                if self._waiting and (late or not isinstance(event, Step | System)):
                    self._send()

    def _take(self, event: Event) -> None:
        """Let the numbers of an event wait, unless they were given before."""
        now = int(time.time() * 1000)
        values = self._scalars.take(event)
        self._waiting += [
            self._entities.Metric(name, value, now, getattr(event, "step", 0))
            for name, value in values.items()
        ]

    def _catch_up(self, start: Start) -> None:
        """Send what the log holds of parts of the run that went without MLflow."""
        self._scalars.take(start)  # which has the names of what the records hold
        for event in _history(self._folder / LOG, start):
            self._take(event)
            if len(self._waiting) >= _MOST_METRICS:
                self._send()
        if self._waiting:
            self._send()

    def _open(self) -> None:
        """Begin a run, or go on with the one of an earlier part."""
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

    def _send(self) -> None:
        waiting, self._waiting = self._waiting, []
        for first in range(0, len(waiting), _MOST_METRICS):
            self._client.log_batch(self._run, metrics=waiting[first : first + _MOST_METRICS])
        sent = self._entities.RunTag(_SENT, json.dumps(self._scalars.last))
        self._client.log_batch(self._run, tags=[sent])
        self._sent = time.monotonic()

    def _finish(self, summary: Summary) -> None:
        """Send what waits and the artifacts, and end the run."""
        self._send()
        for path in artifacts(self._folder, summary, checkpoint=self._checkpoint).values():
            self._client.log_artifact(self._run, str(path))
        self._client.set_terminated(self._run, status=_STATUS.get(summary.status, "KILLED"))


def _history(log: Path, start: Start) -> Iterable[Event]:
    """Return what a log holds of a run up to a start, and nothing that was made again."""
    found: dict[tuple[str, str, int], Event] = {}
    for event in (*_logged(log), start):
        if isinstance(event, Start):
            first = event.resume_step
            found = {key: one for key, one in found.items() if _stays(one, key[2], first)}
        elif isinstance(event, Plotted):
            found[event.event, event.stage, event.step] = event
    return found.values()


def _stays(event: Event, step: int, resume_step: int) -> bool:
    """Return whether a record still holds where a run goes on with the update `resume_step`."""
    return step < resume_step or (step == resume_step and not isinstance(event, Step | System))


def _logged(log: Path) -> Iterator[Event]:
    """Yield the events of a log, but for the end of what a killed run was writing."""
    with suppress(FileNotFoundError), log.open("rb") as file:
        for line in file:
            with suppress(ValidationError):
                yield EVENTS.validate_json(line)


def _dotted(config: Mapping[str, object], above: str = "") -> Iterator[tuple[str, object]]:
    """Yield the settings by their dotted keys, as a recipe's author writes them.

    >>> list(_dotted({"seed": 1, "optimizer": {"eta": 0.001}}))
    [('seed', 1), ('optimizer.eta', 0.001)]
    """
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _dotted(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value
