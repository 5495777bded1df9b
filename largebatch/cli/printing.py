"""Output that several commands share: rows, pages, wrapped sentences, how to resume."""

import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from largebatch.distributed.environment import own_rank
from largebatch.errors import printable

if TYPE_CHECKING:
    from largebatch.report.interactive import Page

INTERRUPTED = 75
"""Exit code of a command that was stopped and has saved."""

WIDTH = 100
"""Width of wrapped sentences in characters."""


def wrapped(sentence: str) -> str:
    """Wrap a sentence for a terminal."""
    return printable(textwrap.fill(sentence, WIDTH, subsequent_indent="  ", break_on_hyphens=False))


def print_rows(rows: Mapping[str, object], *, width: int = 15) -> None:
    """Print one line per value, with its name in a column of `width` characters before it."""
    for name, value in rows.items():
        print(printable(f"{name:>{width}}  {value}"), flush=True)


def show_page(page: "Page", path: Path) -> None:
    """Print the first table and the findings of a page, then write it to `path`."""
    print(printable(page.text()))
    print(printable(f"page: {page.write(path)}"))


def interrupted(out: Path) -> int:
    """Print how to resume what is saved in a folder; return the exit code."""
    if own_rank() == 0:
        print(printable(f"to resume: the same command with --out {out}"))
    return INTERRUPTED


def print_unfinished(done: int, total: int, what: str) -> None:
    """Print how many runs are done, and how to resume."""
    print(f"{done} of {total} {what} are done; to resume: the same command")
