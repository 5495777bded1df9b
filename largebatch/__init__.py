"""Train image classifiers with very large mini-batches.

    from largebatch import load_recipe, run
    summary = run("digits_96", workers=2, out="runs/digits")
    summary = run(load_recipe("mine.yaml", ["seed=2"]), out="runs/mine")

`audit` checks a training loop of your own on several workers. It, `run` and PyTorch are imported on
first use: a recipe can be read, checked and planned without them.
"""

import sys
from typing import TYPE_CHECKING, Any

from largebatch.distributed.environment import let_threads_sleep
from largebatch.errors import LargebatchError
from largebatch.recipe.loading import load_recipe
from largebatch.recipe.recipe import Recipe

if TYPE_CHECKING:
    from largebatch.measure.audit import audit
    from largebatch.runs.run import run

__version__ = "0.1.0"
__all__ = ["LargebatchError", "Recipe", "__version__", "audit", "load_recipe", "run"]


def __getattr__(name: str) -> Any:  # noqa: ANN401 -- the signature Python gives it (PEP 562)
    if name == "run":
        if "torch" not in sys.modules:  # once torch is imported, OpenMP has read its settings
            let_threads_sleep()
        from largebatch.runs.run import run

        return run
    if name == "audit":
        from largebatch.measure.audit import audit

        return audit
    raise AttributeError(f"module 'largebatch' has no attribute {name!r}")
