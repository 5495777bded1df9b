"""How large a batch on one's own images: short measurements, and what they say of every batch.

The noise scale along a short run gives the epochs of a batch, E(B) = E_min (1 + B / B_noise), and
the critical batch, which takes 20 % more than E_min (arXiv:1812.06162, arXiv:2410.21676). Range
tests at two batches give the learning rate between them; the planner gives the times, on this
machine as measured or on a cluster.

Each measurement has its share of the time that is left. What it can do follows from this time and
the newest measured time of an update: a machine that other programs slow down measures less, in the
same time.
"""

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING

from largebatch import accelerator
from largebatch.errors import LargebatchError, PlanError, RecipeError
from largebatch.formatting import aligned, duration, plural, signed, three_digits
from largebatch.lab.measure.calibrate import ROUNDS, cluster_of, measure
from largebatch.lab.measure.critical_batch import at_constant_rate
from largebatch.lab.measure.estimate import Estimate, estimate
from largebatch.lab.measure.lr_range import (
    RangeTest,
    choose_range,
    range_recipe,
    read_range,
    train_in,
    train_range,
)
from largebatch.lab.planner.cluster import Cluster
from largebatch.lab.planner.forecast import name_times
from largebatch.lab.planner.prediction import FIXED_BYTES, predict
from largebatch.lab.planner.suggest import EpochLaw
from largebatch.recipe.arithmetic.plan import make_plan
from largebatch.recipe.recipe import Recipe
from largebatch.recipe.scaling import at_batch
from largebatch.recipe.writing import dump_commented
from largebatch.report.noise import BOUNDED, LEAST, MORE_STEPS, measured, over, samples
from largebatch.report.run import read_run
from largebatch.report.style import COLOURS, INK, MUTED, name_axes, save_png, write_title
from largebatch.runs.options import Options
from largebatch.tracking.noise_scale import NoiseScale

if TYPE_CHECKING:
    from largebatch.report.style import Axes, Figure

CLOSE = 1.05
"""Ratio of two times from which another batch is worth its epochs."""

SMALLER, LARGER = 4, 12
"""Doublings of the recipe's batch that are looked at, downwards and upwards."""

FAR = 4.0
"""Largest batch that is looked at, in noise scales: it takes five times the epochs."""

SQUARE_ROOT = 0.5
"""Exponent of the learning rate by batch where no edge was found."""

SHARES = {"times": 0.15, "noise": 0.5, "edges": 0.35}
"""Parts of the time: of a step by device batch, the noise scale, and the range tests."""

FIRST = 0.25
"""Part of the noise scale's updates from whose time the number of the others follows."""

THEORY = 2.0
"""Factor by which runs may differ from the noise scale, either way. An assumption: the theory
weighs directions by their curvature, the measurement weighs all equally (arXiv:1812.06162, section
2.2), and a short run is only the beginning of the long one, in which the scale grows."""

SEEDS = 3
"""Seeds of each range test, if the time suffices."""

Edges = tuple[tuple[int, RangeTest], ...]
"""Range tests by batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is asked: a recipe, its images, a time, and a machine."""

    recipe: Recipe
    options: Options
    """`out` is the folder of the runs."""

    minutes: float
    workers: int = 1
    cluster: Cluster | None = None
    """Where the recipe is to run; None: this machine, which is measured."""

    @property
    def here(self) -> int:
        """Number of workers that measure on this machine."""
        return self.workers if self.cluster is None else 1


@dataclass(slots=True)
class Measuring:
    """The measurements of one question, in turn."""

    question: Question
    remarks: list[str] = field(default_factory=list)
    end: float = field(init=False)
    """Time at which the minutes are over, by `monotonic`."""

    seconds: float = field(init=False, default=math.nan)
    """Newest measured time of an update in the recipe's batch."""

    def __post_init__(self) -> None:
        self.end = monotonic() + 60 * self.question.minutes

    def share(self, part: str) -> float:
        """Return the seconds of a part: its share of what is left for it and for later ones."""
        names = list(SHARES)
        later = sum(SHARES[name] for name in names[names.index(part) :])
        return max(0.0, self.end - monotonic()) * SHARES[part] / later

    def cluster(self, step: Estimate) -> Cluster:
        """Measure this machine; raise LargebatchError where its share of the time is too short."""
        question, recipe = self.question, self.question.recipe
        update = step.step_seconds * question.here / make_plan(recipe, workers=1).accumulation
        passes = 1.75 * (ROUNDS + 1)  # of a quarter, a half and all of a device batch
        self.require("times", passes * update, "the time of a step by device batch")
        options = question.options
        found = measure(
            recipe, data=options.data, dataset=options.dataset, workers=question.workers
        )
        return cluster_of(found, name="this machine")

    def require(self, part: str, needed: float, what: str) -> None:
        """Raise LargebatchError if a part needs more than its share, in seconds."""
        available = self.share(part)
        if needed > available:
            raise LargebatchError(
                f"--minutes {self.question.minutes:g}: {what} takes {duration(needed)} and has "
                f"{duration(available)}; give --minutes {self.enough(part, needed)} or more"
            )

    def enough(self, part: str, needed: float) -> int:
        """Return the minutes in which a part would have the seconds that it needs."""
        missing = (needed - self.share(part)) / SHARES[part]
        return math.ceil(self.question.minutes + missing / 60)

    def noise(self) -> NoiseScale:
        """Train at a constant rate and measure the noise scale."""
        recipe = self.question.recipe
        self.require("noise", LEAST * self.seconds, f"the noise scale of {LEAST} updates")
        end = monotonic() + self.share("noise")
        planned = make_plan(recipe, workers=self.question.here).steps
        most = max(planned, LEAST)
        number = min(most, int(self.share("noise") / self.seconds))
        batch, rate = recipe.batch.global_batch, recipe.schedule.peak_lr
        epochs = number * batch / recipe.train_samples
        short = at_constant_rate(recipe, batch, rate, epochs=epochs)
        first = max(LEAST, int(FIRST * number))
        self.train(short, first, made=0)
        others = min(most - first, int((end - monotonic()) / self.seconds))
        if others > 0:
            self.train(short, first + others, made=first)
        record = read_run(self.question.options.out / "noise")
        return self.judge(over(record, measured(record)), planned=planned)

    def train(self, recipe: Recipe, steps: int, *, made: int) -> None:
        """Train until a number of updates in all, of which some are made, and time the new ones."""
        options, began = self.question.options, monotonic()
        workers = self.question.here
        train_in(options.out / "noise", recipe, options, workers=workers, max_steps=steps)
        self.seconds = (monotonic() - began) / (steps - made)

    def judge(self, noise: NoiseScale, *, planned: int) -> NoiseScale:
        """Return a noise scale, with a remark where it is wide; LargebatchError without a value."""
        updates, more = plural(noise.updates, "update"), math.ceil(4 * self.question.minutes)
        if noise.value == 0 and math.isfinite(noise.high):
            raise LargebatchError(
                f"over {updates} the noise of the gradient is too small to be seen: the noise "
                f"scale is at most {samples(noise.high)}; give a smaller batch, --set "
                f"batch.global_batch=B, or --minutes {more}"
            )
        if not noise.value > 0:
            raise LargebatchError(
                f"over {updates} the gradient does not exceed its noise, so no batch can be "
                f"chosen; give --minutes {more}"
            )
        wide = noise.high / noise.low if noise.low else math.inf
        if wide > THEORY and noise.updates < planned:
            self.remarks.append(
                f"the noise scale is wide: {updates} leave a factor of {wide:.2g} between its "
                f"ends; --minutes {more} make four times the updates, and leave about "
                f"{math.sqrt(wide):.2g}"
            )
        if noise.updates < min(BOUNDED, planned):
            self.remarks.append(
                f"{updates} show the very beginning of a run, where the noise scale is lower than "
                f"later; {BOUNDED} or more are advised"
            )
        return noise

    def edges(self, batches: tuple[int, int]) -> Edges:
        """Run range tests at two batches, seed by seed; none where they take too long.

        A remark names the seeds that are missing.
        """
        recipe = self.question.recipe
        rates = choose_range(recipe, low=None, high=None, steps=None, seeds=1)
        try:
            range_recipe(recipe, rates, seed=recipe.seed)
        except LargebatchError as error:
            self.remarks.append(f"no edges of the learning rate: {error}")
            return ()
        needed = rates.steps * sum(batches) / recipe.batch.global_batch * self.seconds
        seeds = 0
        found: Edges = ()
        while seeds < SEEDS and needed <= self.share("edges"):
            start, seeds = monotonic(), seeds + 1
            found = tuple((size, self.test(at_batch(recipe, size), seeds)) for size in batches)
            needed = monotonic() - start
        if seeds < SEEDS:
            enough = self.enough("edges", needed)
            self.remarks.append(
                f"{plural(seeds, 'seed')} of each range test, at batches of {batches[0]:,} and "
                f"{batches[1]:,}: --minutes {enough} would have {seeds + 1}, and a surer rate"
            )
        return found

    def test(self, recipe: Recipe, seeds: int) -> RangeTest:
        """Run the range test of a recipe in a folder of its own, where earlier seeds are kept."""
        question = self.question
        rates = choose_range(recipe, low=None, high=None, steps=None, seeds=seeds)
        folder = question.options.out / f"range-{recipe.batch.global_batch}"
        options = replace(question.options, out=folder)
        train_range(recipe, options, rates, workers=question.here, report=False)
        return read_range(recipe, folder, rates)


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
    out = question.options.out
    try:
        out.mkdir(parents=True)
        out.rmdir()
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
    smallest = rows[0].batch
    below = max((size for size in refused if size < smallest), default=None)
    above = min((size for size in refused if size > smallest), default=None)
    if below is not None:
        yield f"no batches below {smallest:,}: {refused[below]}"
    if above is not None:
        yield f"no batch of {above:,}: {refused[above]}"


def _ends(noise: NoiseScale) -> tuple[float, float]:
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


def describe(advice: Advice) -> Iterator[str]:
    """Yield the critical batch, the table of batches, memory, the rate, and remarks."""
    value, low, high = advice.critical
    noise, chosen, ends = advice.noise, advice.chosen, advice.bounds
    yield (
        f"critical batch: {samples(value)} ({samples(low)} to {samples(high)}), which takes "
        f"{MORE_STEPS:.0%} more epochs than small batches; the interval includes a factor of "
        f"{THEORY:g} for the theory"
    )
    yield (
        f"noise scale: {samples(noise.value)} (95 %: {samples(noise.low)} to "
        f"{samples(noise.high)}), of {plural(noise.updates, 'update')}"
    )
    yield from _table(advice).split("\n")
    steps = [f"{1000 * each:.3g} ms for {size:,}" for size, each in advice.step_seconds.items()]
    if steps:
        yield f"step of one worker on {advice.cluster.name} by device batch: {', '.join(steps)}"
    if advice.most is not None:
        yield f"memory: a device batch of up to {advice.most:,} samples a worker, an estimate"
    edges = [f"{three_digits(t.upper.value)} at {size:,}" for size, t in advice.edges if t.upper]
    known = f"upper edges of range tests: {', '.join(edges) or 'none'}"
    rule = "" if advice.keeps or len(edges) > 1 else "; the square-root rule"
    yield f"learning rate: {advice.rate:.12g}, {_rate_rule(advice)}; {known}{rule}"
    yield from advice.remarks
    above = ", above the critical batch as all of this table" if advice.all_above else ""
    yield (
        f"recommended: {chosen.batch:,}, within {CLOSE - 1:.0%} of the shortest time up to the "
        f"critical batch{above}, for {chosen.epochs:.3g} epochs"
    )
    if set(ends) != {chosen.batch}:
        yield f"at the ends of the interval {ends[0]:,} and {ends[1]:,} would be recommended"


def _table(advice: Advice) -> str:
    priced = ["cost"] if any(row.cost is not None for row in advice.rows) else []
    rows = [["batch", "epochs", "interval", "time", *priced, "doubling", "", ""]]
    for before, row in zip([None, *advice.rows[:-1]], advice.rows, strict=True):
        cost = [] if row.cost is None else [three_digits(row.cost)]
        changes = ["", ""] if before is None else _changes(before, row)
        ends = f"{three_digits(row.low)} to {three_digits(row.high)}"
        mark = "<- recommended" if row == advice.chosen else ""
        numbers = (f"{row.batch:,}", f"{row.epochs:.3g}", ends, duration(row.seconds))
        rows.append([*numbers, *cost, *changes, mark])
    return aligned(rows, right=range(len(rows[0]) - 1))


def _changes(before: Row, row: Row) -> list[str]:
    """Return what a doubling changes: epochs, and time, which the cost is proportional to."""
    pairs = {"epochs": (before.epochs, row.epochs), "time": (before.seconds, row.seconds)}
    return [
        f"{signed(100 * (new / old - 1), '.0f')} % {name}" for name, (old, new) in pairs.items()
    ]


def _rate_rule(advice: Advice) -> str:
    recipe, batch = advice.recipe, advice.recipe.batch.global_batch
    if advice.keeps:
        return "the recipe's"
    ratio = f"({advice.chosen.batch} / {batch})"
    return f"the recipe's {recipe.schedule.peak_lr:g} x {ratio}^{advice.exponent:.2g}"


def write_advice(path: Path, advice: Advice) -> None:
    """Draw time and epochs by batch into a PNG file, with the recommended batch marked."""

    def draw(figure: "Figure") -> None:
        where = f"{advice.cluster.name}, {plural(advice.workers, 'worker')}"
        write_title(figure, f"{advice.recipe.name} on {where}")
        by_time, by_epochs = figure.subplots(1, 2)
        _draw_time(by_time, advice)
        _draw_epochs(by_epochs, advice)

    save_png(path, draw, size=(960, 400), pixels=1920)


def _draw_time(axes: "Axes", advice: Advice) -> None:
    times = [row.seconds for row in advice.rows]
    axes.plot(
        [row.batch for row in advice.rows], times, color=COLOURS["train"], marker="o", ms=5
    )  # fmt: skip
    axes.set_yscale("log")
    _mark(axes, advice, advice.chosen.seconds)
    name_axes(axes, y="Time of the run", x="Batch")
    name_times(axes, times)
    axes.set_ylim(bottom=min(times) / 1.6)


def _draw_epochs(axes: "Axes", advice: Advice) -> None:
    batches, epochs = [row.batch for row in advice.rows], [row.epochs for row in advice.rows]
    colour = COLOURS["clean"]
    axes.fill_between(
        batches, [row.low for row in advice.rows], [row.high for row in advice.rows],
        color=colour, alpha=0.15, lw=0,
    )  # fmt: skip
    axes.plot(batches, epochs, color=colour, marker="o", ms=5)
    axes.set_ylim(0, 1.08 * max(epochs))  # the band may be cut, the points may not
    axes.axvline(advice.critical[0], color=MUTED, lw=0.8, ls=(0, (4, 3)))
    _mark(axes, advice, advice.chosen.epochs)
    name_axes(axes, y="Epochs to the same loss; dashed: critical batch", x="Batch")


def _mark(axes: "Axes", advice: Advice, height: float) -> None:
    axes.set_xscale("log", base=2)
    shown = [row.batch for row in advice.rows][:: 1 + len(advice.rows) // 8]
    axes.set_xticks(shown, [f"{size:,}" for size in shown])
    axes.minorticks_off()
    axes.plot(advice.chosen.batch, height, color=INK, marker="D", ms=8, zorder=3)
    axes.annotate(
        f"recommended: {advice.chosen.batch:,}", (advice.chosen.batch, height), (0, -14),
        textcoords="offset points", color=INK, weight="bold", va="top",
        ha="left" if advice.chosen == advice.rows[0] else "center",
    )  # fmt: skip


def advised(advice: Advice) -> Recipe:
    """Return the recipe in the recommended batch, with its epochs and its learning rate."""
    chosen, recipe = advice.chosen, advice.recipe
    if not advice.keeps:
        recipe = at_batch(recipe, chosen.batch, epochs=chosen.epochs, rate=advice.rate)
    return recipe.model_copy(update={"name": f"{recipe.name[:80]}-{chosen.batch}"})


def draft(advice: Advice) -> str:
    """Return the text of the recommended recipe, with the source next to each changed number."""
    recipe, before = advised(advice), advice.recipe
    value, low, high = advice.critical
    interval = f"{samples(low)} to {samples(high)}"
    comments = {
        "duration": f"E (1 + B / {samples(advice.noise.value)}), from that of {before.name}",
        "batch.global_batch": f"the critical batch is {samples(value)} ({interval})",
        "schedule.peak_lr": _rate_rule(advice),
    }
    other = "its own batch" if advice.keeps else f"another than {before.batch.global_batch:,}"
    header = (
        f"{recipe.name}: written by `largebatch batch` from {before.name}, with the same shares of",
        f"the run, in {other}.",
        "Where to begin, not a result. Measured: not yet.",
    )
    return dump_commented(recipe, comments, header=header)
