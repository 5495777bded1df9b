"""Decoders that stay open between passes over images, such as two evaluations.

Opening a decoder starts threads and, with DALI, builds a pipeline and allocates memory; reusing
one costs nothing.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

from largebatch.data.types import Decode


class IdleDecoders:
    """Open decoders that are not in use, at most one per name."""

    def __init__(self) -> None:
        self._idle: dict[str, tuple[ExitStack, Decode]] = {}

    @property
    def names(self) -> set[str]:
        """Names of the idle decoders."""
        return set(self._idle)

    @contextmanager
    def borrow(
        self, name: str, opened: Callable[[], AbstractContextManager[Decode]]
    ) -> Iterator[Decode]:
        """Yield the idle decoder of this name, or open one.

        It is idle after the block. If the block fails or is left early, the decoder has pending
        work and is closed instead.
        """
        stack, decode = self._idle.pop(name) if name in self._idle else _open(opened())
        with stack:
            yield decode
            self._close(name)  # another one of this name that was in use at the same time
            self._idle[name] = stack.pop_all(), decode

    def close(self) -> None:
        """Close all idle decoders."""
        for name in list(self._idle):
            self._close(name)

    def _close(self, name: str) -> None:
        if name in self._idle:
            self._idle.pop(name)[0].close()


def _open(opened: AbstractContextManager[Decode]) -> tuple[ExitStack, Decode]:
    stack = ExitStack()
    return stack, stack.enter_context(opened)
