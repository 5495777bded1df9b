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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from time import monotonic

from largebatch.errors import LargebatchError, PlanError, RecipeError
from largebatch.formatting import duration, plural, table, three_digits
from largebatch.lab.measure.calibrate import ROUNDS, cluster_of, measure
from largebatch.lab.measure.estimate import estimate
from largebatch.lab.measure.lr_range import derived, plan_range, train_in, train_range
from largebatch.lab.planner.cluster import Cluster
from largebatch.lab.planner.prediction import predict, workload
from largebatch.lab.planner.suggest import EpochLaw
from largebatch.recipe.arithmetic.plan import make_plan
from largebatch.recipe.recipe import Recipe
from largebatch.recipe.scaling import at_batch
from largebatch.recipe.writing import dump_commented
from largebatch.report.noise import BOUNDED, LEAST, MORE_STEPS, measured, over
from largebatch.report.run import read_run
from largebatch.runs.options import Options
from largebatch.storage import writing
from largebatch.tracking.noise_scale import NoiseScale

CLOSE = 1.05  # ratio of two times from which another batch is worth its epochs

SMALLER, LARGER = 4, 12
"""Doublings of the recipe's batch that are looked at, downwards and upwards."""

FAR = 4.0  # largest batch that is looked at, in noise scales: it takes five times the epochs

SQUARE_ROOT = 0.5  # exponent of the learning rate by batch where no edge was found

SHARES = {"times": 0.15, "noise": 0.5, "edges": 0.35}
"""Parts of the time: of a step by device batch, the noise scale, and the range tests."""

FIRST = 0.25  # part of the noise scale's updates from whose time the number of the others follows

THEORY = 2.0
"""Factor by which runs may differ from the noise scale, either way. An assumption: the theory
weighs directions by their curvature, the measurement weighs all equally (arXiv:1812.06162, section
2.2), and a short run is only the beginning of the long one, in which the scale grows."""

SEEDS = 3  # seeds of each range test, if the time suffices

Edges = tuple[tuple[int, float | None], ...]
"""Upper bounds of range tests by batch; None where one has none."""


@dataclass(slots=True, kw_only=True)
class Question:
    """What is asked: a recipe, its images, a time, and a machine; and its measurements, in turn."""

    recipe: Recipe
    options: Options
    """`out` is the folder of the runs."""

    minutes: float
    cluster: Cluster | None = None
    """Where the recipe is to run; None: this machine, which is measured."""

    remarks: list[str] = field(default_factory=list)
    end: float = field(init=False)
    """Time at which the minutes are over, by `monotonic`."""

    seconds: float = math.nan
    """Newest measured time of an update in the recipe's batch."""

    def __post_init__(self) -> None:
        self.end = monotonic() + 60 * self.minutes

    @property
    def here(self) -> int:
        """Number of workers that measure on this machine."""
        return self.options.workers if self.cluster is None else 1

    def share(self, part: str) -> float:
        """Return the seconds of a part: its share of what is left for it and for later ones."""
        # Parts that were faster than their share leave the rest to the later ones, so the whole
        # time is used and no part can take that of another.
        names = list(SHARES)
        later = sum(SHARES[name] for name in names[names.index(part) :])
        return max(0.0, self.end - monotonic()) * SHARES[part] / later

    def require(self, part: str, needed: float, what: str) -> None:
        """Raise LargebatchError if a part needs more than its share, in seconds."""
        available = self.share(part)
        if needed > available:
            enough = self.minutes + (needed - available) / SHARES[part] / 60
            raise LargebatchError(
                f"--minutes {self.minutes:g}: {what} would take {duration(needed)}, and its part "
                f"of the time is {duration(available)}; give --minutes {math.ceil(enough)} or more"
            )

    def this_machine(self, step_seconds: float) -> Cluster:
        """Measure this machine; raise LargebatchError where its share of the time is too short."""
        recipe = self.recipe
        options = self.options
        # An update of this worker alone, as long as one micro-batch: the planner scales it.
        update = step_seconds * self.here / make_plan(recipe, workers=1).accumulation
        passes = 1.75 * (ROUNDS + 1)  # of a quarter, a half and all of a device batch
        self.require("times", passes * update, "the time of a step by device batch")
        measured = measure(
            recipe, data=options.data, dataset=options.dataset, workers=options.workers
        )
        return cluster_of(measured, name="this machine")

    def noise(self) -> NoiseScale:
        """Train at a constant rate and measure the noise scale."""
        folder = self.options.out / "noise"
        self.require("noise", LEAST * self.seconds, f"the noise scale of {LEAST} updates")
        end = monotonic() + self.share("noise")
        planned = make_plan(self.recipe, workers=self.here).steps
        most = max(planned, LEAST)
        # The first updates show how long one really takes, with its input and its log. How many
        # follow is computed from that, because the estimate had none of these.
        number = min(most, int(self.share("noise") / self.seconds))
        short = at_constant_rate(self.recipe, updates=number)
        first = max(LEAST, int(FIRST * number))

        def train(steps: int, *, before: int) -> None:
            """Train until a number of updates in all, and time those not made before."""
            began = monotonic()
            train_in(folder, short, self.options, workers=self.here, max_steps=steps)
            self.seconds = (monotonic() - began) / (steps - before)

        train(first, before=0)
        others = min(most - first, int((end - monotonic()) / self.seconds))
        if others > 0:
            train(first + others, before=first)
        record = read_run(folder)
        return self.judge(over(record, measured(record)), planned=planned)

    def judge(self, noise: NoiseScale, *, planned: int) -> NoiseScale:
        """Return a noise scale, with a remark where it is wide; LargebatchError without a value."""
        more = f"--minutes {math.ceil(4 * self.minutes)}"
        if not noise.value > 0:
            reason = "the gradient does not exceed its noise, so no batch can be chosen"
            if noise.value == 0 and math.isfinite(noise.high):
                reason = (
                    f"the noise of the gradient is too small to be seen: the noise scale is at "
                    f"most {three_digits(noise.high)}; give a smaller batch.global_batch"
                )
            raise LargebatchError(f"over {plural(noise.updates, 'update')} {reason}; give {more}")
        # An interval narrower than the doubt about the theory needs no more updates.
        is_wide = not noise.low or noise.high > THEORY * noise.low
        if noise.updates < planned and (is_wide or noise.updates < BOUNDED):
            self.remarks.append(
                f"the noise scale is of {plural(noise.updates, 'update')}, the beginning of a run, "
                f"where it is lower than later; {BOUNDED} or more are advised, and {more} make "
                "four times as many and halve its interval"
            )
        return noise

    def edges(self, batches: tuple[int, int]) -> Edges:
        """Run range tests at two batches, seed by seed; none where they take too long."""
        try:
            steps = len(plan_range(self.recipe).rates)
        except LargebatchError as error:
            self.remarks.append(f"no edges of the learning rate: {error}")
            return ()
        # A test makes as many updates at each batch; their time is assumed to grow with the batch.
        needed = steps * sum(batches) / self.recipe.batch.global_batch * self.seconds
        seeds = 0
        edges: Edges = ()
        while seeds < SEEDS and needed <= self.share("edges"):
            begin = monotonic()
            seeds += 1
            tests = []
            for size in batches:  # earlier seeds are kept
                rates = plan_range(at_batch(self.recipe, size), seeds=seeds)
                options = replace(self.options, out=self.options.out / f"range-{size}")
                # Runs of earlier seeds are in their folders and are not made again.
                test = train_range(rates, options, workers=self.here)
                assert test is not None
                upper = test.bounds["upper"]
                tests.append((size, upper.value if upper else None))
            edges = tuple(tests)
            needed = monotonic() - begin
        if seeds < SEEDS:
            self.remarks.append(
                f"{plural(seeds, 'seed')} of each range test, at batches of {batches[0]:,} and "
                f"{batches[1]:,}: more --minutes have {SEEDS}, and a surer rate"
            )
        return edges


def at_constant_rate(recipe: Recipe, *, updates: int) -> Recipe:
    """Return the recipe at a constant rate, monitored and without polishing.

    The warm-up is at most a quarter of `updates`, and the end is never reached in these.
    """
    warmup = recipe.schedule.warmup
    # A longer warm-up would still be at tiny rates when the few updates end, and the noise scale
    # there is not that of training.
    ramp = min(make_plan(recipe).steps_in(warmup), round(updates / 4)) if warmup else 0
    changes = {
        # Far longer than what is made, so no stage ends and nothing is evaluated at its end.
        "duration": {"steps": 8 * updates + 2},
        "data": recipe.data.unscheduled.model_dump(mode="json"),
        "schedule": {
            **recipe.schedule.model_dump(mode="json"),
            "warmup": {"steps": ramp} if ramp else None,
            "start_lr": 0.0,
            "decay": {"kind": "constant"},
        },
        "polish": None,
        "evaluation": {},
        "monitor": ["noise_scale"],
    }
    return derived(recipe, changes, purpose="its noise scale cannot be measured")


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
    noise: NoiseScale
    rows: tuple[Row, ...]
    chosen: Row
    edges: Edges
    """Empty where range tests had no time."""

    remarks: tuple[str, ...] = ()

    @property
    def critical(self) -> tuple[float, float, float]:
        """Critical batch, and the ends of its interval: 95 % of the noise scale, times THEORY."""
        low, high = _ends(self.noise)
        return MORE_STEPS * self.noise.value, MORE_STEPS * low, MORE_STEPS * high

    @property
    def keeps(self) -> bool:
        """True if the chosen batch is the recipe's own."""
        return self.chosen.batch == self.recipe.batch.global_batch

    @property
    def rate(self) -> float:
        """Peak learning rate of the chosen batch."""
        peak = self.recipe.schedule.peak_lr
        ratio = self.chosen.batch / self.recipe.batch.global_batch
        return peak if self.keeps else float(f"{peak * ratio ** exponent(self.edges):.3g}")

    @property
    def advised(self) -> Recipe:
        """The recipe in the chosen batch, with its epochs and its learning rate."""
        chosen = self.chosen
        recipe = self.recipe
        if not self.keeps:
            recipe = at_batch(recipe, chosen.batch, epochs=chosen.epochs, rate=self.rate)
        return recipe.model_copy(update={"name": f"{recipe.name[:80]}-{chosen.batch}"})


def exponent(edges: Edges) -> float:
    """Return the exponent of a power law through two edges; SQUARE_ROOT where one is missing.

    The best rate is proportional to 1 / (1 + B_noise / B) (arXiv:1812.06162, equation 2.6), whose
    exponent is between 0 and 1; edges outside of that are noise.

    >>> exponent(((64, 0.1), (256, 0.2))), exponent(((64, 0.1), (256, None)))
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
    recipe = question.recipe
    batch = recipe.batch.global_batch
    _require_fitting(question)
    plan = make_plan(at_constant_rate(recipe, updates=LEAST), workers=question.here)
    # Twice, because other programs slow one of them.
    step = min(estimate(recipe, plan).step_seconds for _ in range(2))
    cluster = question.cluster or question.this_machine(step)
    work = workload(recipe, workers=question.options.workers)
    predict(work, cluster)  # before minutes have gone by
    question.seconds = step
    noise = question.noise()
    rows = compare(question, cluster, noise)
    chosen = recommend(rows, most=MORE_STEPS * noise.value, own=batch)
    # An exponent needs two batches. Where the recipe keeps its own, the next larger one is the
    # second.
    others = [row.batch for row in rows if row.batch > batch] or [rows[0].batch]
    other = chosen.batch if chosen.batch != batch else others[0]
    edges = question.edges((batch, other)) if other != batch else ()
    return Advice(
        recipe=recipe,
        noise=noise,
        rows=rows,
        chosen=chosen,
        edges=edges,
        remarks=tuple(question.remarks),
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
        predict(workload(recipe, workers=question.options.workers), question.cluster)
    out = question.options.out
    with writing(out, error=LargebatchError):
        out.mkdir(parents=True)
        out.rmdir()


def compare(question: Question, cluster: Cluster, noise: NoiseScale) -> tuple[Row, ...]:
    """Return the recipe's batch, and those of its halves and its doublings that can be run.

    The recipe's own epochs are taken to be right for its batch.
    """
    rows: list[Row] = []
    recipe = question.recipe
    batch = recipe.batch.global_batch
    length = make_plan(recipe, workers=question.options.workers)
    epochs = length.epoch(length.steps)

    def by(scale: float, size: int) -> float:
        return epochs * EpochLaw(1.0, scale)(size) / EpochLaw(1.0, scale)(batch)

    for size in (int(batch * 2.0**power) for power in range(-SMALLER, LARGER + 1)):
        if not 1 < size <= min(recipe.train_samples, max(batch, FAR * noise.value)):
            continue
        # A scale of 0 would divide by zero. Epochs fall with the scale for larger batches and rise
        # for smaller ones, hence sorted.
        low, high = sorted(by(max(1e-9, scale), size) for scale in _ends(noise))
        try:
            there = at_batch(recipe, size, epochs=by(noise.value, size))
            prediction = predict(workload(there, workers=question.options.workers), cluster)
        except (RecipeError, PlanError):
            continue
        rows.append(
            Row(size, by(noise.value, size), low, high, prediction.seconds, prediction.cost)
        )
    return tuple(rows)


def _ends(noise: NoiseScale) -> tuple[float, float]:
    return noise.low / THEORY, noise.high * THEORY


def recommend(rows: Sequence[Row], *, most: float, own: int) -> Row:
    """Return the batch whose time is CLOSE to the shortest one up to a batch of `most`.

    Of several the recipe's `own`, then the smallest. Where every batch is larger than `most`, the
    smallest counts.
    """
    # Rows are in the order of their batches, so the first that is close is the smallest.
    within = [row for row in rows if row.batch <= most] or [rows[0]]
    longest = CLOSE * min(row.seconds for row in within)
    own_rows = [row for row in rows if row.batch == own and row.seconds <= longest]
    return next(row for row in [*own_rows, *within] if row.seconds <= longest)


def describe(advice: Advice) -> Iterator[str]:
    """Yield the recommended batch, the critical one, the table, the rate, and remarks."""
    value, low, high = advice.critical
    noise = advice.noise
    chosen = advice.chosen
    yield (
        f"recommended: {chosen.batch:,}, within {CLOSE - 1:.0%} of the shortest time up to the "
        f"critical batch, for {chosen.epochs:.3g} epochs"
    )
    yield (
        f"critical batch: {three_digits(value)} ({three_digits(low)} to {three_digits(high)}), "
        f"which takes {MORE_STEPS:.0%} more epochs than small batches; the interval includes a "
        f"factor of {THEORY:g} for the theory"
    )
    yield (
        f"noise scale: {three_digits(noise.value)} (95 %: {three_digits(noise.low)} to "
        f"{three_digits(noise.high)}), of {plural(noise.updates, 'update')}"
    )
    yield from _table(advice).split("\n")
    edges = [f"{three_digits(upper)} at {size:,}" for size, upper in advice.edges if upper]
    rule = "" if advice.keeps or len(edges) > 1 else ", by the square-root rule"
    if advice.edges or advice.keeps:
        yield (
            f"learning rate: {advice.rate:.12g}, {_rate_rule(advice)}{rule}; upper edges of range "
            f"tests: {', '.join(edges) or 'none'}"
        )
    else:
        yield (
            f"learning rate: not measured, for range tests had no time; the recipe has "
            f"{_rate_rule(advice)}{rule}: test it with largebatch lab range"
        )
    yield from advice.remarks


def _table(advice: Advice) -> str:
    # Only clusters with a price have this column.
    priced = ["cost"] if any(row.cost is not None for row in advice.rows) else []
    rows = [["batch", "epochs", "interval", "time", *priced, ""]]
    for row in advice.rows:
        cost = [] if row.cost is None else [three_digits(row.cost)]
        ends = f"{three_digits(row.low)} to {three_digits(row.high)}"
        mark = "<- recommended" if row == advice.chosen else ""
        rows.append(
            [f"{row.batch:,}", f"{row.epochs:.3g}", ends, duration(row.seconds), *cost, mark]
        )
    return table(rows, right=range(len(rows[0]) - 1))


def _rate_rule(advice: Advice) -> str:
    recipe = advice.recipe
    batch = recipe.batch.global_batch
    if advice.keeps:
        return "the recipe's"
    ratio = f"({advice.chosen.batch} / {batch})"
    return f"the recipe's {recipe.schedule.peak_lr:g} x {ratio}^{exponent(advice.edges):.2g}"


def draft(advice: Advice) -> str:
    """Return the text of the recommended recipe, with the source next to each changed number."""
    recipe = advice.advised
    before = advice.recipe
    value, low, high = advice.critical
    interval = f"{three_digits(low)} to {three_digits(high)}"
    comments = {
        "duration": f"E (1 + B / {three_digits(advice.noise.value)}), from that of {before.name}",
        "batch.global_batch": f"the critical batch is {three_digits(value)} ({interval})",
        "schedule.peak_lr": _rate_rule(advice),
    }
    other = "its own batch" if advice.keeps else f"another than {before.batch.global_batch:,}"
    header = (
        f"{recipe.name}: written by `largebatch batch` from {before.name}, with the same shares of",
        f"the run, in {other}.",
        "Where to begin, not a result. Measured: not yet.",
    )
    return dump_commented(recipe, comments, header=header)
