"""The critical batch of a recipe from runs at several batches.

The critical batch needs 20 % more steps to a loss than linear scaling from small batches
(arXiv:2410.21676). Steps follow S(B) = S_min (1 + B_noise / B) (arXiv:1812.06162, equation 2.11),
and linear scaling is S_min B_noise / B; so the critical batch is a fifth of B_noise.

Every batch is run at a constant rate after the recipe's warm-up, at several rates, of which the one
with the fewest steps counts. The loss is that of training, averaged over as many samples at every
batch; a step in the middle of those is where it is reached.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field

import numpy as np
from pydantic import ValidationError

from largebatch.errors import DivergedError, LargebatchError, PlanError
from largebatch.lab.measure.lr_range import require_same, train_in
from largebatch.optional import require_scipy
from largebatch.recipe.arithmetic.pieces import without_resolution
from largebatch.recipe.arithmetic.plan import make_plan
from largebatch.recipe.recipe import Recipe
from largebatch.report.noise import MORE_STEPS, over
from largebatch.report.run import FloatArray, Run, read_run
from largebatch.runs.options import Options
from largebatch.tracking.events import LOG, Step, write_json
from largebatch.tracking.noise_scale import CONFIDENCE, NoiseScale, student_reach

LEAST_BATCHES = 4
"""Least number of batches for an interval of the fit, which has two parameters."""

FACTORS = (0.5, 1.0, 2.0)
"""Factors of the rate that the square-root rule gives for a batch. While the best rate is the
first or the last, one more beyond it is tried."""

MOST_FACTORS = 3
"""Largest number of rates tried beyond FACTORS."""

MOST_SAMPLES = 4.0
"""Longest run, as a multiple of the samples of the smallest batch."""

WINDOW = 0.1
"""Window that losses are averaged over, as a fraction of the smallest batch's samples; at least
the largest batch."""

FAR = 1000.0
"""Ratio of the fitted noise scale to the batches beyond which the fit gives only a bound."""

RESULT = "critical_batch.json"


@dataclass(frozen=True, slots=True)
class Trial:
    """One run: its batch, rate, and updates to the target; None if it did not reach it."""

    batch: int
    rate: float
    steps: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Critical:
    """Result of runs at several batches; batches and noise in samples."""

    target: float
    """Training loss that all batches train to."""

    trials: tuple[Trial, ...]
    best: tuple[Trial, ...]
    """Trials with the fewest steps, one for each batch that reached the target."""

    least_steps: float
    """S_min of the fit."""

    measured: float
    low: float
    high: float
    """Critical batch, with its 95 % interval from the scatter about the fit."""

    noise: NoiseScale
    """Noise scale over the smallest batch's run to the target; a fifth of it is the prediction."""

    @property
    def predicted(self) -> float:
        """Critical batch predicted from the noise scale alone."""
        return MORE_STEPS * self.noise.value

    def more(self, batch: int) -> float:
        """Return the fraction of steps that a batch needs beyond linear scaling, by the fit."""
        return MORE_STEPS * batch / self.measured


def at_constant_rate(recipe: Recipe, batch: int, rate: float, *, epochs: float) -> Recipe:
    """Return the recipe at a batch and a constant rate, monitored and without polishing.

    The warm-up has the same number of samples at every batch, at most a quarter of `epochs`, and
    the end is never reached in these.
    """
    content, per_epoch = recipe.model_dump(), recipe.train_samples / batch
    warmup = recipe.schedule.warmup
    samples = 0.0
    if warmup is not None:
        samples = (warmup.epochs or 0) * recipe.train_samples
        samples += (warmup.steps or 0) * recipe.batch.global_batch
    ramp = round(min(samples / recipe.train_samples, epochs / 4) * per_epoch)
    longest = round(2 * MOST_SAMPLES * epochs * per_epoch) + 2
    content |= {
        "duration": {"steps": longest},
        "batch": {**content["batch"], "global_batch": batch, "schedule": ()},
        "data": without_resolution(recipe.data),
        "schedule": {
            **content["schedule"],
            "peak_lr": rate,
            "warmup": {"steps": ramp} if ramp else None,
            "start_lr": 0.0,
            "decay": {"kind": "constant"},
        },
        "polish": None,
        "evaluation": {},
        "monitor": ("noise_scale",),
    }
    return Recipe.model_validate(content)


@dataclass(frozen=True, kw_only=True)
class _Study:
    """Runs of one recipe at several batches, which resume after an interruption."""

    recipe: Recipe
    options: Options
    workers: int
    sizes: list[int]
    epochs: float
    """Epochs of the smallest batch; its loss at their end is the target."""

    trials: list[Trial] = field(default_factory=list)

    def updates(self, batch: int, epochs: float) -> int:
        return max(2, round(epochs * self.recipe.train_samples / batch))

    def window(self, batch: int) -> int:
        samples = max(self.sizes[-1], round(WINDOW * self.epochs * self.recipe.train_samples))
        return max(1, round(samples / batch))

    def rate(self, batch: int, factor: float) -> float:
        share = batch / self.recipe.batch.global_batch
        return float(f"{factor * self.recipe.schedule.peak_lr * math.sqrt(share):.3g}")

    def at(self, batch: int, rate: float) -> Recipe:
        return at_constant_rate(self.recipe, batch, rate, epochs=self.epochs)

    def train(self, batch: int, factor: float, epochs: float) -> Run:
        rate = self.rate(batch, factor)
        folder = self.options.out / f"batch-{batch}-rate-{rate:g}"
        steps = self.updates(batch, epochs)
        record = read_run(folder) if (folder / LOG).exists() else None
        recipe = self.at(batch, rate)
        if record is not None:
            require_same(record, recipe)
        if record is not None and (len(record.steps) >= steps or record.diverged):
            return record
        with suppress(DivergedError):  # the record says so
            train_in(folder, recipe, self.options, workers=self.workers, max_steps=steps)
        return read_run(folder)

    def losses(self, updates: Sequence[Step], batch: int) -> FloatArray:
        """Return the mean loss over a window at each step, where the window is complete."""
        number = self.window(batch)
        losses = np.array([step.loss for step in updates])
        if len(losses) < number:
            return np.empty(0)
        sums = np.cumsum(np.insert(losses, 0, 0.0))
        means: FloatArray = (sums[number:] - sums[:-number]) / number
        return means

    def reach(self, batch: int, factor: float, target: float) -> Trial:
        epochs = self.epochs
        while True:
            record = self.train(batch, factor, epochs)
            losses = self.losses(record.steps, batch)
            below = np.flatnonzero(losses <= target)
            if below.size or epochs >= MOST_SAMPLES * self.epochs or record.diverged:
                break
            epochs = min(2 * epochs, MOST_SAMPLES * self.epochs)
        steps = None
        if below.size:
            first = int(below[0])
            back = 0.0  # the crossing is between two updates
            if first:
                back = (target - losses[first]) / (losses[first - 1] - losses[first])
            steps = float(first + 1 - back + (self.window(batch) - 1) / 2)
        trial = Trial(batch, self.rate(batch, factor), steps)
        self.trials.append(trial)
        return trial

    def best(self, batch: int) -> Trial | None:
        reached = [t for t in self.trials if t.batch == batch and t.steps is not None]
        return min(reached, key=lambda trial: trial.steps or math.inf, default=None)

    def reach_at_each_rate(self, batch: int, target: float) -> Iterator[Trial]:
        """Try the rates of a batch, and further ones while the best is the first or the last."""
        factors = list(FACTORS)
        for factor in factors:
            yield self.reach(batch, factor, target)
        for _ in range(MOST_FACTORS):
            best = self.best(batch)
            if best is None or best.rate not in {
                self.rate(batch, factors[0]), self.rate(batch, factors[-1])
            }:  # fmt: skip
                return
            low = best.rate == self.rate(batch, factors[0])
            factors = [factors[0] / 2, *factors] if low else [*factors, factors[-1] * 2]
            yield self.reach(batch, factors[0] if low else factors[-1], target)


def measure_critical(
    recipe: Recipe, options: Options, batches: Sequence[int], *, epochs: float, workers: int = 1
) -> Iterator[Trial | Critical]:
    """Run every batch at every rate in folders of `options.out`; yield each trial, then the result.

    The target is the loss of the smallest batch at its best rate after `epochs`. Finished runs
    are not repeated. Raises LargebatchError for too few batches, or if too few reach the target;
    InterruptedStudyError if a run is asked to stop.
    """
    sizes = sorted(set(batches))
    if len(sizes) < LEAST_BATCHES:
        raise LargebatchError(
            f"--measure needs {LEAST_BATCHES} batches or more, because two parameters are fitted "
            f"and their interval needs more points; got {', '.join(map(str, sizes))}"
        )
    study = _Study(recipe=recipe, options=options, workers=workers, sizes=sizes, epochs=epochs)
    for batch in sizes:  # before hours have gone by
        try:
            make_plan(study.at(batch, recipe.schedule.peak_lr), workers=workers)
        except ValidationError as error:
            reason = error.errors()[0]["msg"].removeprefix("Value error, ")
            raise LargebatchError(f"--measure {batch}: {reason}") from None
        except PlanError as error:
            raise LargebatchError(f"--measure {batch}: {error}") from None
    first = study.updates(sizes[0], epochs)
    if study.window(sizes[0]) > first:
        raise LargebatchError(
            f"--measure {sizes[-1]}: losses are averaged over the samples of one update or more, "
            f"and {epochs:g} epochs have only {first * sizes[0]:,}; give smaller batches or more "
            "--epochs"
        )
    records = [study.train(sizes[0], factor, epochs) for factor in FACTORS]
    # A run that continued to the target of an earlier call counts as far as it first went.
    ends = [study.losses(record.steps[:first], sizes[0])[-1:] for record in records]
    target, reference = min(
        ((end.item() if end.size else math.inf), place) for place, end in enumerate(ends)
    )
    if not math.isfinite(target):
        raise LargebatchError(
            f"batch {sizes[0]} diverges at every rate tried, down to "
            f"{study.rate(sizes[0], FACTORS[0]):g}; lower schedule.peak_lr"
        )
    for batch in sizes:
        yield from study.reach_at_each_rate(batch, target)
    noise = over(records[reference], list(records[reference].steps[:first]))
    result = _fit(study, target, noise)
    write_json(options.out / RESULT, asdict(result) | {"predicted": result.predicted})
    yield result


def _fit(study: _Study, target: float, noise: NoiseScale) -> Critical:
    """Fit S(B) in logarithms to the fewest steps of each batch."""
    curve_fit = require_scipy("scipy.optimize").curve_fit
    candidates = [study.best(batch) for batch in study.sizes]
    best = [trial for trial in candidates if trial is not None]
    if len(best) < LEAST_BATCHES:
        raise LargebatchError(
            f"{len(best)} of {len(study.sizes)} batches reached a loss of {target:.4g}, and a fit "
            f"needs {LEAST_BATCHES}; give smaller batches or fewer --epochs"
        )
    batches = np.array([trial.batch for trial in best], dtype=float)
    steps = np.array([trial.steps for trial in best], dtype=float)

    def law(batch: FloatArray, least: float, scale: float) -> FloatArray:
        steps: FloatArray = least + np.log1p(np.exp(scale) / batch)
        return steps

    guess = (math.log(steps[-1] / 2), math.log(batches[-1]))
    edges = math.log(batches[0] / FAR), math.log(batches[-1] * FAR)
    (least, scale), covariance = curve_fit(
        law, batches, np.log(steps), p0=guess, bounds=([-np.inf, edges[0]], [np.inf, edges[1]])
    )
    if not edges[0] + 0.01 < scale < edges[1] - 0.01:
        counts = ", ".join(f"{trial.batch:,}: {trial.steps:,.0f}" for trial in best)
        where, give = ("above", "larger") if scale > guess[1] else ("below", "smaller")
        raise LargebatchError(
            f"steps by batch ({counts}): the critical batch is far {where} these; give {give} "
            "ones too"
        )
    reach = student_reach(CONFIDENCE, len(best) - 2) * math.sqrt(covariance[1][1])
    with np.errstate(over="ignore"):
        measured, low, high = (
            MORE_STEPS * np.exp([scale, scale - reach, scale + reach])
        ).tolist()  # fmt: skip
    return Critical(
        target=target,
        trials=tuple(study.trials),
        best=tuple(best),
        least_steps=math.exp(least),
        measured=measured,
        low=low,
        high=high,
        noise=noise,
    )
