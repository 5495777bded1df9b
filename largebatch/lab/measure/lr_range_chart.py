"""The result of a learning-rate range test as a chart, as sentences and as JSON."""

from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from largebatch.lab.measure.lr_range_bounds import WALL, Bound, Curve, RangeTest, momentum_of
from largebatch.recipe.optimizers import LAMB, LARS, AdamW, Muon
from largebatch.recipe.schedule import Cycle
from largebatch.report.style import COLOURS, INK, MUTED, name_axes, name_line, save_png, write_title

if TYPE_CHECKING:
    from largebatch.report.style import Axes, Figure


def describe(test: RangeTest) -> list[str]:
    """Return the result of a range test as sentences: bounds, reasons, and what is uncertain."""
    return [*_found(test), *_open(test), *_peak(test), *_optimizer(test), _beginning(test)]


def _found(test: RangeTest) -> Iterator[str]:
    lower, steepest, turn, upper = test.lower, test.steepest, test.turn, test.upper
    if lower is None or steepest is None:
        return
    seeds = f"In {len(test.curves)} seeds t" if len(test.curves) > 1 else "T"
    yield (
        f"{seeds}he loss begins to fall at a rate of {_interval(lower)}, falls fastest at "
        f"{_interval(steepest)}" + (f" and turns at {_interval(turn)}." if turn else ".")
    )
    if upper is not None and turn is not None:
        if upper.value <= lower.value:
            yield "It turns so soon that no range is left between bounds: try more --steps."
            return
        yield (
            f"Suggested bounds: {rate(lower.value)} to {rate(upper.value)}. The upper one is the "
            f"mean of the rate at which the loss turns and of that over {test.overshoot:.2g}: a "
            "test goes through every rate in a few updates and the loss turns only when an "
            "instability has grown, on a quadratic with momentum "
            f"{momentum_of(test.recipe):g} at 1 to {test.overshoot:.2g} times the limit."
        )
        yield (
            f"A cyclic policy (tri, sin, cos, restarts) would have low_lr {rate(lower.value)} and "
            f"peak_lr {rate(upper.value)} (arXiv:1506.01186, section 3.3){_cycle_now(test)}."
        )


def _cycle_now(test: RangeTest) -> str:
    decay = test.recipe.schedule.decay
    if not isinstance(decay, Cycle):
        return ""
    return (
        f"; {decay.kind} of this recipe has {rate(decay.low_lr)} and "
        f"{rate(test.recipe.schedule.peak_lr)}"
    )


def _open(test: RangeTest) -> Iterator[str]:
    """Yield which end of the range to widen, and which bounds are uncertain."""
    still = [curve for curve in test.curves if not curve.falls]
    if still:
        only_rises = all(curve.rises or curve.diverged is not None for curve in still)
        side = "it only rises: give a lower --low" if only_rises else "give a higher --high"
        yield (
            f"In {len(still)} of {len(test.curves)} seeds the loss does not fall by more than its "
            f"noise between {rate(test.low)} and {rate(test.high)}; {side}, or more --steps."
        )
        return
    if any(curve.falls_at_once for curve in test.curves):
        yield "It falls from the lowest rate on: a lower --low would show where that begins."
    flat = [curve for curve in test.curves if not curve.rises]
    if flat:
        yield (
            f"In {len(flat)} of {len(test.curves)} seeds it does not rise again up to "
            f"{rate(test.high)}, so that there is no upper bound: give a higher --high."
        )
    bounds = {"lower": test.lower, "upper": test.upper}
    for name, limit in bounds.items():
        if limit is not None and not limit.certain:
            yield (
                f"The seeds differ by a factor of {limit.high / limit.low:.1f} about the {name} "
                "bound: more --steps determine it better."
            )
    if len(test.curves) == 1:
        yield "One seed does not show how certain that is: --seeds 3 does."


def _peak(test: RangeTest) -> Iterator[str]:
    peak = f"peak_lr of the recipe, {rate(test.recipe.schedule.peak_lr)}, lies "
    match test.peak_is:
        case "below":
            yield f"{peak}below: at such a rate the loss hardly falls in so few updates."
        case "inside":
            yield f"{peak}within the bounds."
        case "above":
            ramp = test.recipe.schedule.warmup is not None
            yield f"{peak}above: " + (
                "its warm-up must make that possible."
                if ramp
                else "without a warm-up it may diverge."
            )


def _optimizer(test: RangeTest) -> Iterator[str]:
    """Yield the meaning of a rate for an optimizer whose steps are relative to the weights."""
    optimizer = test.recipe.optimizer
    if isinstance(optimizer, LARS):
        text = (
            "With LARS a rate is multiplied by eta |weights| / |gradient| of every layer: rate x "
            "eta is the length of a step relative to the weights, so that the range lies elsewhere "
            "than that of SGD"
        )
        if test.upper is not None:
            text += f"; at the upper bound it is {test.upper.value * optimizer.eta:.2g}"
        yield text + ", before momentum."
        if optimizer.convention == "fujitsu":
            yield (
                f"Convention fujitsu scales weight decay by the peak rate, which is {test.high:g} "
                "here: with another --high the losses differ a little."
            )
    if isinstance(optimizer, LAMB):
        yield (
            "With LAMB a rate is the length of a step relative to the weights of a layer, so that "
            "the range lies elsewhere than that of SGD."
        )
    if isinstance(optimizer, AdamW | Muon):
        yield (
            f"With {type(optimizer).__name__} a rate is the length of a step, whatever the "
            "gradient: the range lies elsewhere than that of SGD."
        )
    if isinstance(optimizer, Muon):
        yield "The rates of optimizer.others rise with it."


def _beginning(test: RangeTest) -> str:
    if test.recipe.model.weights is not None:
        return f"The test begins with the weights in {test.recipe.model.weights}."
    return (
        "The test begins with fresh weights: after a warm-up higher rates may work, too. With "
        "--set model.weights=FILE it begins with the weights of a run."
    )


def _interval(limit: Bound) -> str:
    """Format a rate with the lowest and highest of the seeds."""
    low, high = rate(limit.low), rate(limit.high)
    return rate(limit.value) + (f" ({low} to {high})" if low != high else "")


def rate(value: float) -> str:
    """Format a rate in two digits.

    >>> rate(0.04567), rate(123.4), rate(1.0)
    ('0.046', '120', '1')
    """
    return f"{float(f'{value:.2g}'):g}"


def content(test: RangeTest) -> dict[str, Any]:
    """Return the result for JSON; losses after a divergence are null."""
    bounds = {name: getattr(test, name) for name in ("lower", "steepest", "turn", "upper")}
    return {
        "recipe": test.recipe.name,
        "optimizer": test.recipe.optimizer.kind,
        "low": test.low,
        "high": test.high,
        "steps": len(test.curves[0].rates),
        **{name: limit and asdict(limit) for name, limit in bounds.items()},
        "overshoot": test.overshoot,
        "peak_lr": test.recipe.schedule.peak_lr,
        "peak_is": test.peak_is,
        "reason": describe(test),
        "curves": [_curve(curve) for curve in test.curves],
    }


def _curve(curve: Curve) -> dict[str, Any]:
    names = ("seed", "falls", "rises", "lower", "steepest", "turn", "diverged")
    columns = ("rates", "losses", "smooth")
    return {name: getattr(curve, name) for name in names} | {
        name: getattr(curve, name).tolist() for name in columns
    }


def write_range(path: Path, test: RangeTest) -> None:
    """Write the chart of a range test to a PNG file.

    Raises OSError if it cannot be written, MissingPackageError without matplotlib.
    """
    save_png(path, partial(_draw, test=test), size=(800, 400), pixels=1200)


def _draw(figure: "Figure", test: RangeTest) -> None:
    """Plot the losses of every seed against the rate, raw and smoothed, and the bounds."""
    write_title(figure, test.recipe.name)
    axes = figure.subplots()
    axes.set_xscale("log")
    colour = COLOURS["train"]
    starts = [curve.start for curve in test.curves]
    lows = [float(np.nanmin(curve.losses)) for curve in test.curves]
    top = WALL * max(starts)
    for curve in test.curves:
        axes.plot(curve.rates, curve.losses, color=colour, lw=0.8, alpha=0.3)
        shown = curve.smooth < top
        axes.plot(curve.rates[shown], curve.smooth[shown], color=colour)
    span = max(starts) - min(lows)
    axes.set_ylim(min(lows) - 0.4 * span, max(starts) + 0.35 * span)  # the marks lie below
    axes.set_xlim(test.low, test.high)
    axes.minorticks_off()
    axes.xaxis.set_major_formatter("{x:g}")
    title = name_axes(axes, y="Training loss", x="Learning rate")
    title = name_line(axes, f"{len(test.curves)} seeds, smoothed", colour, after=title)
    _draw_bounds(axes, test)
    peak = test.recipe.schedule.peak_lr
    if test.low <= peak <= test.high:
        axes.axvline(peak, color=INK, lw=0.8, ls=(0, (5, 4)))
        name_line(axes, f"dashed: peak_lr {rate(peak)}", INK, after=title)


def _draw_bounds(axes: "Axes", test: RangeTest) -> None:
    """Shade the range between the bounds, and mark the rates with their intervals."""
    lower, upper, colour = test.lower, test.upper, COLOURS["statistics"]
    if lower is not None and upper is not None and lower.value < upper.value:
        axes.axvspan(lower.value, upper.value, color=colour, alpha=0.1, lw=0)
    marks = {"lower": lower, "steepest": test.steepest, "upper": upper, "turn": test.turn}
    for place, (name, found) in enumerate(marks.items()):
        if found is None:
            continue
        height = 0.05 + 0.06 * place  # one above the other: intervals may overlap
        transform = axes.get_xaxis_transform()
        shade = MUTED if name == "turn" else colour
        axes.plot([found.low, found.high], [height] * 2, color=shade, lw=1, transform=transform)
        axes.plot([found.value], [height], color=shade, marker="o", ms=6, transform=transform)
        left = found.low > 10 * test.low  # else there is no room
        axes.annotate(
            f"{name} {rate(found.value)}", (found.low if left else found.high, height),
            (-8 if left else 8, 0), xycoords=transform, textcoords="offset points",
            ha="right" if left else "left", va="center", color=shade, size=10,
        )  # fmt: skip
