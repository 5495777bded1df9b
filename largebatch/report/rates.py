"""The learning rates of several recipes in one figure.

By epochs, which recipes of different batches and data have in common, by steps or by samples. The
rates of different optimizers act in different ways, so that each optimizer has a scale of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from largebatch.recipe.optimizers import LARS
from largebatch.recipe.recipe import Recipe
from largebatch.report.run import FloatArray
from largebatch.report.style import (
    COLOURS,
    MARGIN,
    MUTED,
    name_axes,
    write_chart,
)
from largebatch.schedules.build import Course

if TYPE_CHECKING:
    from largebatch.report.style import Axes, Figure

By = Literal["epoch", "step", "samples"]

_LINES = ("-", (0, (5, 2)), (0, (1.5, 1.5)))
"""After the last colour they begin again in the next of these."""

WIDE = 30.0
"""From this ratio of two peaks on their axis is logarithmic."""

_DEEP = 1e-3
"""A logarithmic axis ends at this part of the lowest peak: rates that end at 0 leave it."""


@dataclass(frozen=True, slots=True)
class Rates:
    """A recipe and every rate of its run."""

    label: str
    recipe: Recipe
    course: Course

    def places(self, by: By) -> FloatArray:
        """Return where each step begins, and where the last one ends: one more than rates."""
        steps, plan = range(len(self.course.rates) + 1), self.course.plan
        match by:
            case "step":
                return np.array(steps, dtype=np.float64)
            case "epoch":
                return np.array([plan.epoch(step) for step in steps])
            case "samples":
                return np.array([plan.position(step) for step in steps], dtype=np.float64)

    @property
    def mean(self) -> float:
        """Return the mean rate over the samples: the area below the curve over its width."""
        widths = np.diff(self.places("samples"))
        return float(np.average(self.course.rates, weights=widths))

    @property
    def optimizer(self) -> str:
        """The optimizer as its rate acts: that of LARS times eta."""
        found = self.recipe.optimizer
        return f"LARS, eta {found.eta:g}" if isinstance(found, LARS) else _name(found.kind)


def _name(kind: str) -> str:
    """Return an optimizer's name as papers write it.

    >>> _name("lamb"), _name("schedule-free"), _name("adamw")
    ('LAMB', 'Schedule-Free', 'AdamW')
    """
    if kind == "adamw":
        return "AdamW"
    return kind.upper() if kind in {"lars", "sgd", "lamb"} else kind.title()


def remarks(drawn: Sequence[Rates]) -> list[str]:
    """Return what has to be known to compare these rates, one sentence each."""
    found = []
    lars = [one for each in drawn if isinstance(one := each.recipe.optimizer, LARS)]
    if len({each.recipe.optimizer.kind for each in drawn}) > 1:
        found.append(
            "Rates of different optimizers do not compare by height: LARS and LAMB scale every "
            "layer's step by its weights; those of Muon and AdamW do not grow with the gradient."
        )
    if len({each.eta for each in lars}) > 1:
        found.append("With LARS it is rate times eta that compares, and eta differs here.")
    conventions = dict.fromkeys(each.convention for each in lars)
    if len(conventions) > 1:
        found.append(
            f"LARS has {len(conventions)} conventions here, in which a rate acts differently: "
            f"{', '.join(conventions)}."
        )
    return found


def write_rates_of(path: Path, drawn: Sequence[Rates], *, by: By) -> None:
    """Draw the rates of several recipes into a PNG file.

    Raises as write_chart.
    """
    kinds = len({each.recipe.optimizer.kind for each in drawn})
    rows = len(drawn) + len(remarks(drawn))
    size = 960, 40 + 230 * kinds + 17 * rows
    write_chart(path, lambda figure: _draw(figure, drawn, by), size=size)


def _draw(figure: "Figure", drawn: Sequence[Rates], by: By) -> None:
    kinds = list(dict.fromkeys(each.recipe.optimizer.kind for each in drawn))
    charts = figure.subplots(len(kinds), 1, sharex=True, squeeze=False)[:, 0]
    colours = list(COLOURS.values())
    lines = []
    for place, each in enumerate(drawn):
        axes = charts[kinds.index(each.recipe.optimizer.kind)]
        rates = [*each.course.rates, each.course.rates[-1]]
        lines += axes.plot(
            each.places(by), rates, color=colours[place % len(colours)], drawstyle="steps-post",
            ls=_LINES[place // len(colours) % len(_LINES)], label=_legend(each),
        )  # fmt: skip
    for kind, axes in zip(kinds, charts, strict=True):
        peaks = [max(each.course.rates) for each in drawn if each.recipe.optimizer.kind == kind]
        _scale(axes, peaks)
        title = f"Learning rate, {_name(kind)}" if len(kinds) > 1 else "Learning rate"
        name_axes(axes, y=title, x=by.capitalize() if axes is charts[-1] else None)
    charts[0].set_xlim(0)
    charts[-1].xaxis.set_major_formatter("{x:,g}" if by == "epoch" else "{x:,.0f}")
    figure.legend(
        handles=lines, loc="outside lower left", frameon=False, borderpad=0,
        borderaxespad=MARGIN / 11.5,
    )  # fmt: skip
    _note(figure, remarks(drawn))


def _note(figure: "Figure", sentences: Sequence[str]) -> None:
    if sentences:
        left = MARGIN * figure.dpi / 72 / figure.bbox.width
        text = "\n".join(sentences)
        figure.suptitle(text, x=left, ha="left", size=10, color=MUTED)


def _legend(each: Rates) -> str:
    course, plan = each.course, each.course.plan
    last = plan.batch_at(len(course.rates) - 1)
    batch = f"{plan.global_batch:,}" + (f" to {last:,}" if last != plan.global_batch else "")
    epochs = f"{course.epoch(len(course.rates)):.4g}"
    return f"{each.label}: batch {batch}, {epochs} epochs, {each.optimizer}"


def _scale(axes: "Axes", peaks: Sequence[float]) -> None:
    if max(peaks) > WIDE * min(peaks):
        axes.set_yscale("log")
        axes.set_ylim(_DEEP * min(peaks), 2 * max(peaks))
        axes.minorticks_off()
    else:
        axes.set_ylim(0, 1.08 * max(peaks))
        axes.locator_params(axis="y", nbins=5)
    axes.yaxis.set_major_formatter("{x:g}")
