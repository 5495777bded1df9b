"""The measurements of `batch` in turn, each within its share of the time that is left.

What a part can do follows from this time and the newest measured time of an update, at its
beginning and along it: a machine that other programs slow down measures less, in the same time.
"""

import math
from dataclasses import dataclass, field, replace
from time import monotonic

from largebatch.errors import LargebatchError
from largebatch.formatting import duration, plural
from largebatch.lab.measure.calibrate import ROUNDS, cluster_of, measure
from largebatch.lab.measure.critical_batch import at_constant_rate
from largebatch.lab.measure.estimate import Estimate
from largebatch.lab.measure.lr_range import choose_range, range_recipe, read_range, train_range
from largebatch.lab.measure.lr_range_bounds import RangeTest
from largebatch.lab.planner.cluster import Cluster
from largebatch.recipe.arithmetic.plan import make_plan
from largebatch.recipe.recipe import Recipe
from largebatch.recipe.scaling import at_batch
from largebatch.report.noise import BOUNDED, LEAST, measured, over, samples
from largebatch.report.run import read_run
from largebatch.runs.interrupts import InterruptedStudyError
from largebatch.runs.options import Options
from largebatch.runs.run import start
from largebatch.tracking.noise_scale import NoiseScale

SHARES = {"times": 0.15, "noise": 0.5, "edges": 0.35}
"""Parts of the time: of a step by device batch, the noise scale, and the range tests."""

FIRST = 0.25
"""Part of the noise scale's updates from whose time the number of the others follows."""

THEORY = 2.0
"""Factor by which runs may differ from the noise scale, either way. An assumption: the theory
weighs directions by their curvature, the measurement weighs all alike (arXiv:1812.06162, section
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
        options, start_time = self.question.options, monotonic()
        of_part = replace(
            options.without_changes(),
            workers=self.question.here,
            out=options.out / "noise",
            resume="auto" if made else False,
            max_steps=steps,
            report=False,
        )
        summary = start(recipe, of_part)
        if summary.status == "interrupted":
            raise InterruptedStudyError(f"saved in {options.out}")
        self.seconds = (monotonic() - start_time) / (steps - made)

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
                f"over {updates} the gradient does not stand out of its noise, so no batch can be "
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
