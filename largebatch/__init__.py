"""Train image classifiers with very large mini-batches.

    from largebatch import load_recipe, run
    summary = run("digits_96", workers=2, out="runs/digits")
    summary = run(load_recipe("mine.yaml", ["seed=2"]), out="runs/mine")

In your own loop:

    from largebatch import LAMB, LARS, Muon, audit, evaluate, polish

The names are imported on first use: a recipe can be read, checked and planned without PyTorch.
`audit` and `polish` are packages too, see `callable_module.py`.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from largebatch.distributed.environment import configure_libraries
from largebatch.errors import LargebatchError

if TYPE_CHECKING:
    from largebatch.audit.auditing import audit
    from largebatch.optim.lamb import LAMB
    from largebatch.optim.lars import LARS
    from largebatch.optim.muon import Muon
    from largebatch.polish.statistics import polish
    from largebatch.recipe.loading import load_recipe
    from largebatch.recipe.recipe import Recipe
    from largebatch.runs.run import run
    from largebatch.training.evaluation import evaluate

__version__ = "0.1.0"
__all__ = [
    "LAMB",
    "LARS",
    "LargebatchError",
    "Muon",
    "Recipe",
    "__version__",
    "audit",
    "evaluate",
    "load_recipe",
    "polish",
    "run",
]

_PLACES = {
    "LAMB": "optim.lamb",
    "LARS": "optim.lars",
    "Muon": "optim.muon",
    "Recipe": "recipe.recipe",
    "audit": "audit",
    "evaluate": "training.evaluation",
    "load_recipe": "recipe.loading",
    "polish": "polish",
    "run": "runs.run",
}
"""Modules that are imported on first use: pydantic takes half a second, PyTorch more."""


def __getattr__(name: str) -> Any:  # noqa: ANN401 -- the signature Python gives it (PEP 562)
    if name not in _PLACES:
        raise AttributeError(f"module 'largebatch' has no attribute {name!r}")
    if name == "run" and "torch" not in sys.modules:  # with torch OpenMP has read its settings
        configure_libraries()
    module = import_module(f"largebatch.{_PLACES[name]}")
    return module if _PLACES[name] == name else getattr(module, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
