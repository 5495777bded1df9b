"""The command `lab sweep`: print a W&B sweep over keys of a recipe. It prints."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from largebatch.errors import LargebatchError, RecipeError
from largebatch.recipe.loading import load_recipe, parse_yaml
from largebatch.recipe.recipe import Recipe
from largebatch.recipe.writing import dump_tree
from largebatch.runs.options import Overrides

Load = Callable[[str], Recipe]
"""Load the recipe with one more override."""


def sweep(
    recipe: Path,
    /,
    *,
    keys: Annotated[tuple[str, ...], Parameter(name="--key", metavar="KEY=VALUES")],
    method: Literal["bayes", "random", "grid"] = "bayes",
    overrides: Overrides = (),
) -> int:
    """Print a W&B sweeps file for a recipe.

    Args:
        recipe: A YAML file, or the name of an installed recipe.
        keys: Key and its range schedule.peak_lr=1..32 (on a logarithmic scale), or its values
            optimizer.eta=1e-3,2e-3; may be repeated.
        method: How to search.
        overrides: Override a key of the recipe; may be repeated.
    """

    def load(override: str) -> Recipe:
        return load_recipe(recipe, [*overrides, override])

    loaded = load_recipe(recipe, overrides)
    pairs = [_parameter(text, load) for text in keys]
    parameters = dict(pairs)
    if len(parameters) < len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise LargebatchError(f"--key {twice}: given twice; give all of its values in one")
    ranges = [key for key, parameter in parameters.items() if "values" not in parameter]
    if method == "grid" and ranges:
        raise LargebatchError(
            f"--method grid goes through values, and {ranges[0]} is a range; list its values: "
            f"--key {ranges[0]}=A,B,C"
        )
    trackers = ", ".join(dict.fromkeys((*loaded.tracking, "wandb")))
    overrides = [word for one in (*overrides, f"tracking=[{trackers}]") for word in ("--set", one)]
    sweep = {
        "name": loaded.name,
        "method": method,
        "metric": {"name": "val/top1", "goal": "maximize"},
        "parameters": parameters,
        "program": "largebatch",
        "command": [
            *("${env}", "largebatch", "train", str(recipe)),
            *(*overrides, "--set", "${args_json}"),
        ],
    }
    print(dump_tree(sweep), end="")
    return 0


def _parameter(text: str, load: Load) -> tuple[str, dict[str, Any]]:
    """Return a key and its values for W&B, all checked against the recipe.

    Raises RecipeError for an unknown key and for invalid values.
    """
    key, _, values = text.partition("=")
    shown = f"--key {text}"
    if not (key and values):
        raise RecipeError(f"{shown}: expected KEY=LOW..HIGH or KEY=VALUE,VALUE,...")
    low, dots, high = values.partition("..")
    if not dots:
        for value in values.split(","):
            load(f"{key}={value}")
        return key, {"values": parse_yaml(f"[{values}]", source=shown)}
    ends = [parse_yaml(end, source=shown) for end in (low, high)]
    if not all(isinstance(end, int | float) for end in ends) or not 0 < ends[0] < ends[1]:
        raise RecipeError(
            f"{shown}: a range is LOW..HIGH with numbers above 0, the low one first; list other "
            "values with commas"
        )
    for end in ends:
        load(f"{key}={end}")
    return key, {"distribution": _distribution(key, ends, load), "min": ends[0], "max": ends[1]}


def _distribution(key: str, ends: list[float], load: Load) -> str:
    """Return the distribution of a range: log-uniform, or uniform over whole numbers.

    Whole numbers are for a key that accepts both ends but no half between them.
    """
    if not all(isinstance(end, int) for end in ends):
        return "log_uniform_values"
    try:
        load(f"{key}={ends[0] + 0.5}")
    except RecipeError:
        return "int_uniform"
    return "log_uniform_values"
