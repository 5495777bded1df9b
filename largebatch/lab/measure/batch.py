"""How large a batch on one's own images: short measurements, and what they say of every batch.

The noise scale along a short run gives the epochs of a batch, E(B) = E_min (1 + B / B_noise), and
the critical batch, which takes 20 % more than E_min (arXiv:1812.06162, arXiv:2410.21676). Range
tests at two batches give the learning rate between them; the planner gives the times, on this
machine as measured or on a cluster.

`batch_parts` divides the time over these measurements.
"""

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from largebatch import accelerator
from largebatch.errors import LargebatchError, PlanError, RecipeError
from largebatch.lab.measure.batch_parts import THEORY, Edges, Measuring, Question
from largebatch.lab.measure.critical_batch import at_constant_rate
from largebatch.lab.measure.estimate import Estimate, estimate
from largebatch.lab.planner.cluster import Cluster
from largebatch.lab.planner.prediction import FIXED_BYTES, predict
from largebatch.lab.planner.suggest import EpochLaw
from largebatch.recipe.arithmetic.plan import make_plan
from largebatch.recipe.recipe import Recipe
from largebatch.recipe.scaling import at_batch
from largebatch.report.noise import MORE_STEPS
from largebatch.tracking.noise_scale import NoiseScale

CLOSE = 1.05
"""Ratio of two times from which another batch is worth its epochs."""

SMALLER, LARGER = 4, 12
"""Doublings of the recipe's batch that are looked at, downwards and upwards."""

FAR = 4.0
"""Largest batch that is looked at, in noise scales: it takes five times the epochs."""

SQUARE_ROOT = 0.5
"""Exponent of the learning rate by batch where no edge was found."""


@dataclass(frozen=True, slots=True)
class Row:
    """A run in one batch; `low` and `high` are the ends of the epochs' interval."""

    batch: int
    epochs: float
    low: float
    high: float
    seconds: float
    cost: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """Result: batches in samples, times in seconds."""

    recipe: Recipe
    cluster: Cluster
    workers: int
    noise: NoiseScale
    rows: tuple[Row, ...]
    chosen: Row
    bounds: tuple[int, int]
    """Batches that would be chosen at the lower and the upper end of the noise scale."""

    most: int | None
    """Largest device batch that memory holds, by the activations of a few samples; None if the
    memory is unknown."""

    edges: Edges
    """Range tests by batch; none where they were left out."""

    remarks: tuple[str, ...] = ()

    @property
    def critical(self) -> tuple[float, float, float]:
        """Critical batch, and the ends of its interval: 95 % of the noise scale, times THEORY."""
        low, high = _ends(self.noise)
        return MORE_STEPS * self.noise.value, MORE_STEPS * low, MORE_STEPS * high

    @property
    def exponent(self) -> float:
        """Exponent of the rate by batch between the two edges, from 0 to 1 as theory has it."""
        uppers = [(batch, test.upper) for batch, test in self.edges]
        return exponent([(batch, upper.value if upper else None) for batch, upper in uppers])

    @property
    def keeps(self) -> bool:
        """True if the chosen batch is the recipe's own."""
        return self.chosen.batch == self.recipe.batch.global_batch

    @property
    def rate(self) -> float:
        """Peak learning rate of the chosen batch."""
        own = self.recipe.schedule.peak_lr
        ratio = self.chosen.batch / self.recipe.batch.global_batch
        return own if self.keeps else float(f"{own * ratio**self.exponent:.3g}")

    @property
    def all_above(self) -> bool:
        """True if every batch of the table is above the critical batch."""
        return self.rows[0].batch > self.critical[0]

    @property
    def step_seconds(self) -> dict[int, float]:
        """Seconds of a step of one worker by device batch; empty if none was measured.

        They are on the line through the times that were measured.
        """
        found = self.cluster.measured
        if found is None:
            return {}
        whole = make_plan(self.recipe, workers=1).device_batch
        fixed = found.seconds_per_pass + found.seconds_per_update
        sizes = sorted({max(1, whole // part) for part in (4, 2, 1)})
        return {size: fixed + size * found.seconds_per_image for size in sizes}


def exponent(edges: Sequence[tuple[int, float | None]]) -> float:
    """Return the exponent of a power law through two edges; SQUARE_ROOT where one is missing.

    The best rate is proportional to 1 / (1 + B_noise / B) (arXiv:1812.06162, equation 2.6), whose
    exponent is between 0 and 1; edges outside of that are noise.

    >>> exponent([(64, 0.1), (256, 0.2)]), exponent([(64, 0.1), (256, None)])
    (0.5, 0.5)
    """
    known = [(batch, rate) for batch, rate in edges if rate]
    if len(known) < 2:
        return SQUARE_ROOT
    (first, low), (second, high) = known
    return min(1.0, max(0.0, math.log(high / low) / math.log(second / first)))


def advise(question: Question) -> Advice:
    """Measure, and choose a batch.

    Raises LargebatchError where the recipe or the images cannot be measured or the minutes are too
    few, InterruptedStudyError if a run is asked to stop.
    """
    recipe, batch = question.recipe, question.recipe.batch.global_batch
    _require_fitting(question)
    measuring = Measuring(question)
    monitored = at_constant_rate(recipe, batch, recipe.schedule.peak_lr, epochs=1)
    plan = make_plan(monitored, workers=question.here)
    once, again = (estimate(recipe, plan) for _ in range(2))  # other programs slow one of them
    step = min(once, again, key=lambda found: found.step_seconds)
    cluster = question.cluster or measuring.cluster(step)
    predict(recipe, cluster, workers=question.workers)  # before minutes have gone by
    measuring.seconds = step.step_seconds
    noise = measuring.noise()
    rows, refused = compare(question, cluster, noise)
    chosen = recommend(rows, most=MORE_STEPS * noise.value, own=batch)
    others = [row.batch for row in rows if row.batch > batch] or [rows[0].batch]
    other = chosen.batch if chosen.batch != batch else others[0]
    edges = measuring.edges((batch, other)) if other != batch else ()
    return Advice(
        recipe=recipe,
        cluster=cluster,
        workers=question.workers,
        noise=noise,
        rows=rows,
        chosen=chosen,
        bounds=_bounds(question, cluster, noise),
        most=largest_device_batch(step, plan.device_batch, question),
        edges=edges,
        remarks=(*_left_out(rows, refused), *measuring.remarks),
    )


def _require_fitting(question: Question) -> None:
    recipe = question.recipe
    batch = recipe.batch.global_batch
    if batch > recipe.train_samples:
        raise LargebatchError(
            f"batch.global_batch: {batch:,} is more than the {recipe.train_samples:,} training "
            "images; give --set batch.global_batch=B with a smaller one"
        )
    if recipe.batch.schedule or recipe.protocol:
        key, value = ("batch.schedule", "[]") if recipe.batch.schedule else ("protocol", "null")
        raise LargebatchError(
            f"{key}: one batch is to be chosen, of updates that wait for all; give --set "
            f"{key}={value}"
        )
    if question.cluster is not None:  # an installed one has the times of one network
        predict(recipe, question.cluster, workers=question.workers)
    _require_writable(question.options.out)


def _require_writable(out: Path) -> None:
    """Raise LargebatchError if the folder exists or cannot be made."""
    try:
        out.mkdir(parents=True)
        out.rmdir()
    except FileExistsError:
        raise LargebatchError(f"{out}: exists already; give another --out") from None
    except OSError as error:
        raise LargebatchError(f"--out {out}: cannot be made: {error.strerror}") from None


def compare(
    question: Question, cluster: Cluster, noise: NoiseScale
) -> tuple[tuple[Row, ...], dict[int, str]]:
    """Return the recipe's batch, its halves and its doublings, and why others cannot be run.

    The recipe's own epochs are taken to be right for its batch.
    """
    rows: list[Row] = []
    refused: dict[int, str] = {}
    recipe, batch = question.recipe, question.recipe.batch.global_batch
    length = make_plan(recipe, workers=question.workers)
    epochs = length.epoch(length.steps)

    def by(scale: float, size: int) -> float:
        return epochs * EpochLaw(1.0, scale)(size) / EpochLaw(1.0, scale)(batch)

    sizes = [int(batch * 2.0**power) for power in range(-SMALLER, LARGER + 1)]
    for size in sizes:
        if not 1 < size <= min(recipe.train_samples, max(batch, FAR * noise.value)):
            continue
        ends = sorted(by(max(1e-9, scale), size) for scale in _ends(noise))
        try:
            there = at_batch(recipe, size, epochs=by(noise.value, size))
            found = predict(there, cluster, workers=question.workers)
        except (RecipeError, PlanError) as error:
            refused[size] = str(error).splitlines()[-1].strip()  # without the heading
            continue
        row = Row(size, by(noise.value, size), ends[0], ends[1], found.seconds, found.cost)
        rows.append(row)
    return tuple(rows), refused


def _left_out(rows: Sequence[Row], refused: Mapping[int, str]) -> Iterator[str]:
    """Yield why the table begins at its smallest batch, and why the first larger one is missing."""
    smallest = rows[0].batch
    below = max((size for size in refused if size < smallest), default=None)
    above = min((size for size in refused if size > smallest), default=None)
    if below is not None:
        yield f"no batches below {smallest:,}: {refused[below]}"
    if above is not None:
        yield f"no batch of {above:,}: {refused[above]}"


def _ends(noise: NoiseScale) -> tuple[float, float]:
    """Return the ends of the noise scale, THEORY included."""
    return noise.low / THEORY, noise.high * THEORY


def recommend(rows: Sequence[Row], *, most: float, own: int) -> Row:
    """Return the batch whose time is CLOSE to the shortest one up to a batch of `most`.

    Of several the recipe's `own`, then the smallest. Where every batch is larger than `most`, the
    smallest counts.
    """
    within = [row for row in rows if row.batch <= most] or [rows[0]]
    longest = CLOSE * min(row.seconds for row in within)
    kept = [row for row in rows if row.batch == own and row.seconds <= longest]
    return next(row for row in [*kept, *within] if row.seconds <= longest)


def _bounds(question: Question, cluster: Cluster, noise: NoiseScale) -> tuple[int, int]:
    """Return the batches that are recommended at both ends of the noise scale."""
    low, high = (
        recommend(
            compare(question, cluster, replace(noise, value=max(1e-9, end)))[0],
            most=MORE_STEPS * end,
            own=question.recipe.batch.global_batch,
        )
        for end in _ends(noise)
    )
    return low.batch, high.batch


def largest_device_batch(step: Estimate, device_batch: int, question: Question) -> int | None:
    """Return the largest device batch that memory holds; 0 if not even one sample fits.

    None for a calibrated cluster, whose file does not contain its memory.
    """
    if question.cluster is not None:
        gpu = question.cluster.gpu
        if gpu is None:
            return None
        available = gpu.memory_gigabytes * 1e9 - FIXED_BYTES
    elif accelerator.count():
        available = accelerator.memory_bytes() - FIXED_BYTES
    else:
        host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        available = host / question.here
    fixed = step.memory_bytes - step.bytes_per_sample * device_batch
    return max(0, int((available - fixed) / max(1, step.bytes_per_sample)))
