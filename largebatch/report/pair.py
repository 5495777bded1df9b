"""A run against one of the same data in smaller batches: fewer updates, or a gap between them."""

import math
from collections.abc import Iterator
from typing import Literal, NamedTuple

import numpy as np

from largebatch.errors import LargebatchError
from largebatch.formatting import percent
from largebatch.report.comparison import Compared
from largebatch.report.record import Record

ALIKE = 0.05
"""Difference of two training losses that counts as none, as a part of the loss of guessing: about
twice what seeds differ by in short runs."""


class Found(NamedTuple):
    """A difference of two runs, as the fields of a cause."""

    kind: Literal["generalisation gap", "fewer updates", "underfit"]
    figure: str
    remedy: str


def order(one: Record, other: Record) -> tuple[Record, Record]:
    """Return the run to judge and the one in smaller batches to compare it with.

    Where batches are equal or not known, the run with fewer updates, then the first. Raises
    LargebatchError if the runs are known to have other data.
    """
    _require_same_data(one, other)
    sizes = [(run.batch or 0, -(run.updates or 0)) for run in (one, other)]
    place = 0 if one.batch and other.batch else 1
    if place and not (one.updates and other.updates):
        return one, other
    smaller = sizes[0][place] < sizes[1][place] if sizes[0][place] != sizes[1][place] else False
    return (other, one) if smaller else (one, other)


def _require_same_data(one: Record, other: Record) -> None:
    """Raise LargebatchError if two runs were validated on other data."""
    if one.run and other.run:
        names = [Compared(record.run, record.name) for record in (one, other) if record.run]
        data = [run.data(named=True) for run in names]
        if len(data[0]) == len(data[1]) and data[0] != data[1]:
            found = [", ".join(words[:1]) for words in data]
            raise LargebatchError(
                f"{one.name} and {other.name} have other data ({found[0]}; {found[1]}); diagnose "
                "compares two runs of the same data: give one of them alone"
            )
    if one.classes and other.classes and one.classes != other.classes:
        raise LargebatchError(
            f"{one.name} has {one.classes:,} classes and {other.name} {other.classes:,}; diagnose "
            "compares two runs of the same data: give one of them alone"
        )


def compare_pair(run: Record, small: Record) -> Iterator[Found]:
    """Yield why a run ends worse than one in smaller batches."""
    if not (run.loss.size and small.loss.size) or not _is_worse(run, small):
        return
    if run.end <= small.end + ALIKE * run.unit:
        yield Found(
            "generalisation gap",
            f"the training losses end alike, at {run.end:.3g} and {small.end:.3g} in small batches"
            f", and {_ends(run, small)}",
            "more augmentation or label smoothing, a longer warm-up, or exact statistics "
            "(polish); compare weight decay and rate with the small run",
        )
    elif run.updates and small.updates and run.updates < small.updates:
        yield _fewer(run, small)
    else:
        yield Found(
            "underfit",
            f"{_as_many(run, small)}the training loss ends at {run.end:.3g} against {small.end:.3g}"
            f"{_rates(run, small)}; {_ends(run, small)}",
            "find the rate of this batch (`largebatch lr range`), then train for more epochs",
        )


def _as_many(run: Record, small: Record) -> str:
    return "after as many updates " if run.updates and run.updates == small.updates else ""


def _rates(run: Record, small: Record) -> str:
    if not math.isfinite(run.peak + small.peak):
        return ""
    return f" (peak learning rates {run.peak:.3g} and {small.peak:.3g})"


def _is_worse(run: Record, small: Record) -> bool:
    """Return True if top-1 is lower by more than noise, or without it the loss is higher."""
    if run.top1.size and small.top1.size and np.isfinite([run.top1[-1], small.top1[-1]]).all():
        noise = math.hypot(run.noise(), small.noise())
        return bool(small.top1[-1] - run.top1[-1] > noise)
    return run.end > small.end + ALIKE * run.unit


def _ends(run: Record, small: Record) -> str:
    return (
        f"top-1 ends at {percent(run.top1[-1])} % against {percent(small.top1[-1])} %"
        if run.top1.size and small.top1.size
        else f"the training loss ends at {run.end:.3g} against {small.end:.3g}"
    )


def _fewer(run: Record, small: Record) -> Found:
    """Describe the loss after as many updates of the small run, and what more epochs would do."""
    assert run.updates
    assert small.updates
    then = loss_after(small, run.updates)
    words = (
        f"{run.updates:,} updates against {small.updates:,}: the training loss ends at "
        f"{run.end:.3g}, and in small batches was {then:.3g} after as many updates and "
        f"{small.end:.3g} at the end; {_ends(run, small)}"
    )
    if not run.end <= then + ALIKE * run.unit:
        remedy = (
            "an update does less than one of the small run: find the rate of this batch "
            "(`largebatch lr range`), then train for more epochs"
        )
        return Found("fewer updates", words, remedy)
    factor = epochs_factor(run, small)
    more = f"{factor:.2g} times the epochs, by the epoch law" if factor else "more epochs"
    return Found("fewer updates", words, f"train for {more}, or in smaller batches")


def loss_after(run: Record, updates: int) -> float:
    """Return the smoothed training loss after a number of updates."""
    row = int(np.searchsorted(run.step, updates, side="right")) - 1
    return float(run.trend[max(0, row)])


def epochs_factor(run: Record, small: Record) -> float | None:
    """Return how many times the epochs a run needs; None if the small run does not show it.

    Two batches take epochs to the same loss in a ratio that does not depend on the loss, by
    epochs(B) = shortest (1 + B / critical) (arXiv:1812.06162): the run took all of its epochs to a
    loss that the small one had after a part of its updates, so both ratios are the inverse of that
    part. Where rates decay this is an estimate.
    """
    reached = np.flatnonzero(small.trend <= run.end)
    if not reached.size or not run.updates or not small.updates:
        return None
    factor = small.updates / max(float(small.step[reached[0]]), run.updates)
    return factor if factor > 1 else None
