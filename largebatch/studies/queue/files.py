"""Study files: find, read and validate them, and load their recipes."""

import json
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import TypeVar

from largebatch.errors import RecipeError
from largebatch.recipe.loading import load_recipe, parse_yaml, read_text, validate_tree
from largebatch.recipe.recipe import Recipe
from largebatch.recipe.section import Section, Updates
from largebatch.studies.queue.study import Configuration

S = TypeVar("S", bound=Section)


class Timed(Configuration):
    """A recipe of a study, and its measured updates."""

    warm_up: Updates = 2
    updates: Updates = 10
    """Number of timed updates in each start, after the warm-up updates."""

    def require_length(self, steps: int) -> None:
        """Raise RecipeError if a recipe of `steps` updates is too short."""
        needed = self.warm_up + self.updates + 2
        if steps <= needed:
            raise RecipeError(
                f"the recipe ends after {steps} updates, and {needed} are measured; give it a "
                "longer duration, or less to measure"
            )


def read_study(name: str, kind: type[S], *, suite: Traversable) -> S:
    """Read and validate a study file, or an installed study by its name.

    Raises RecipeError naming every mistake at once, each by its dotted path.
    """
    path = Path(name)
    if path.name == name and not path.suffix and not path.is_file():
        known = sorted(
            each.name.removesuffix(".yaml")
            for each in suite.iterdir()
            if each.name.endswith(".yaml")
        )
        if name not in known:
            raise RecipeError(
                f"{name}: neither a file nor an installed study; those are {', '.join(known)}"
            )
        text = (suite / f"{name}.yaml").read_text(encoding="utf-8")
    else:
        text = read_text(path, what="study")
    tree = parse_yaml(text, source=name)
    if not isinstance(tree, dict):
        sections = [key for key, field in kind.model_fields.items() if field.is_required()]
        raise RecipeError(
            f"{name}: a study is a mapping of sections; this kind has {', '.join(sections)}"
        )
    return validate_tree(kind, tree, source=name)


def base_recipe(configuration: Configuration, folder: Path) -> Recipe:
    """Load a recipe of a study whose file lies in `folder`; it must have no protocol.

    Raises RecipeError.
    """
    overrides = [f"{key}={json.dumps(value)}" for key, value in configuration.set.items()]
    file = folder / configuration.recipe
    recipe = load_recipe(file if file.is_file() else configuration.recipe, overrides)
    if recipe.protocol is not None:
        raise RecipeError(
            f"{configuration.recipe}: the recipe has a protocol, and the study gives each cell its "
            "own; leave it out of the recipe"
        )
    return recipe
