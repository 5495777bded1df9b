"""What LRBench measures of runs (arXiv:1908.06477), from run folders: utility, cost, robustness.

Accuracy is measured at evaluations and nowhere between, so a target is reached at the first
evaluation that has it, and nothing is interpolated: every cost comes with the evaluation before. A
run that diverged is a result, as good as chance. Seeds are compared in pairs, for the same seed has
the same weights at the start and the same order of samples whatever the policy.
"""

import math
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import count
from typing import NamedTuple

from largebatch.report.course import evaluations_of
from largebatch.report.run import Run
from largebatch.tracking.events import Measured
from largebatch.tracking.noise_scale import student_reach

CONFIDENCE = 0.95

ENOUGH_SEEDS = 3
"""Fewer give no interval, or one that is mostly wider than any difference of policies."""


def has_diverged(run: Run) -> bool:
    """Return True if training stopped at a number that is not finite, or ends with such a loss.

    A stage of polishing that diverges alone is rolled back and does not count.
    """
    if run.summary is None or run.summary.status != "finished":
        return run.diverged
    return run.result is not None and not math.isfinite(run.result.loss)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Cost of a run at its first evaluation at or above a target."""

    updates: int
    updates_before: int
    """Updates at the evaluation before it, 0 without one; the target lies between the two."""

    images: int
    """Training samples of these updates, those that were skipped included."""

    seconds: float
    """Seconds of these updates, and of all evaluations and stages without updates up to this
    evaluation, as in report.course; NaN if one of them was not timed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """An evaluation in a stage that was kept, and the cost of the run up to its end."""

    step: int
    epoch: float
    images: int
    seconds: Measured
    """Both as in Cost."""

    top1: float
    top5: float
    loss: Measured


def measurements(run: Run) -> list[Measurement]:
    """Return the evaluations of kept stages in order; the time of other stages counts too."""
    course, timed = evaluations_of(run), _timed_updates(run)
    shared = {field.name for field in fields(Measurement)} - {"images", "seconds"}
    return [
        Measurement(
            images=int(images),
            seconds=float(seconds) if one.step <= timed else math.nan,
            **{name: getattr(one, name) for name in shared},
        )
        for one, images, seconds in zip(
            run.kept_evaluations, course.images, course.seconds, strict=True
        )
    ]


def _timed_updates(run: Run) -> int:
    """Return the number of first updates that were all timed, with their evaluations."""
    known = {step.step for step in run.steps if math.isfinite(step.step_seconds)}
    untimed = [found.step for found in run.evaluations if not math.isfinite(found.seconds)]
    return min([next(step for step in count() if step not in known), *(s - 1 for s in untimed)])


def cost(found: Sequence[Measurement], target: float) -> Cost | None:
    """Return the cost of a run up to a top-1 accuracy, a fraction; None if it never reached it."""
    before = 0
    for one in found:
        if one.top1 >= target:
            return Cost(
                updates=one.step, updates_before=before, images=one.images, seconds=one.seconds
            )
        before = one.step
    return None


class Interval(NamedTuple):
    """A mean with its two-sided interval at CONFIDENCE, by Student's t."""

    mean: float
    low: float
    high: float
    """Infinite ends for one value, which has no spread."""

    number: int
    """Number of values."""

    def scaled(self, factor: float) -> "Interval":
        """Return the interval in another unit, such as percent with a factor of 100."""
        return Interval(factor * self.mean, factor * self.low, factor * self.high, self.number)

    @property
    def reach(self) -> float | None:
        """Half the width; None for fewer values than ENOUGH_SEEDS."""
        return self.high - self.mean if self.number >= ENOUGH_SEEDS else None

    def text(self, form: str, unit: str = "") -> str:
        """Return the mean with its unit, and the reach if it is known.

        >>> Interval(91, 88.52, 93.48, 3).text(".2f", " %"), Interval(91, 78, 104, 2).text(".0f")
        ('91.00 % ± 2.48', '91')
        """
        reach = "" if self.reach is None else f" ± {self.reach:{form}}"
        return f"{self.mean:{form}}{unit}{reach}"

    def with_ends(self, form: str, unit: str = "") -> str:
        """Return the mean with its unit, and the ends.

        >>> Interval(1.5, 1.2, 1.875, 3).with_ends(".2f", " times")
        '1.50 times (1.20 to 1.88)'
        """
        ends = f"{self.low:{form}} to {self.high:{form}}" if self.number > 1 else "no interval"
        return f"{self.mean:{form}}{unit} ({ends})"

    @property
    def ends(self) -> dict[str, float]:
        """The columns of a chart that draw it; NaN for fewer values than ENOUGH_SEEDS."""
        low, high = (math.nan, math.nan) if self.reach is None else (self.low, self.high)
        return {"low": low, "high": high}


def interval(values: Iterable[float], *, together: int = 1) -> Interval:
    """Return the mean of values that were drawn independently, such as those of seeds.

    So many intervals `together` hold the true means with CONFIDENCE (Bonferroni). Raises ValueError
    without a value.
    """
    found = list(values)
    if not found:
        raise ValueError("expected one value or more")
    mean = statistics.fmean(found)
    if len(found) == 1:
        return Interval(mean, -math.inf, math.inf, 1)
    reach = student_reach(1 - (1 - CONFIDENCE) / together, len(found) - 1)
    reach *= statistics.stdev(found) / math.sqrt(len(found))
    return Interval(mean, mean - reach, mean + reach, len(found))


def difference(
    one: Mapping[int, float], other: Mapping[int, float], *, together: int = 1
) -> Interval:
    """Return the mean of `one` minus `other`, both by seed, over the pairs of one seed.

    `together` as in interval. Raises ValueError where no seed is in both.
    """
    pairs = (one[seed] - other[seed] for seed in one.keys() & other.keys())
    return interval(pairs, together=together)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """Ratio of two costs, over the seeds where both reached the target."""

    interval: Interval | None
    """The geometric mean; its ends are those of the mean logarithm. None without such a seed."""

    reached: int
    """Seeds where the first one reached the target."""

    reached_other: int
    seeds: int
    """Seeds that both have. Costs of the rest are only known to be higher than what was run, so
    where fewer reached it than were run the interval favours what reaches it more rarely."""


def ratio(
    one: Mapping[int, float | None], other: Mapping[int, float | None], *, together: int = 1
) -> Ratio:
    """Compare costs by seed; None is a run that never reached the target.

    `together` as in interval. Raises ValueError for a cost that is not above 0.
    """
    seeds = sorted(one.keys() & other.keys())
    pairs = [(one[seed], other[seed]) for seed in seeds]
    logs = [math.log(a) - math.log(b) for a, b in pairs if a is not None and b is not None]
    found = None
    if logs:
        mean, low, high, number = interval(logs, together=together)
        end = math.exp(high) if high < math.log(sys.float_info.max) else math.inf
        found = Interval(math.exp(mean), math.exp(low), end, number)
    return Ratio(
        interval=found,
        reached=sum(a is not None for a, _ in pairs),
        reached_other=sum(b is not None for _, b in pairs),
        seeds=len(seeds),
    )


def ratio_of_updates(
    one: Mapping[int, Cost | None], other: Mapping[int, Cost | None], *, together: int = 1
) -> Ratio:
    """Compare updates to a target by seed, as ratio does.

    A target was reached between two evaluations. So the interval is as wide as the seeds make it,
    and besides as the evaluations do: its lower end is that of `one` reached right after the
    evaluation before and `other` right at its own, the upper one the other way round.
    """
    (at, before), (other_at, other_before) = map(_updates, (one, other))
    found = ratio(at, other_at, together=together)
    if found.interval is None:
        return found
    earliest = _ends(before, other_at, together=together)
    latest = _ends(at, other_before, together=together)
    wider = found.interval._replace(low=earliest.low, high=latest.high)
    return replace(found, interval=wider)


_Updates = dict[int, float | None]


def _updates(found: Mapping[int, Cost | None]) -> tuple[_Updates, _Updates]:
    """Return the updates of costs, and those at the evaluation before."""
    at: _Updates = {seed: one.updates if one else None for seed, one in found.items()}
    return at, {seed: one.updates_before if one else None for seed, one in found.items()}


def _ends(one: _Updates, other: _Updates, *, together: int) -> Interval:
    """Return the interval of a ratio; from 0 to infinity where the first evaluation was enough."""
    if 0 in (*one.values(), *other.values()):
        return Interval(math.nan, 0.0, math.inf, 0)
    found = ratio(one, other, together=together).interval
    assert found is not None
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Costs of several runs to one target, over those that reached it."""

    reached: int
    runs: int
    """The others are censored: their cost is only known to be higher than what was run."""

    updates: Interval | None
    images: Interval | None
    seconds: Interval | None
    """Over those that were timed. None, as the others, where there is none."""


def costs(found: Sequence[Cost | None]) -> Costs:
    """Sum up the costs of runs with several seeds; None is a run that never reached the target."""
    reached = [one for one in found if one is not None]

    def mean(values: Iterable[float]) -> Interval | None:
        known = list(filter(math.isfinite, values))
        return interval(known) if known else None

    return Costs(
        reached=len(reached),
        runs=len(found),
        updates=mean(one.updates for one in reached),
        images=mean(one.images for one in reached),
        seconds=mean(one.seconds for one in reached),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Robustness:
    """How much top-1 depends on the base rate, by its means over seeds."""

    by_scale: dict[float, Interval]
    worst_drop: float
    """The mean at scale 1 minus the lowest one: 0 where that is the lowest."""

    mean: float
    """Over the scales, each counting alike."""

    area: float
    """Under the mean over the logarithm of the scale, by trapezoids, divided by its length: the
    average top-1 of a rate that is off by a factor drawn from the range on a logarithmic scale."""


def at_every_scale(top1: Iterable[tuple[int, float, float]]) -> dict[int, dict[float, list[float]]]:
    """Return accuracies, given as (seed, scale, top-1), by the seeds that were run at every scale.

    The scales are 1 and those of any seed; nothing without others. Each as robustness takes them;
    means of a study under way would be over other seeds elsewhere.
    """
    found: dict[int, dict[float, list[float]]] = {}
    for seed, scale, value in top1:
        found.setdefault(seed, {})[scale] = [value]
    scales = {1.0, *(scale for each in found.values() for scale in each)}
    return {seed: each for seed, each in found.items() if each.keys() == scales != {1.0}}


def robustness(top1: Mapping[float, Sequence[float]]) -> Robustness:
    """Sum up accuracies by scale of the base rate; runs that diverged are there as chance.

    Raises ValueError unless 1 is among two scales or more.
    """
    if 1.0 not in top1 or len(top1) < 2:
        raise ValueError(f"expected scale 1 and others, got {sorted(top1)}")
    by_scale = {scale: interval(top1[scale]) for scale in sorted(top1)}
    means = [found.mean for found in by_scale.values()]
    places = [math.log(scale) for scale in by_scale]
    strips = zip(places, places[1:], means, means[1:], strict=False)
    area = math.fsum((end - begin) * (a + b) / 2 for begin, end, a, b in strips)
    return Robustness(
        by_scale=by_scale,
        worst_drop=by_scale[1.0].mean - min(means),
        mean=statistics.fmean(means),
        area=area / (places[-1] - places[0]),
    )
