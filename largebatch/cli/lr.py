"""The `lr` commands: draw and measure learning rates. They print."""

import argparse
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from largebatch.cli.arguments import (
    add_command,
    add_execution,
    add_machine,
    add_recipe,
    add_set,
    add_workers,
    count,
    number,
    options_of,
    out_folder,
)
from largebatch.cli.printing import interrupted, wrapped
from largebatch.distributed.environment import own_rank
from largebatch.errors import RecipeError, printable
from largebatch.formatting import aligned
from largebatch.recipe.arithmetic.plan import plan_updates
from largebatch.recipe.loading import load_recipe
from largebatch.recipe.recipe import Recipe
from largebatch.runs.interrupts import InterruptedStudyError
from largebatch.schedules.build import follow
from largebatch.tracking.events import RECIPE

if TYPE_CHECKING:
    from largebatch.report.rates import Rates

rate = partial(number, expected="a rate above 0, such as 0.1")

BY = ("epoch", "step", "samples")
"""Axes that rates can be drawn over; listed here so that the parser needs no NumPy."""

COLUMNS = ("recipe", "optimizer", "batch", "steps", "epochs", "peak", "at", "last", "mean")


def add_commands(parser: argparse.ArgumentParser) -> None:
    """Add the commands below `lr`."""
    commands = parser.add_subparsers(metavar="COMMAND")
    command = partial(add_command, commands)

    shown = command("show", _show, "draw the learning rates of several recipes in one figure")
    shown.add_argument(
        "recipes", type=Path, nargs="+", metavar="recipe", help="a recipe, or a run folder"
    )
    add_set(shown)
    shown.add_argument("--by", choices=BY, default=BY[0], help=f"the axis ({BY[0]})")
    shown.add_argument("--out", type=Path, metavar="PNG", help="learning-rates.png")

    text = "range test: train while the rate rises, and find the usable rates"
    ranged = command("range", _range, text)
    add_recipe(ranged)
    add_execution(ranged)
    ranged.add_argument("--low", type=rate, metavar="LR", help="first rate (peak_lr / 1000)")
    ranged.add_argument("--high", type=rate, metavar="LR", help="last rate (100 x peak_lr)")
    ranged.add_argument("--steps", type=count, metavar="N", help="updates from one to the other")
    ranged.add_argument("--seeds", type=count, default=3, metavar="N", help="runs (3)")
    add_workers(ranged, dest="workers")
    add_machine(ranged)
    ranged.add_argument("--out", type=out_folder, metavar="DIR", help="folder (runs/<name>-<time>)")


def _show(args: argparse.Namespace) -> int:
    recipes = [_recipe(path, args.set) for path in args.recipes]
    from largebatch.report.rates import Rates, remarks, write_rates_of

    names = [recipe.name for recipe in recipes]
    drawn = []
    for path, recipe in zip(args.recipes, recipes, strict=True):
        label = recipe.name if names.count(recipe.name) == 1 else str(path)
        try:
            drawn.append(Rates(label, recipe, follow(recipe.schedule, plan_updates(recipe))))
        except RecipeError as error:  # of several recipes: which?
            raise RecipeError(f"{path}: {error}") from None
    figure = args.out or Path("learning-rates.png")
    write_rates_of(figure, drawn, by=args.by)
    rows = [COLUMNS, *(_row(rates, args.by) for rates in drawn)]
    print(printable(aligned(rows, right=range(2, len(COLUMNS)))))
    for remark in remarks(drawn):
        print(remark)
    print(printable(f"drawn: {figure}"))
    return 0


def _row(rates: "Rates", by: str) -> tuple[str, ...]:
    """Return a row of the table: rates in four digits, and where the peak is on the axis."""
    course, plan = rates.course, rates.course.plan
    steps, peak = len(course.rates), course.peak
    place = {
        "epoch": f"{plan.epoch(peak):.2f}",
        "step": f"{peak:,}",
        "samples": f"{plan.position(peak):,}",
    }
    return (
        rates.label,
        rates.optimizer,
        f"{plan.global_batch:,}",
        f"{steps:,}",
        f"{plan.epoch(steps):.4g}",
        f"{course.rates[peak]:.4g}",
        f"{by} {place[by]}",
        f"{course.rates[-1]:.4g}",
        f"{rates.mean:.4g}",
    )


def _recipe(path: Path, overrides: list[str]) -> Recipe:
    """Load a recipe from a file or from a run folder."""
    if path.is_dir():
        if not (path / RECIPE).exists():
            raise RecipeError(f"{path}: this folder holds no run: no {RECIPE}")
        path /= RECIPE
    return load_recipe(path, overrides)


def _range(args: argparse.Namespace) -> int:
    recipe = load_recipe(args.recipe, args.set)
    from largebatch.lab.measure.lr_range import (
        CHART,
        choose_range,
        describe,
        read_range,
        train_range,
    )
    from largebatch.runs.folder import default_folder

    rates = choose_range(
        recipe, low=args.low, high=args.high, steps=args.steps, seeds=args.seeds
    )  # fmt: skip
    options = options_of(args, out=args.out or default_folder(recipe))
    try:
        train_range(recipe, options, rates, workers=args.workers)
    except InterruptedStudyError:
        return interrupted(options.out)
    if own_rank() == 0:
        for sentence in describe(read_range(recipe, options.out, rates)):
            print(wrapped(sentence))
        print(printable(f"figure: {options.out / CHART}"))
    return 0
