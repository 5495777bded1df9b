"""Standard streams that neither a full disk, an encoding nor a closed stream can make fail.

The record of a run is its folder; what it prints must not end it.
"""

import io
import os
import sys
from contextlib import suppress
from typing import Any


class Output(io.TextIOWrapper):
    """A standard stream that escapes what its encoding lacks, and gives up when writing fails.

    A pipe that nobody reads still raises BrokenPipeError.
    """

    lost = False
    """True if something could not be written."""

    def write(self, text: str, /) -> int:
        """Write a text, or discard it."""
        try:
            return super().write(text)
        except BrokenPipeError:
            raise
        except OSError as error:
            self._give_up(error)
            return len(text)

    def flush(self) -> None:
        """Write what is buffered, or discard it."""
        try:
            super().flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        """Discard this text and the following ones; say so once."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.fileno())
        os.close(nowhere)
        # What is still buffered goes there too; else the next write would fail with it again.
        super().flush()
        if not self.lost and sys.stderr is not self:
            reason = error.strerror or error
            sys.stderr.write(f"largebatch: the output cannot be written: {reason}\n")
        self.lost = True


def prepare_streams() -> None:
    """Make standard output and standard error of this process an Output; open the closed ones."""
    lowest = os.open(os.devnull, os.O_RDWR)
    while lowest < 3:  # a standard stream was closed: no other file may get its number
        os.set_inheritable(lowest, True)  # noqa: FBT003 -- no keyword
        lowest = os.open(os.devnull, os.O_RDWR)
    os.close(lowest)
    for name, number in (("stdout", 1), ("stderr", 2)):
        stream: Any = getattr(sys, name)
        if stream is None:
            stream = open(number, "w", encoding="utf-8", closefd=False)  # noqa: SIM115 -- it stays open
        if not isinstance(stream, io.TextIOWrapper) or isinstance(stream, Output):
            continue  # a notebook's, a test's
        with suppress(ValueError):  # detached or closed
            encoding = stream.encoding
            buffered = stream.line_buffering
            raw = stream.detach()
            setattr(
                sys,
                name,
                Output(raw, encoding=encoding, errors="backslashreplace", line_buffering=buffered),
            )
