"""Train image classifiers with very large mini-batches.

    from largebatch import load_recipe, run
    summary = run("digits_96", workers=2, out="runs/digits")
    summary = run(load_recipe("mine.yaml", ["seed=2"]), out="runs/mine")

`largebatch.audit` checks a training loop of your own on several workers. The names are imported on
first use: a recipe can be read, checked and planned without PyTorch.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from largebatch.distributed.environment import configure_libraries
from largebatch.errors import LargebatchError

if TYPE_CHECKING:
    from largebatch.recipe.loading import load_recipe
    from largebatch.recipe.recipe import Recipe
    from largebatch.runs.run import run

__version__ = "0.1.0"
__all__ = ["LargebatchError", "Recipe", "__version__", "load_recipe", "run"]

_PLACES = {
    "Recipe": "recipe.recipe",
    "load_recipe": "recipe.loading",
    "run": "runs.run",
}
"""Modules that are imported on first use: pydantic takes half a second, PyTorch more."""


def __getattr__(name: str) -> Any:  # noqa: ANN401 -- the signature Python gives it (PEP 562)
    if name not in _PLACES:
        raise AttributeError(f"module 'largebatch' has no attribute {name!r}")
    if name == "run" and "torch" not in sys.modules:  # with torch OpenMP has read its settings
        configure_libraries()
    return getattr(import_module(f"largebatch.{_PLACES[name]}"), name)
