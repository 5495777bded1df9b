"""A run on one worker: the training loop, the stages around it, and the state of a checkpoint.

If you read one file, read `loop`. The module is called `evaluation` because `evaluate` would hide
the function of that name. The names below are imported when they are first used, so that the page
of a run is made without PyTorch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from largebatch.training.evaluation import Metrics, evaluate

__all__ = ["Metrics", "evaluate"]


def __getattr__(name: str) -> Any:  # noqa: ANN401 -- the signature Python gives it (PEP 562)
    if name not in __all__:
        raise AttributeError(f"module 'largebatch.training' has no attribute {name!r}")
    return getattr(import_module("largebatch.training.evaluation"), name)
