"""Scalars: a run's numbers by name, the base of trackers that plot them, and its ids in them.

A resumed run repeats some updates, and W&B drops rows with decreasing steps. So a number is given
only once. Each tracker finds out which it has of the numbers in the run's log.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from pydantic import ValidationError

from largebatch.storage import write_whole
from largebatch.tracking.events import (
    EVENTS,
    METRICS,
    SYSTEM,
    Decision,
    DriftEvent,
    EvaluationEvent,
    Event,
    Finish,
    GeneralizationGap,
    Start,
    StepEvent,
    Summary,
    System,
)

MOST_WORKERS = 16  # above them only the least, the mean and the most are plotted

Plotted = StepEvent | EvaluationEvent | GeneralizationGap | Decision | DriftEvent | System
"""Events with numbers to plot."""

_OF_A_STEP = (
    "loss lr images_per_second epoch data_seconds reduction_seconds noise_scale gradient_norm"
)


class NewNumbers(NamedTuple):
    """Numbers of an event that were not given before."""

    values: dict[str, float]
    """By name; empty if there are none."""

    row: int
    """Row of a table for them: one per update, which is its number unless earlier ones took more.
    Numbers that the row of their update has, those of a further part and of an earlier update get a
    row of their own; it never falls."""


class Scalars:
    """The numbers of events, each given once."""

    def __init__(self) -> None:
        self._last: dict[str, int] = {}  # last given step of every kind of event and stage
        self._layers: tuple[str, ...] = ()
        self.row = -1
        self._step: int | None = None  # of the row
        self._names: set[str] = set()  # in the row

    def look(self, event: Event) -> NewNumbers:
        """Return the numbers of an event without giving them."""
        if not isinstance(event, Plotted) or event.step <= self._last.get(_key(event), -1):
            return NewNumbers({}, self.row)
        values = _numbers(event, self._layers)
        # An update, and what is measured after it, share a row as long as their names differ: two
        # stages may evaluate after one update, and W&B would keep the second value only.
        if event.step == self._step and not self._names & values.keys():
            return NewNumbers(values, self.row)
        return NewNumbers(values, max(event.step, self.row + 1))

    def take(self, event: Event) -> dict[str, float]:
        """Give the numbers of an event by name; empty if there are none or they were given."""
        match event:
            case Start():
                self._layers = event.layers or self._layers
            case Finish():
                self._step = None  # trackers close the row
        values, row = self.look(event)
        if isinstance(event, Plotted) and values:
            self._last[_key(event)] = event.step
            if row != self.row:
                self.row = row
                self._step = event.step
                self._names = set()
            self._names |= values.keys()
        return values


class ScalarTracker(ABC):
    """Base of trackers that plot scalars: subclasses open a run, write numbers, and close it.

    `log` is that of a run that was followed before; None for a new run. A killed part may have
    logged more than its tracker wrote: what the tracker lacks is written when it is opened again.
    """

    def __init__(self, log: Path | None) -> None:
        self._scalars = Scalars()
        self._log = log

    def record(self, event: Event) -> None:
        """Write the numbers of an event, under their names in this module."""
        if isinstance(event, Start):
            self._open(event)
            self._catch_up(event)
        values = self._scalars.take(event)
        if isinstance(event, Finish):
            self._close(event.summary)
        elif values:
            assert isinstance(event, Plotted)
            self._write(values, event)

    def _catch_up(self, start: Start) -> None:
        """Write what the log has and the tracker lacks, but what this part makes again."""
        for position, event in enumerate(logged(self._log) if self._log is not None else ()):
            new = self._scalars.look(event)
            lacking: dict[str, float] = {}
            if isinstance(event, Plotted) and new.values:
                lacking = self._lacking(new, event, position)
                is_update = isinstance(event, StepEvent | System)  # others follow their last update
                comes_again = event.step >= start.resume_step + (not is_update)
                if comes_again and lacking == new.values:  # not if a kill cut it in two
                    continue
            self._scalars.take(event)
            if lacking:
                assert isinstance(event, Plotted)
                self._write(lacking, event)

    @abstractmethod
    def _open(self, start: Start) -> None:
        """Start the run, or continue it after a resume."""

    @abstractmethod
    def _lacking(self, new: NewNumbers, event: Plotted, position: int) -> dict[str, float]:
        """Return those of the numbers that earlier parts have not written.

        Called in the order of the log for the events in it; `position` is their place there.
        """

    @abstractmethod
    def _write(self, values: Mapping[str, float], event: Plotted) -> None:
        """Write the numbers of an event by its step."""

    @abstractmethod
    def _close(self, summary: Summary) -> None:
        """Write summary and artifacts, and end the run."""


def _key(event: Plotted) -> str:
    return f"{event.event}/{event.stage}"


def logged(log: Path) -> Iterator[Event]:
    """Yield the events of a log; skip a line that a killed run left incomplete."""
    with suppress(FileNotFoundError), log.open("rb") as file:
        for line in file:
            with suppress(ValidationError):
                yield EVENTS.validate_json(line)


def _numbers(event: Plotted, layers: tuple[str, ...]) -> dict[str, float]:
    """Return the numbers of an event; NaN is left out, except for a loss."""
    match event:
        case StepEvent():
            values = {f"train/{key}": getattr(event, key) for key in _OF_A_STEP.split()}
            if event.mixed:
                values["train/mixed"] = 1.0  # of whose images the loss is
            ratios = zip(layers, event.trust_ratios, strict=False)  # none where LARS made no update
            values |= {f"trust_ratio/{name.removesuffix('.weight')}": r for name, r in ratios}
            values |= {f"monitor/{name}": value for name, value in event.measured.items()}
        case EvaluationEvent():
            values = {f"val/{key}": getattr(event, key) for key in METRICS}
            if event.balanced_top1 is not None:
                values["val/balanced_top1"] = event.balanced_top1
        case GeneralizationGap():
            values = {"generalization/gap": event.gap, "generalization/train_loss": event.loss}
            values["generalization/train_top1"] = event.top1
        case Decision():
            values = {"held_out/top1": event.after, "held_out/kept": float(event.kept)}
        case DriftEvent():
            values = {
                f"drift/{layer.name}/{key}": getattr(layer, key)
                for layer in event.layers
                for key in ("mean_shift", "log_variance_ratio")
            }
        case System():
            columns = {name: _by_worker(getattr(event, name)) for name in SYSTEM}
            values = {f"system/{n}/{key}": v for n, column in columns.items() for key, v in column}
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
