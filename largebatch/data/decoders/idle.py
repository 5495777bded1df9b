"""Decoders that stay open between two passes over images, such as two evaluations.

To open one takes threads, with DALI a pipeline that is built and memory that is filled for the
first time; to use it again takes nothing.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

from largebatch.data.types import Decode


class IdleDecoders:
    """Open decoders that nobody uses, at most one of each name."""

    def __init__(self) -> None:
        self._idle: dict[str, tuple[ExitStack, Decode]] = {}

    @property
    def names(self) -> set[str]:
        """The names of those that are idle."""
        return set(self._idle)

    @contextmanager
    def borrow(
        self, name: str, opened: Callable[[], AbstractContextManager[Decode]]
    ) -> Iterator[Decode]:
        """Yield the idle decoder of this name, or one that is opened.

        It is idle after the block. If the block fails or is left early, its decoder has work that
        was not used, and is closed.
        """
        stack, decode = self._idle.pop(name) if name in self._idle else _open(opened())
        with stack:
            yield decode
            self._close(name)  # of another one that was in use at the same time
            self._idle[name] = stack.pop_all(), decode

    def close(self) -> None:
        """Close all of them."""
        for name in list(self._idle):
            self._close(name)

    def _close(self, name: str) -> None:
        if name in self._idle:
            self._idle.pop(name)[0].close()


def _open(opened: AbstractContextManager[Decode]) -> tuple[ExitStack, Decode]:
    stack = ExitStack()
    return stack, stack.enter_context(opened)
