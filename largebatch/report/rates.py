"""The learning rates of several recipes in one figure.

By epochs, which recipes of different batches and data have in common, by steps or by samples. The
rates of different optimizers act in different ways, so that each optimizer has a scale of its own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from largebatch.recipe.optimizers import LARS
from largebatch.recipe.recipe import Recipe
from largebatch.report.pages import series
from largebatch.report.run import FloatArray
from largebatch.report.style import name_axes, write_chart
from largebatch.schedules.build import Course

if TYPE_CHECKING:
    from largebatch.report.style import Figure

By = Literal["epoch", "step", "samples"]


@dataclass(frozen=True, slots=True)
class Rates:
    """A recipe and every rate of its run."""

    label: str
    recipe: Recipe
    course: Course

    def places(self, by: By) -> FloatArray:
        """Return where each step begins, and where the last one ends: one more than rates."""
        plan = self.course.plan
        at: dict[By, Callable[[int], float]] = {
            "step": float, "epoch": plan.epoch, "samples": plan.position,
        }  # fmt: skip
        steps = range(len(self.course.rates) + 1)
        return np.array([at[by](step) for step in steps], dtype=np.float64)

    @property
    def mean(self) -> float:
        """Return the mean rate over the samples: the area below the curve over its width."""
        widths = np.diff(self.places("samples"))
        return float(np.average(self.course.rates, weights=widths))

    @property
    def optimizer(self) -> str:
        """The optimizer as its rate acts: that of LARS times eta."""
        found = self.recipe.optimizer
        if isinstance(found, LARS):
            return f"LARS, eta {found.eta:g}"
        return {"sgd": "SGD", "lamb": "LAMB", "adamw": "AdamW"}.get(found.kind, found.kind.title())


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
    """Draw the rates of several recipes into a PNG file. Raises as write_chart."""
    kinds = list(dict.fromkeys(each.recipe.optimizer.kind for each in drawn))

    def draw(figure: "Figure") -> None:
        charts = figure.subplots(len(kinds), 1, sharex=True, squeeze=False)[:, 0]
        for place, each in enumerate(drawn):
            look, rates = series(place, each.label), each.course.rates
            charts[kinds.index(each.recipe.optimizer.kind)].plot(
                each.places(by), [*rates, rates[-1]], drawstyle="steps-post", color=look.colour,
                ls=(0, look.dash) if look.dash else "-",
                label=f"{each.label}: batch {each.course.plan.global_batch:,}, {each.optimizer}",
            )  # fmt: skip
        for axes in charts:
            axes.set(xlim=(0, None), ylim=(0, None))
            axes.legend(loc="upper right", frameon=False)
            axes.xaxis.set_major_formatter("{x:,g}" if by == "epoch" else "{x:,.0f}")
            name_axes(axes, y="Learning rate", x=by.capitalize() if axes is charts[-1] else None)

    write_chart(path, draw, size=(960, 40 + 260 * len(kinds)))
