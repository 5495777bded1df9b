"""Communication between the workers of a run: gradients, statistics, the index.

The names below are imported on first use: the rank of a process can be read without PyTorch
(`environment`).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from largebatch.distributed.connection import connect, running_backend
    from largebatch.distributed.serial import Serial

__all__ = ["Serial", "connect", "running_backend"]


def __getattr__(name: str) -> Any:  # noqa: ANN401 -- the signature Python gives it (PEP 562)
    if name not in __all__:
        raise AttributeError(f"module 'largebatch.distributed' has no attribute {name!r}")
    module = "serial" if name == "Serial" else "connection"
    return getattr(import_module(f"largebatch.distributed.{module}"), name)
