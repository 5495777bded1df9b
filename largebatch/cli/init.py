"""The command `init`: write a recipe for a folder of images. It prints."""

import argparse
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from largebatch.cli.arguments import Command
from largebatch.cli.data import show_index
from largebatch.cli.recipe import write_recipe
from largebatch.errors import DataError, LargebatchError, printable
from largebatch.formatting import aligned, duration
from largebatch.recipe.arithmetic.plan import Plan, make_plan
from largebatch.recipe.loading import parse_recipe
from largebatch.recipe.recipe import Recipe
from largebatch.recipe.writing import recipe_name

if TYPE_CHECKING:
    from largebatch.data.index.index import Index
    from largebatch.lab.measure.initial import Survey, TimeEstimate

SHOWN = 20
"""Number of classes that are printed one by one."""

UNEVEN = 4
"""Ratio of images between two classes from which the classes are called uneven."""

VALIDATIONS = ("test", "validation", "valid", "dev", "eval")
"""Other common names of the validation folder."""


def add_commands(command: Command) -> None:
    """Add the command `init`."""
    init = command("init", _init, "write a recipe for a folder of images")
    init.add_argument("folder", type=Path, metavar="DIR", help="DIR/{train,val}/<class>/* or *.tar")
    init.add_argument("--out", type=Path, metavar="FILE", help="recipe to write (<DIR>.yaml)")


def _init(args: argparse.Namespace) -> int:
    _require_splits(args.folder)
    from largebatch.lab.measure.initial import draft, estimate_time, survey

    name = recipe_name(args.folder.resolve().name, otherwise="own-data")
    out = args.out or Path(f"{name}.yaml")
    if out.exists():
        raise LargebatchError(f"{out}: exists already; choose another file with --out")
    train, val = show_index(args.folder)
    _show_classes(train, val)
    found = survey(train, val)
    text = draft(found, name=name)
    recipe = parse_recipe(text, source=str(out))
    write_recipe(out, text)
    plan = make_plan(recipe, workers=1)
    _show_choices(found, recipe, plan)
    _show_time(estimate_time(recipe, plan, found))
    where = f"{shlex.quote(str(out))} --data {shlex.quote(str(args.folder))}"
    print(printable(f"recipe: {out}\nlook at it: largebatch data show {where}"))
    print(printable(f"train it: largebatch train {where} --out {shlex.quote(f'runs/{name}')}"))
    return 0


def _require_splits(folder: Path) -> None:
    """Raise DataError if there is no validation split, with the command that makes one."""
    if (folder / "val").is_dir() or not folder.is_dir():
        return
    names = sorted(path.name for path in folder.iterdir() if path.is_dir())
    other = next((name for name in VALIDATIONS if name in names and "train" in names), None)
    choice = f"--val-name {other}" if other else "--val-fraction 0.1"
    if not names:
        raise DataError(f"{folder}: there are no folders in it; expected one for each class")
    out = shlex.quote(f"{folder.resolve().name}-shards")
    raise DataError(
        f"{folder}: there are no validation images in it (expected val); make a copy that has "
        f"some with: largebatch data import imagefolder {shlex.quote(str(folder))} {choice} "
        f"--out {out} && largebatch init {out}"
    )


def _show_classes(train: "Index", val: "Index") -> None:
    import numpy as np

    number = len(train.classes)
    counts = [np.bincount(index.labels, minlength=number).tolist() for index in (train, val)]
    rows = list(zip(train.classes, *counts, strict=True))
    table = aligned([(f"  {name}", f"{t:,} + {v:,}") for name, t, v in rows[:SHOWN]])
    print(printable(table))
    if number > SHOWN:
        print(f"  ... and {number - SHOWN} more classes")
    few, many = min(rows, key=lambda row: row[1]), max(rows, key=lambda row: row[1])
    if many[1] >= UNEVEN * few[1]:
        print(
            printable(
                f"the classes are uneven: {few[0]} has {few[1]:,} training images, {many[0]} "
                f"{many[1]:,}; top-1 counts images, so it is mostly that of large classes"
            )
        )


def _show_choices(found: "Survey", recipe: Recipe, plan: Plan) -> None:
    """Print the assumptions of the recipe, one per line."""
    import numpy as np

    sides = np.minimum(found.train.heights, found.train.widths)
    quantiles = np.quantile(sides, [0, 0.1, 0.5, 0.9, 1]).astype(int).tolist()
    data, batch = recipe.data, recipe.batch
    lines = [
        (
            f"short sides of the images: {quantiles[0]} to {quantiles[4]} pixels, half up to "
            f"{quantiles[2]} (10 %: {quantiles[1]}, 90 %: {quantiles[3]})"
        ),
        (
            f"assumed: trained at {data.image_size} x {data.image_size} pixels, by "
            f"{recipe.model.name} from random weights"
        ),
        (
            f"assumed: a global batch of {batch.global_batch}, {plan.steps_per_epoch:.1f} updates "
            f"an epoch, for {plan.epoch(plan.steps):.0f} epochs"
        ),
        f"measured: mean {list(data.mean)} and std {list(data.std)}",
        "assumed: an image mirrored left to right is of the same class (data.flip)",
        f"assumed: decoded images are {'' if recipe.execution.cache else 'not '}cached",
    ]
    print("\n".join(lines))


def _show_time(found: "TimeEstimate") -> None:
    print(
        f"about {duration(found.seconds)} on this machine, one worker on {found.device}: "
        f"{found.trained_per_second:,.0f} images a second were trained on\n"
        "  included: training and polishing, evaluations, reading the images\n"
        "  not included: starting, checkpoints, the report"
    )
