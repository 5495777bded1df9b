"""Output that several commands share: rows, pages, wrapped sentences, how to resume."""

import textwrap
from collections.abc import Mapping
from pathlib import Path

from pydantic_core import to_json

from largebatch.distributed.environment import own_rank
from largebatch.errors import printable
from largebatch.formatting import table

INTERRUPTED = 75  # exit code of a command that was stopped and has saved
WIDTH = 100  # width of wrapped sentences in characters


def wrapped(sentence: str) -> str:
    """Wrap a sentence for a terminal."""
    return printable(textwrap.fill(sentence, WIDTH, subsequent_indent="  ", break_on_hyphens=False))


def print_rows(rows: Mapping[str, object], *, width: int = 15) -> None:
    """Print one line per value, with its name before it in a column of at least `width`."""
    lines = [[name, str(value)] for name, value in rows.items()]
    print(printable(table(lines, right=[0], min_widths=[width])), flush=True)


def print_json(content: object) -> None:
    """Print a value as JSON; a number that is not finite becomes null."""
    print(to_json(content, indent=2, inf_nan_mode="null", fallback=str).decode(), flush=True)


def interrupted(out: Path) -> int:
    """Print how to resume what is saved in a folder; return the exit code."""
    if own_rank() == 0:
        print(printable(f"to resume: the same command with --out {out}"))
    return INTERRUPTED
