"""The workers of a run and what they send each other: gradients, statistics, the index.

`connect` and `Serial` are imported when they are first asked for: which worker a process is can be
told without PyTorch (`environment`).
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from largebatch.distributed.connection import connect
    from largebatch.distributed.serial import Serial

__all__ = ["Serial", "connect"]


def __getattr__(name: str) -> Any:  # noqa: ANN401 -- the signature Python gives it (PEP 562)
    if name == "Serial":
        from largebatch.distributed.serial import Serial

        return Serial
    if name == "connect":
        from largebatch.distributed.connection import connect

        return connect
    raise AttributeError(f"module 'largebatch.distributed' has no attribute {name!r}")
