"""The learning-rate range test: runs of a recipe whose rate rises, and bounds from their losses.

Smith's test (arXiv:1506.01186, section 3.3; arXiv:1708.07120) with exponentially rising rates as
in fastai. Each run keeps the recipe's optimizer, global batch, BatchNorm span and data and changes
only the schedule, so the losses do not depend on workers and micro-batches.

Steps are evenly spaced in the logarithm of the rate. Losses are smoothed by a straight line fitted
around every step with tricube weights (Cleveland 1979); unlike the exponential moving average of
other finders it does not lag behind the rate.

A test passes every rate within a few steps. So the loss turns only after the stability limit:
whatever shrank at lower rates must grow back first. On a quadratic without gradient noise this
takes until the rate is `overshoot` times the limit, for any number of steps; with noise and
smoothing, less. So the limit is between the rate where the loss turns and that rate over
`overshoot`, and the upper bound is their geometric mean.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from largebatch.distributed.environment import own_rank, worker_rank
from largebatch.errors import DivergedError, LargebatchError, PlanError
from largebatch.formatting import plural, table
from largebatch.recipe.arithmetic.plan import make_plan
from largebatch.recipe.loading import parse_recipe, validate_tree
from largebatch.recipe.optimizers import SGD
from largebatch.recipe.recipe import Recipe
from largebatch.recipe.section import Section
from largebatch.report.run import FloatArray, Run, read_run
from largebatch.report.style import COLOURS, INK, name_axes, name_line, save_png, write_title
from largebatch.runs.interrupts import InterruptedStudyError
from largebatch.runs.options import Options, Resume
from largebatch.runs.run import start
from largebatch.tracking.events import LOG, write_json

if TYPE_CHECKING:
    from largebatch.report.style import Figure

CHART, RESULT = "range.png", "range.json"

LOW, HIGH = 1e-3, 100.0
"""Default range, as multiples of peak_lr."""

STEPS = 100  # default number of updates, unless the momentum needs more

LEAST_STEPS = 20

MEMORIES = 2.0
"""Least updates per decade of rates, in units of momentum's 1 / (1 - m). With fewer, the loss
follows rates that are long past, and its lowest point is far from any limit."""


WINDOW = 1 / 12  # fraction of the steps on each side of a step that its line is fitted to

CLEAR = 0.1  # fraction of the total fall from which the loss counts as falling

NOISE = 3.0  # number of standard errors of the smoothed loss that exceeds noise

WALL = 1.5  # upper limit on losses, as a multiple of the first losses; also replaces NaN

APART = 2.0  # ratio between seeds' bounds from which the bound is badly determined


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One range test: the rate and training loss of every update, for one seed, and its bounds."""

    seed: int
    rates: FloatArray
    losses: FloatArray
    """Training losses; NaN from the first loss that is not finite."""

    smooth: FloatArray
    """Smoothed loss."""

    start: float
    """Smoothed loss before it falls."""

    diverged: float | None
    """Rate at the first loss that is not finite; None if all are finite."""

    lower: float | None
    """First rate at which the loss is clearly below its start; None if it never falls."""

    rises: bool
    """True if the loss rises again, as clearly as it fell."""

    turn: float | None
    """Rate of the lowest smoothed loss; None if it never falls or does not rise again."""


def curve_of(seed: int, rates: FloatArray, losses: FloatArray) -> Curve:
    """Return the curve of losses by rates, which rise by one factor in every update.

    The lowest smoothed loss is that of a step whose line is fitted on both sides; near the ends
    lines are much less certain.
    """
    edge = max(3, round(WINDOW * len(rates)))
    wall = WALL * float(np.nanmedian(losses[:edge]))
    # One huge loss at the end would lift the line of every step within its window.
    cut = np.minimum(np.where(np.isfinite(losses), losses, wall), wall)
    # Tricube weights; edge + 1 gives the outermost steps a weight above 0.
    weights = (1 - (np.abs(np.arange(-edge, edge + 1)) / (edge + 1)) ** 3) ** 3
    smooth = _smoothed(cut, weights)
    place = edge + int(np.argmin(smooth[edge : len(rates) - edge]))
    start = float(smooth[edge])
    fall = start - float(smooth[place])
    # The standard error of the smoothed loss, from the residuals while it falls.
    weights /= weights.sum()
    # For weights w that add up to 1, the smoothed loss has the variance of the noise times
    # sum(w^2), and a residual has it times 1 - 2 w_0 + sum(w^2), since each loss is part of its own
    # line.
    squares = float((weights**2).sum())
    central = float(weights.max())
    falling = slice(0, max(place, 2 * edge))
    spread = float(np.sqrt(np.mean((cut - smooth)[falling] ** 2)))
    error = spread * math.sqrt(squares / (1 - 2 * central + squares))
    clear = max(CLEAR * fall, NOISE * error)
    # The last step that is not clearly below the start: dips before it were noise.
    above = np.flatnonzero(smooth[: place + 1] > start - clear)
    below = float(rates[above[-1] + 1 if above.size else 0]) if fall > 2 * NOISE * error else None
    rises = bool(smooth[place:].max() > smooth[place] + clear)
    bad = np.flatnonzero(~np.isfinite(losses))
    return Curve(
        seed=seed,
        rates=rates,
        losses=losses,
        smooth=smooth,
        start=start,
        diverged=float(rates[bad[0]]) if bad.size else None,
        lower=below,
        rises=rises,
        turn=float(rates[place]) if below is not None and rises else None,
    )


def _smoothed(losses: FloatArray, tricube: FloatArray) -> FloatArray:
    """Return the value at each step of the straight line fitted around it."""
    reach = len(tricube) // 2
    away = np.arange(-reach, reach + 1)
    # A row for each step, with the steps of its window; those beyond the ends have weight 0.
    near = np.arange(len(losses))[:, np.newaxis] + away
    weights = tricube * ((near >= 0) & (near < len(losses)))
    values = losses[near.clip(0, len(losses) - 1)]
    # Weighted least squares of a straight line in closed form; at its own step, where x is 0, the
    # value is the intercept.
    w, wx, wxx = (np.sum(weights * away**power, axis=1) for power in (0, 1, 2))
    wy, wxy = (np.sum(weights * away**power * values, axis=1) for power in (0, 1))
    smooth: FloatArray = (wxx * wy - wx * wxy) / (w * wxx - wx**2)
    return smooth


def momentum_of(optimizer: Section) -> float:
    """Return the momentum of an optimizer; for LAMB and AdamW, beta1."""
    momentum = getattr(optimizer, "beta1", None) or getattr(optimizer, "momentum", 0.0)
    assert isinstance(momentum, float)
    return momentum


def overshoot(momentum: float, *, nesterov: bool = False) -> float:
    """Return how far beyond the stability limit the loss of a range test may still fall.

    On a quadratic, gradient descent with momentum m at rate r multiplies a direction of
    curvature h in every step by the larger root of z^2 - (1 + m - r h) z + m = 0 (Polyak 1964);
    what shrank at rates below the limit has grown back at this multiple of the limit.

    >>> [round(overshoot(momentum), 1) for momentum in (0.0, 0.5, 0.9)]
    [6.3, 3.2, 1.6]
    """
    rates = np.geomspace(1e-5, 1e3, 200_001)
    # Rates are in units of 1 / curvature. Without Nesterov the iteration is stable up to 2 (1 + m).
    limit = 2 * (1 + momentum) / (1 + 2 * momentum if nesterov else 1)
    shrink = 1 - rates if nesterov else np.ones_like(rates)
    middle = (1 + momentum) * shrink if nesterov else 1 + momentum - rates
    root = np.sqrt((middle**2 - 4 * momentum * shrink).astype(complex))
    largest = np.maximum(np.abs(middle + root), np.abs(middle - root)) / 2
    # A sum of logarithms, as each step of the test multiplies what is left of the loss.
    grown = np.cumsum(np.log(np.maximum(largest, 1e-12)))
    back = rates[(grown > 0) & (rates > limit)]
    return float(back[0] / limit)


@dataclass(frozen=True, slots=True)
class Bound:
    """A rate over several seeds: geometric mean, lowest and highest."""

    value: float
    low: float
    high: float


def bound(rates: Sequence[float | None]) -> Bound | None:
    """Combine the rates of several seeds; None if one of them has none.

    >>> bound([1.0, 4.0]), bound([1.0, None])
    (Bound(value=2.0, low=1.0, high=4.0), None)
    """
    known = [rate for rate in rates if rate is not None]
    if len(known) < len(rates):
        return None
    return Bound(math.exp(math.fsum(map(math.log, known)) / len(known)), min(known), max(known))


@dataclass(frozen=True)
class RangeTest:
    """Range test of a recipe over one or more seeds."""

    recipe: Recipe
    curves: Sequence[Curve]

    @cached_property
    def overshoot(self) -> float:
        """Largest ratio of the rate where the loss turns to the limit, by the momentum."""
        optimizer = self.recipe.optimizer
        nesterov = isinstance(optimizer, SGD) and optimizer.nesterov
        return overshoot(momentum_of(optimizer), nesterov=nesterov)

    @cached_property
    def bounds(self) -> dict[str, Bound | None]:
        """`lower`: rate at which the loss starts to fall; `turn`: rate at which it is lowest and
        turns; `upper`: the geometric mean of `turn` and `turn / overshoot`.
        """
        lower, turn = (
            bound([getattr(curve, name) for curve in self.curves]) for name in ("lower", "turn")
        )
        factor = math.sqrt(self.overshoot)
        upper = turn and Bound(turn.value / factor, turn.low / factor, turn.high / factor)
        return {"lower": lower, "turn": turn, "upper": upper}


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """The runs of a range test of one recipe."""

    recipe: Recipe
    rates: FloatArray
    """The rate of each update, which rise by one factor."""

    runs: tuple[Recipe, ...]
    """One for each seed, with its own weights and order: the recipe's and those after it."""


def plan_range(
    recipe: Recipe,
    *,
    low: float | None = None,
    high: float | None = None,
    steps: int | None = None,
    seeds: int = 1,
) -> Range:
    """Return the runs of a test; None chooses by the recipe's peak rate and momentum.

    Each is the recipe with a rate that rises from low to high, without other stages. Raises
    LargebatchError for an invalid range, too few steps, and an optimizer that allows no such rate.
    """
    peak = recipe.schedule.peak_lr
    low, high = low or LOW * peak, high or HIGH * peak
    if not high > 1.5 * low:
        raise LargebatchError(
            f"the rates rise from --low to --high, got {low:g} and {high:g}: give a higher --high; "
            f"without both they are {LOW * peak:g} and {HIGH * peak:g}"
        )
    decades = math.log10(high / low)
    momentum = momentum_of(recipe.optimizer)
    # The subtraction keeps 40.0000001 updates from becoming 41.
    least = max(LEAST_STEPS, math.ceil(MEMORIES * decades / (1 - momentum) - 1e-6))
    steps = steps or max(STEPS, least)
    if steps < least:
        raise LargebatchError(
            f"--steps {steps} are too few for the rates from {low:g} to {high:g} with momentum "
            f"{momentum:g}: at least {least}, so that the loss follows the rate; or give a "
            "narrower range"
        )
    if recipe.optimizer.averages_rates:
        raise LargebatchError(
            f"optimizer.kind: {recipe.optimizer.kind} takes a constant rate, which it averages "
            "over: a range test would average over weights of all rates; give optimizer.kind: sgd"
        )
    # The schedule begins at its low end, so it rises by 1 / gamma in each of steps - 1 updates.
    gamma = (low / high) ** (1 / (steps - 1))
    changes = {
        "duration": {"steps": steps},
        "batch": {**recipe.batch.model_dump(mode="json"), "schedule": []},
        "data": recipe.data.unscheduled.model_dump(mode="json"),
        "schedule": {
            "peak_lr": high,
            "warmup": None,
            "decay": {"kind": "exp", "gamma": gamma, "begin": "low"},
        },
        "polish": None,
        "evaluation": {},
        "nonfinite": {},
    }
    runs = tuple(
        derived(recipe, {**changes, "seed": seed}, purpose="has no range test")
        for seed in range(recipe.seed, recipe.seed + seeds)
    )
    return Range(recipe=recipe, rates=np.geomspace(low, high, steps), runs=runs)


def derived(recipe: Recipe, changes: Mapping[str, object], *, purpose: str) -> Recipe:
    """Return a recipe with other sections; raise RecipeError where they do not fit."""
    tree = {**recipe.model_dump(mode="json"), **changes}
    return validate_tree(Recipe, tree, source=f"{recipe.name}: {purpose}")


def train_range(rates: Range, options: Options, *, workers: int = 1) -> RangeTest | None:
    """Run the test with every seed in folders of `options.out`, resuming existing runs.

    Worker 0 writes its chart and range.json, and returns the result, all others None. A run may end
    by diverging. Raises
    LargebatchError before any run if the recipe cannot be tested; InterruptedStudyError if a run
    is asked to stop.
    """
    if (options.out / LOG).exists():
        raise LargebatchError(f"{options.out}: holds a run; give another --out")
    try:
        make_plan(rates.runs[0], workers=workers)
    except PlanError as error:
        raise LargebatchError(f"{rates.recipe.name}: has no range test: {error}") from None
    curves = []
    for run in rates.runs:
        folder = options.out / f"seed-{run.seed}"
        expected = run.mathematics.model_dump()
        # A run that diverged has fewer updates than planned, and is not made again.
        begun = worker_rank() is None and (folder / LOG).exists()  # with a launcher all begin
        earlier = _read(folder, expected) if begun else None
        if earlier is None or not (earlier.diverged or len(earlier.steps) == len(rates.rates)):
            with suppress(DivergedError):  # which the record has
                train_in(folder, run, options, workers=workers)
        if own_rank() == 0:
            record = _read(folder, expected)
            losses = np.full(len(rates.rates), math.nan)
            for step in record.steps:
                losses[step.step] = step.loss
            if not math.isfinite(losses[0]):
                raise LargebatchError(f"{record.path}: the first loss is not a number")
            curves.append(curve_of(run.seed, rates.rates, losses))
    if own_rank():
        return None
    test = RangeTest(rates.recipe, curves)
    write_json(options.out / RESULT, content(test))
    save_png(options.out / CHART, partial(draw, test=test), size=(800, 400), pixels=1200)
    return test


def _read(folder: Path, expected: Mapping[str, object]) -> Run:
    """Return the run in a folder; raise LargebatchError if it is of another recipe."""
    record = read_run(folder)
    assert record.recipe is not None
    if parse_recipe(record.recipe, source=str(folder)).mathematics.model_dump() != expected:
        raise LargebatchError(f"{folder}: a run of another recipe or rates; give another --out")
    return record


def train_in(
    folder: Path,
    recipe: Recipe,
    options: Options,
    *,
    workers: int,
    max_steps: int | None = None,
) -> None:
    """Start a run in a folder, or resume the one there; InterruptedStudyError if told to stop."""
    resume: Resume = "auto" if (folder / LOG).exists() else False
    run_options = replace(options.without_changes(), workers=workers, out=folder, resume=resume)
    summary = start(recipe, replace(run_options, max_steps=max_steps, report=False))
    if summary.status == "interrupted":
        raise InterruptedStudyError(f"saved in {options.out}")


def describe(test: RangeTest) -> Iterator[str]:
    """Yield the lines of a table of the bounds, and remarks on what is uncertain."""
    meanings = {
        "lower": "the loss begins to fall",
        "turn": "it turns",
        "upper": f"mean of turn and turn / {test.overshoot:.2g}, by the momentum",
    }
    known = {name: bound for name, bound in test.bounds.items() if bound is not None}
    rows = [("bound", "rate", "seeds", "meaning")]
    for name, bound in known.items():
        seeds = f"{rate(bound.low)} to {rate(bound.high)}"
        rows.append((name, rate(bound.value), seeds, meanings[name]))
    if known:
        yield from table(rows, right=[1]).split("\n")
    curves = test.curves
    number = plural(len(test.curves), "seed")
    low, high = (rate(curves[0].rates[end]) for end in (0, -1))
    still = [curve for curve in curves if curve.lower is None]
    flat = sum(not curve.rises for curve in curves)
    if still:
        only_rises = all(curve.rises or curve.diverged is not None for curve in still)
        give = "lower --low" if only_rises else "higher --high"
        yield (
            f"{len(still)} of {number}: no fall beyond the noise between {low} and {high}; give a "
            f"{give}, or more --steps"
        )
    elif flat:
        yield f"{flat} of {number}: no rise up to {high}, so no upper bound; give a higher --high"
    for name, bound in known.items():
        if name != "turn" and bound.high > APART * bound.low:
            yield f"{name}: seeds differ by a factor of {bound.high / bound.low:.1f}; more --steps"


def rate(value: float) -> str:
    """Format a rate in two digits.

    >>> rate(0.04567), rate(123.4), rate(1.0)
    ('0.046', '120', '1')
    """
    return f"{float(f'{value:.2g}'):g}"


def content(test: RangeTest) -> dict[str, Any]:
    """Return the result for JSON; losses after a divergence are null."""
    return {
        "recipe": test.recipe.name,
        **{name: limit and asdict(limit) for name, limit in test.bounds.items()},
        "overshoot": test.overshoot,
        "peak_lr": test.recipe.schedule.peak_lr,
        "curves": [
            {name: getattr(curve, name) for name in ("seed", "diverged")}
            | {name: getattr(curve, name).tolist() for name in ("rates", "losses", "smooth")}
            for curve in test.curves
        ],
    }


def draw(figure: "Figure", test: RangeTest) -> None:
    """Draw the losses of a range test, its bounds, and the recipe's rate."""
    write_title(figure, test.recipe.name)
    axes = figure.subplots()
    axes.set_xscale("log")
    colour = COLOURS["train"]
    shade = COLOURS["statistics"]
    start = max(curve.start for curve in test.curves)
    low = min(float(np.nanmin(curve.losses)) for curve in test.curves)
    for curve in test.curves:
        axes.plot(curve.rates, curve.losses, color=colour, lw=0.8, alpha=0.3)
        shown = curve.smooth < WALL * start
        axes.plot(curve.rates[shown], curve.smooth[shown], color=colour)
    axes.set_ylim(low - 0.2 * (start - low), start + 0.35 * (start - low))
    first, last = test.curves[0].rates[[0, -1]]
    axes.set_xlim(first, last)
    axes.minorticks_off()
    axes.xaxis.set_major_formatter("{x:g}")
    title = name_axes(axes, y="Training loss", x="Learning rate")
    title = name_line(axes, f"{plural(len(test.curves), 'seed')}, smoothed", colour, after=title)
    lower, upper = test.bounds["lower"], test.bounds["upper"]
    if lower is not None and upper is not None and lower.value < upper.value:
        axes.axvspan(lower.value, upper.value, color=shade, alpha=0.1, lw=0)
        bounds = f"between the bounds: {rate(lower.value)} to {rate(upper.value)}"
        title = name_line(axes, bounds, shade, after=title)
    peak = test.recipe.schedule.peak_lr
    if first <= peak <= last:
        axes.axvline(peak, color=INK, lw=0.8, ls=(0, (5, 4)))
        name_line(axes, f"dashed: peak_lr {rate(peak)}", INK, after=title)
