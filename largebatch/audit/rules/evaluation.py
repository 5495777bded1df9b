"""What can be wrong with a script's evaluation, in tables of rules."""

import math
from dataclasses import dataclass
from typing import NamedTuple

from largebatch.formatting import percent, plural
from largebatch.rules import Rule

_EQUAL = 1e-5
"""Relative difference of equal figures of two workers. Sums of float32 in another order differ by
less; one of 50,000 samples differs by more."""

_EXACT_SHARES = "evaluate shares of any size without padding: largebatch.training.evaluate"


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationCoverage:
    """Readings of validation samples, over all workers."""

    size: int
    twice: int
    never: int
    is_one_set: bool
    """True if all workers have the same data set."""

    everything: bool
    """True if each of several workers reads all samples."""

    global_batch: int
    workers: int
    counts_each_once: bool
    """True if the script's figure is that of each sample once: it leaves padding out."""


def _coverage_text(e: ValidationCoverage) -> str:
    moves = max(e.twice / max(1, e.size + e.twice), e.never / max(1, e.size))
    text = f"{plural(e.size, 'sample')}: {e.never:,} never read, {e.twice:,} read again"
    text += ", of data sets that differ between workers" * (not e.is_one_set)
    return f"{text}; top-1 may be off by {percent(moves)} points"


COVERAGE: tuple[Rule[ValidationCoverage], ...] = (
    Rule(
        check="evaluation samples",
        level="fine",
        when=lambda e: e.everything,
        text=lambda e: f"every worker reads all {plural(e.size, 'sample')}",
    ),
    Rule(
        check="evaluation samples",
        level="fine",
        when=lambda e: not e.never and not e.twice,
        text=lambda e: f"each of {plural(e.size, 'sample')} is read once",
    ),
    Rule(
        check="evaluation samples",
        level="fine",
        when=lambda e: (
            e.never < e.workers and e.twice < max(e.workers, e.global_batch) and e.counts_each_once
        ),
        text=lambda e: f"{_coverage_text(e).partition(';')[0]}; evaluate() counts each sample once",
        figure=lambda e: float(e.never or e.twice),
    ),
    Rule(
        check="evaluation samples",
        level="note",
        when=lambda e: e.never < e.workers and e.twice < max(e.workers, e.global_batch),
        text=_coverage_text,
        remedy=_EXACT_SHARES,
        figure=lambda e: float(e.never or e.twice),
    ),
    Rule(
        check="evaluation samples",
        level="fault",
        text=_coverage_text,
        remedy="no drop_last, one order of the data on all workers, "
        "DistributedSampler(shuffle=False)",
        figure=lambda e: float(e.never or e.twice),
    ),
)


class TrainingLayers(NamedTuple):
    """Layers that ran in training mode, on the worker that has most of them."""

    layers: int


MODES: tuple[Rule[TrainingLayers], ...] = (
    Rule(
        check="evaluation mode",
        level="fault",
        when=lambda e: e.layers > 0,
        text=lambda e: f"{plural(e.layers, 'layer')} ran in training mode",
        remedy="call model.eval() before the evaluation and model.train() after it",
        figure=lambda e: float(e.layers),
    ),
    Rule(check="evaluation mode", level="fine", text="no layer ran in training mode"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reported:
    """Results of the script's evaluation on all workers."""

    values: tuple[float, ...]
    has_samples: bool
    """True if the sample numbers of the validation loader are known."""

    @property
    def are_equal(self) -> bool:
        """True if all workers report the value of worker 0, which may be NaN."""
        first = self.values[0]
        if math.isnan(first):
            return all(map(math.isnan, self.values))
        return all(abs(value - first) <= _EQUAL * abs(first) for value in self.values)


REPORTED: tuple[Rule[Reported], ...] = (
    Rule(
        check="evaluation mean",
        level="fault",
        when=lambda e: not e.are_equal,
        text=lambda e: f"workers report {min(e.values):.5g} to {max(e.values):.5g}",
        remedy="sum hits and samples over the workers (all_reduce), then divide",
        figure=lambda e: max(e.values) - min(e.values),
    ),
    Rule(
        check="evaluation mean",
        level="unknown",
        when=lambda e: not e.has_samples,
        text=lambda e: f"evaluate() gives {e.values[0]:.5g}, which was not compared",
        remedy="give the audit val_loader too, of one data set that the workers divide",
    ),
)

EACH_ONCE = ""
ALL_READINGS = "the mean of all readings"
UNEXPLAINED = "unexplained"


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationFigure:
    """The script's figure beside exact ones over each sample once."""

    value: float
    """In the unit of `exact`: per cent are divided by 100."""

    exact: float
    """Top-1, its error or the loss, whichever explains the figure; top-1 if none does."""

    loss: float
    mean: str
    """The way to average that gives this figure: EACH_ONCE, ALL_READINGS, which has repeated or
    missing samples, a mistake in words, or UNEXPLAINED."""

    @property
    def off(self) -> float:
        """Distance from the exact figure."""
        return abs(self.value - self.exact)


FIGURE: tuple[Rule[EvaluationFigure], ...] = (
    Rule(
        check="evaluation mean",
        level="fine",
        when=lambda e: e.mean == EACH_ONCE,
        text=lambda e: f"evaluate() gives {e.value:.5g}, the figure of each sample once",
    ),
    Rule(
        check="evaluation mean",
        level="note",
        when=lambda e: e.mean == ALL_READINGS,
        text=lambda e: (
            f"evaluate() gives {e.value:.5g}, with repeated or missing samples; over each sample "
            f"once it is {e.exact:.5g}"
        ),
        remedy=_EXACT_SHARES,
        figure=lambda e: e.off,
    ),
    Rule(
        check="evaluation mean",
        level="note",
        when=lambda e: e.mean == UNEXPLAINED,
        text=lambda e: (
            f"evaluate() gives {e.value:.5g}; top-1 over each sample once is {e.exact:.5g}"
        ),
        remedy=lambda e: (
            f"nothing if it measures something else than top-1 or the loss, {e.loss:.5g}"
        ),
    ),
    Rule(
        check="evaluation mean",
        level="fault",
        text=lambda e: (
            f"evaluate() gives {e.value:.5g}, {e.mean}; over each sample once it is {e.exact:.5g}"
        ),
        remedy="sum hits and samples over batches and workers, then divide",
        figure=lambda e: e.off,
    ),
)
