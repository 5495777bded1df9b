"""Output that several commands share: rows, tables, wrapped sentences, how to resume."""

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

from largebatch.cli.arguments import INTERRUPTED
from largebatch.distributed.environment import own_rank
from largebatch.errors import printable

WIDTH = 100
"""Width of wrapped sentences in characters."""


def wrapped(sentence: str) -> str:
    """Wrap a sentence for a terminal."""
    return printable(textwrap.fill(sentence, WIDTH, subsequent_indent="  ", break_on_hyphens=False))


def print_rows(rows: Mapping[str, object], *, width: int = 15) -> None:
    """Print one line per value, with its name in a column of `width` characters before it."""
    for name, value in rows.items():
        print(printable(f"{name:>{width}}  {value}"), flush=True)


def print_table(rows: Sequence[Sequence[str]], *, left: int | None = None) -> None:
    """Print rows of equal length, the heads first; columns after the first `left` align right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            text.ljust(width) if left is None or place < left else text.rjust(width)
            for place, (text, width) in enumerate(zip(row, widths, strict=True))
        ]
        print(printable("  ".join(cells).rstrip()))


def interrupted(out: Path) -> int:
    """Print how to resume what is saved in a folder; return the exit code."""
    if own_rank() == 0:
        print(printable(f"to resume: the same command with --out {out}"))
    return INTERRUPTED


def print_unfinished(done: int, total: int, what: str) -> None:
    """Print how many runs are done, and how to resume."""
    print(f"{done} of {total} {what} are done; to resume: the same command")
