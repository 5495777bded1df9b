"""The command `suggest`: write a recipe for a batch, and print its sources. It prints."""

import argparse
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from largebatch.cli.arguments import Command, count
from largebatch.cli.data import show_index
from largebatch.cli.printing import wrapped
from largebatch.cli.recipe import write_planned
from largebatch.cli.recommend import add_storage, default_storages, read_groups
from largebatch.errors import LargebatchError, MissingPackageError, StudyError, printable
from largebatch.lab.planner.draft import draft, suggested_name, words
from largebatch.lab.planner.suggest import IMAGENET, DataSet, Suggestion, suggest
from largebatch.recipe.loading import load_recipe, parse_recipe
from largebatch.recipe.recipe import Recipe
from largebatch.recipe.writing import recipe_name

if TYPE_CHECKING:
    from largebatch.lab.studies.policies.shape import Shape

NUMBERS = {
    "--samples": "training images, if not ImageNet's; then also:",
    "--val-samples": "validation images",
    "--classes": "number of classes",
    "--image-size": "side in pixels (224)",
}
"""Options that describe a data set, and what they are."""


def add_commands(command: Command) -> None:
    """Add the command `suggest`."""
    added = command("suggest", _suggest, "write a recipe for a batch between published ones")
    added.add_argument(
        "recipe", type=Path, nargs="?", help="a recipe whose images and network are kept"
    )
    added.add_argument(
        "--data", type=Path, metavar="DIR", help="instead: images, which are measured as by `init`"
    )
    added.add_argument("--batch", type=count, required=True, metavar="B", help="global batch")
    added.add_argument("--model", metavar="NAME", help="(resnet50, or the recipe's)")
    added.add_argument("--epochs", type=count, metavar="E", help="(what the epoch law takes)")
    for option, text in NUMBERS.items():
        added.add_argument(option, type=count, metavar="N", help=text)
    add_storage(added)
    added.add_argument("--out", type=Path, metavar="FILE", help="recipe to write (<name>.yaml)")


def _suggest(args: argparse.Namespace) -> int:
    if args.model is not None:
        from largebatch.models import require_known

        require_known(args.model)
    base = _base(args)
    data = _data(args) if base is None else _data_of(base)
    model = args.model or (base.model.name if base else "resnet50")
    found = suggest(args.batch, data=data, model=model, epochs=args.epochs)
    out = args.out or Path(f"{suggested_name(found)}.yaml")
    shape = _measured(found, args.storage)
    text = draft(found, schedule=shape.schedule if shape else None, base=base)
    write_planned(out, text)
    for line in words(found, has_warmup=shape is None or shape.schedule is None, base=base):
        print(wrapped(line))
    if shape is not None:
        print(wrapped(shape.words))
    print(printable(f"recipe: {out}\nlook at it: largebatch plan {shlex.quote(str(out))}"))
    return 0


def _measured(found: Suggestion, storages: list[str]) -> "Shape | None":
    """Return the schedule measured for such a recipe; None if there is none.

    An unnamed database that cannot be read is skipped with a message.
    """
    if not storages and not default_storages():
        return None
    try:
        groups = read_groups(storages)
    except (MissingPackageError, StudyError) as error:
        if storages:
            raise
        print(wrapped(f"no measured policies: {error}"))
        return None
    from largebatch.lab.studies.policies.shape import shape_for

    shape = shape_for(found, groups)
    if shape is None and storages:
        print(wrapped(f"no measured policies: none is of {found.model} on these images"))
    return shape


def _base(args: argparse.Namespace) -> Recipe | None:
    """Return the recipe that is given, or that of the images; None without either."""
    if args.recipe is None and args.data is None:
        return None
    values = {option: getattr(args, option[2:].replace("-", "_")) for option in NUMBERS}
    given = [option for option, number in values.items() if number is not None]
    if args.recipe is not None and args.data is not None:
        given.insert(0, "--data")
    if given:
        source = args.recipe or args.data
        raise LargebatchError(f"{', '.join(given)}: {source} has these already; leave it out")
    if args.recipe is not None:
        recipe = load_recipe(args.recipe)
    else:
        from largebatch.lab.measure.initial import draft as first_draft
        from largebatch.lab.measure.initial import survey

        name = recipe_name(args.data.resolve().name, otherwise="own-data")
        recipe = parse_recipe(first_draft(survey(*show_index(args.data)), name=name))
    if args.model is None:
        return recipe
    return recipe.model_copy(update={"model": recipe.model.model_validate({"name": args.model})})


def _data_of(recipe: Recipe) -> DataSet:
    images = recipe.data
    return DataSet(
        samples=images.train_split,
        val_samples=images.val_split,
        classes=images.classes,
        image_size=images.image_size,
    )


def _data(args: argparse.Namespace) -> DataSet:
    """Return the data set of the options; one other than ImageNet takes three numbers."""
    numbers = {
        "--samples": args.samples,
        "--val-samples": args.val_samples,
        "--classes": args.classes,
    }
    missing = [option for option, number in numbers.items() if number is None]
    if len(missing) == len(numbers) and args.image_size is None:
        return IMAGENET
    if missing:
        raise LargebatchError(f"another data set than ImageNet needs {', '.join(missing)} too")
    return DataSet(
        samples=args.samples,
        val_samples=args.val_samples,
        classes=args.classes,
        image_size=args.image_size or IMAGENET.image_size,
    )
