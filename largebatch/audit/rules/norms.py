"""What can be said about BatchNorm on several workers, in tables of rules.

Statistics are not gradients: no choice of them is what one process with the whole batch computes,
so what differs is a note with its figure. Averaged weights with statistics of other weights are a
fault, because evaluation is then of a model that nobody trained.
"""

from dataclasses import dataclass
from typing import NamedTuple

from largebatch.formatting import plural, three_digits
from largebatch.rules import Rule

_FEW = 16
"""Samples per span below which BatchNorm loses accuracy: ResNet-50 on ImageNet has a top-1 error of
23.6 % with 32 samples, 23.7 with 16, 24.8 with 8, 27.3 with 4 and 34.7 with 2 (Wu and He 2018,
arXiv:1803.08494, table 2)."""

_FAR = 0.1
"""Distance of workers' running means, in standard deviations, that is worth a note: the mean of 100
samples has this standard error."""

_WORSE = 0.1  # relative difference of losses that is a fault of averaged weights

WARM = 50
"""Updates after which running statistics have forgotten where they started: 0.9^50 is 0.5 %."""


class Span(NamedTuple):
    """Samples that BatchNorm normalises together."""

    samples: int
    of_worker: int
    """Fewest samples of a worker."""


def _span_text(e: Span) -> str:
    where = "on each worker" if e.samples <= e.of_worker else "over several workers"
    return f"BatchNorm normalises over {plural(e.samples, 'sample')} {where}"


SPAN: tuple[Rule[Span], ...] = (
    Rule(
        check="batch norm span",
        level="note",
        when=lambda e: e.samples < _FEW,
        text=_span_text,
        remedy="use a larger device batch or SyncBatchNorm (arXiv:1803.08494, table 2)",
        figure=lambda e: float(e.samples),
    ),
    Rule(
        check="batch norm span",
        level="fine",
        text=_span_text,
        figure=lambda e: float(e.samples),
    ),
)


class StatisticsMoves(NamedTuple):
    """How often the running statistics move per update, with their momentum."""

    most: float
    momentum: float


MOMENTUM: tuple[Rule[StatisticsMoves], ...] = (
    Rule(
        check="batch norm momentum",
        level="note",
        when=lambda e: e.most > 1.5,
        text=lambda e: (
            f"running statistics move {e.most:.3g} times per update: a momentum of "
            f"{e.momentum:g} acts as {1 - (1 - e.momentum) ** e.most:.3g}"
        ),
        remedy=lambda e: (
            "for the same average over updates set momentum to "
            f"{1 - (1 - e.momentum) ** (1 / e.most):.3g}"
        ),
        figure=lambda e: e.most,
    ),
)


class Distance(NamedTuple):
    """Largest distance of the workers' running means, in standard deviations."""

    deviations: float


def _distance_text(e: Distance) -> str:
    return (
        f"workers' running means differ by up to {three_digits(e.deviations)} standard deviations"
    )


STATISTICS: tuple[Rule[Distance], ...] = (
    Rule(
        check="running statistics",
        level="note",
        when=lambda e: e.deviations > _FAR,
        text=_distance_text,
        remedy="before evaluating, pool them on all workers: largebatch.polish.polish",
        figure=lambda e: e.deviations,
    ),
    Rule(
        check="running statistics",
        level="fine",
        text=_distance_text,
        figure=lambda e: e.deviations,
    ),
)


class MovesBefore(NamedTuple):
    """How often the model's running statistics have moved before the audit."""

    most: int


TOO_FEW_MOVES: tuple[Rule[MovesBefore], ...] = (
    Rule(
        check="averaged statistics",
        level="fine",
        when=lambda e: e.most <= WARM,
        text=f"the model's have moved {WARM} times at most, too few to compare",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Averaged:
    """Running statistics of averaged weights beside exact ones."""

    shift: float
    """Largest shift of a mean, in standard deviations."""

    loss: float
    exact_loss: float
    """Loss with exact statistics."""


def _averaged_text(e: Averaged) -> str:
    return (
        f"means are up to {three_digits(e.shift)} standard deviations from exact ones; with those "
        f"the loss is {e.exact_loss:.4g}, not {e.loss:.4g}"
    )


AVERAGED: tuple[Rule[Averaged], ...] = (
    Rule(
        check="averaged statistics",
        level="fault",
        when=lambda e: e.loss > e.exact_loss * (1 + _WORSE),
        text=_averaged_text,
        remedy="measure them on all workers before evaluating: largebatch.polish.polish",
        figure=lambda e: e.shift,
    ),
    Rule(
        check="averaged statistics",
        level="fine",
        text=_averaged_text,
        figure=lambda e: e.shift,
    ),
)
