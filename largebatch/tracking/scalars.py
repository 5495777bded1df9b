"""Scalars: a run's numbers by name, the base of trackers that plot them, and its ids in them.

A resumed run repeats some updates, and W&B drops rows with decreasing steps. So a number is given
only once; the log of the run holds which were given.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from statistics import fmean

from pydantic import ValidationError

from largebatch.storage import write_whole
from largebatch.tracking.events import (
    EVENTS,
    METRICS,
    SYSTEM,
    Decision,
    Drift,
    Evaluation,
    Event,
    Finish,
    GeneralizationGap,
    Start,
    Step,
    Summary,
    System,
)

MOST_WORKERS = 16  # above them only the least, the mean and the most are plotted

Plotted = Step | Evaluation | GeneralizationGap | Decision | Drift | System
"""Events with numbers to plot."""

_OF_A_STEP = (
    "loss lr images_per_second epoch data_seconds reduction_seconds noise_scale gradient_norm"
)


class Scalars:
    """The numbers of events, each given once; `log` is that of a run followed before."""

    def __init__(self, log: Path | None = None) -> None:
        self._last: dict[str, int] = {}  # last given step of every kind of event and stage
        self._layers: tuple[str, ...] = ()
        self.row = -1
        """Row of a table for the last given numbers: one per update, which is its number unless
        earlier ones took more. Numbers that the row of their update has, those of a further part
        and of an earlier update get a row of their own; it never falls."""

        self._step: int | None = None
        self._names: set[str] = set()
        for event in logged(log) if log is not None else ():
            self.take(event)

    def take(self, event: Event) -> dict[str, float]:
        """Return the numbers of an event by name; empty if there are none or they were given."""
        if isinstance(event, Start):
            self._layers = event.layers or self._layers
            self._step = None
        if not isinstance(event, Plotted):
            return {}
        key = f"{event.event}/{event.stage}"
        if event.step <= self._last.get(key, -1):
            return {}
        self._last[key] = event.step
        values = _numbers(event, self._layers)
        if event.step != self._step or self._names & values.keys():
            self.row = max(event.step, self.row + 1)
            self._step, self._names = event.step, set()
        self._names |= values.keys()
        return values


class ScalarTracker(ABC):
    """Base of trackers that plot scalars: subclasses open a run, write numbers, and close it."""

    _scalars: Scalars

    def record(self, event: Event) -> None:
        """Write the numbers of an event, under their names in this module."""
        values = self._scalars.take(event)
        match event:
            case Start():
                self._open(event)
            case Finish():
                self._close(event.summary)
            case _ if values:
                assert isinstance(event, Plotted)
                self._write(values, event)

    @abstractmethod
    def _open(self, start: Start) -> None:
        """Start the run, or continue it after a resume."""

    @abstractmethod
    def _write(self, values: Mapping[str, float], event: Plotted) -> None:
        """Write the numbers of an event by its step."""

    @abstractmethod
    def _close(self, summary: Summary) -> None:
        """Write summary and artifacts, and end the run."""


def logged(log: Path) -> Iterator[Event]:
    """Yield the events of a log; skip a line that a killed run left incomplete."""
    with suppress(FileNotFoundError), log.open("rb") as file:
        for line in file:
            with suppress(ValidationError):
                yield EVENTS.validate_json(line)


def _numbers(event: Plotted, layers: tuple[str, ...]) -> dict[str, float]:
    """Return the numbers of an event; NaN is left out, except for a loss."""
    match event:
        case Step():
            values = {f"train/{key}": getattr(event, key) for key in _OF_A_STEP.split()}
            ratios = zip(layers, event.trust_ratios, strict=False)  # none where LARS made no update
            values |= {f"trust_ratio/{name.removesuffix('.weight')}": r for name, r in ratios}
        case Evaluation():
            values = {f"val/{key}": getattr(event, key) for key in METRICS}
        case GeneralizationGap():
            values = {"generalization/gap": event.gap, "generalization/train_loss": event.loss}
            values["generalization/train_top1"] = event.top1
        case Decision():
            values = {"held_out/top1": event.after, "held_out/kept": float(event.kept)}
        case Drift():
            values = {
                f"drift/{layer.name}/{key}": getattr(layer, key)
                for layer in event.layers
                for key in ("mean_shift", "log_variance_ratio")
            }
        case System():
            columns = {name: _by_worker(getattr(event, name)) for name in SYSTEM}
            values = {f"system/{n}/{key}": v for n, each in columns.items() for key, v in each}
    return {k: v for k, v in values.items() if math.isfinite(v) or k.endswith("/loss")}


def _by_worker(column: tuple[float, ...]) -> list[tuple[str, float]]:
    """Return the names and numbers of a column: one per worker, or three for all of them."""
    if len(column) <= MOST_WORKERS:
        return [(f"worker{rank}", value) for rank, value in enumerate(column)]
    return [("least", min(column)), ("mean", fmean(column)), ("most", max(column))]


def write_id(folder: Path, tracker: str, identity: str) -> None:
    """Store the id of the folder's run in a tracker."""
    write_whole(folder / f"{tracker}-id", identity.encode())


def read_id(folder: Path, tracker: str) -> str | None:
    """Return the id of the folder's run in a tracker; None before its first part."""
    path = folder / f"{tracker}-id"
    return path.read_text(encoding="utf-8") if path.exists() else None
