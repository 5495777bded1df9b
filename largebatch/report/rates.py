"""The learning rates of several recipes in one figure.

By epochs, which recipes of different batches and data have in common, by steps or by samples. The
rates of different optimizers act in different ways, so that each optimizer has a scale of its own.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from largebatch.recipe.optimizers import LARS
from largebatch.recipe.recipe import Recipe
from largebatch.report.pages import series
from largebatch.report.style import name_axes, write_chart
from largebatch.schedules.build import Course

if TYPE_CHECKING:
    from largebatch.report.style import Figure

By = Literal["epoch", "step", "samples"]


class Rates(NamedTuple):
    """A recipe and every rate of its run."""

    label: str
    recipe: Recipe
    course: Course

    @property
    def kind(self) -> str:
        """The kind of its optimizer."""
        return self.recipe.optimizer.kind

    @property
    def legend(self) -> str:
        """The recipe, its first batch, and its optimizer: with LARS, rates times eta compare."""
        optimizer = self.recipe.optimizer
        eta = f", eta {optimizer.eta:g}" if isinstance(optimizer, LARS) else ""
        return f"{self.label}: batch {self.course.plan.global_batch:,}, {self.kind}{eta}"


def write_rates_of(path: Path, rates: Sequence[Rates], *, by: By) -> None:
    """Draw the rates of several recipes into a PNG file. Raises as write_chart."""
    kinds = list(dict.fromkeys(recipe_rates.kind for recipe_rates in rates))

    def draw(figure: "Figure") -> None:
        charts = figure.subplots(len(kinds), 1, sharex=True, squeeze=False)[:, 0]
        for number, recipe_rates in enumerate(rates):
            course = recipe_rates.course
            look = series(number, recipe_rates.label)
            at: dict[By, Callable[[int], float]] = {
                "step": float, "epoch": course.plan.epoch, "samples": course.plan.position,
            }  # fmt: skip
            x = [at[by](step) for step in range(len(course.rates) + 1)]  # the last one's end, too
            # Rates of different optimizers differ by orders of magnitude, so each kind has its
            # own axes.
            charts[kinds.index(recipe_rates.kind)].plot(
                x, [*course.rates, course.rates[-1]], drawstyle="steps-post", color=look.colour,
                ls=(0, look.dash) if look.dash else "-", label=recipe_rates.legend,
            )  # fmt: skip
        for axes in charts:
            axes.set(xlim=(0, None), ylim=(0, None))
            axes.legend(loc="upper right", frameon=False)
            axes.xaxis.set_major_formatter("{x:,g}" if by == "epoch" else "{x:,.0f}")
            name_axes(axes, y="Learning rate", x=by.capitalize() if axes is charts[-1] else None)

    write_chart(path, draw, size=(960, 40 + 260 * len(kinds)))
