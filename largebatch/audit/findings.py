"""Results of an audit, and the table that prints them."""

import textwrap
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, get_args

from largebatch.formatting import plural

Level = Literal["fault", "note", "unknown", "fine"]
"""How a check ended: `fault`, the loop does not compute what one process would; `note`, it does,
but a number differs from a published rule; `unknown`, the check could not be made; `fine`."""

Check = Literal[
    "world size",
    "gradient scale",
    "gradient direction",
    "clipping",
    "precision",
    "samples",
    "epoch order",
    "augmentation",
    "dropout",
    "learning rates",
    "buffers",
    "weights",
    "optimizer state",
    "training mode",
    "batch norm span",
    "running statistics",
    "batch norm momentum",
    "averaged statistics",
    "rate for the batch",
    "warm-up",
    "updates",
    "weight decay",
    "held-out samples",
    "evaluation samples",
    "evaluation mean",
    "evaluation mode",
    "averaged weights",
]
"""Names of the checks, in the order of the table: causes before what follows from them."""

_wrap = partial(textwrap.wrap, width=100, break_long_words=False, break_on_hyphens=False)
"""Breaks a line of the table between words."""

_INDENT = 29  # column at which its texts begin


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Result of one check."""

    check: Check
    level: Level
    text: str
    """What was measured, with its numbers: one sentence without a final period."""

    remedy: str = ""
    """What to change, in one line; empty if nothing is wrong."""

    figure: float | None = None
    """The number that decides, in the unit that `text` names."""

    argument: str = ""
    """Argument of `audit` without which the check is not made, and what it is; else empty."""

    def __str__(self) -> str:
        """Return the lines of the table for this finding."""
        return _lines_of(self.level, self.check, self.text, self.remedy)


def _lines_of(level: str, title: str, text: str, remedy: str) -> str:
    lines = _wrap(f"{level:8} {title:19} {text}", subsequent_indent=" " * _INDENT)
    if remedy:
        text = f"{'':{_INDENT}}-> {remedy}"
        lines += _wrap(text, subsequent_indent=" " * (_INDENT + 3))
    return "\n".join(lines)


def _finding(
    level: Level, check: Check, text: str, remedy: str = "", figure: float | None = None
) -> Finding:
    return Finding(check=check, level=level, text=text, remedy=remedy, figure=figure)


fault = partial(_finding, "fault")
note = partial(_finding, "note")
unknown = partial(_finding, "unknown")
fine = partial(_finding, "fine")


def not_examined(check: Check, argument: str) -> Finding:
    """Return the finding of a check that is not made without this argument of `audit`."""
    return replace(unknown(check, "not examined", f"give {argument}"), argument=argument)


@dataclass(frozen=True, slots=True)
class Findings:
    """Results of all checks of an audit, equal on every worker."""

    all: tuple[Finding, ...]

    def __iter__(self) -> Iterator[Finding]:
        return iter(self.all)

    @property
    def faults(self) -> tuple[Finding, ...]:
        """Findings at level `fault`, in the order of the table."""
        return tuple(finding for finding in self if finding.level == "fault")

    @property
    def ok(self) -> bool:
        """True if gradients were compared and are right, and no check found a fault.

        Other checks may be `unknown`.
        """
        return not self.faults and self.is_compared

    @property
    def is_compared(self) -> bool:
        """True if the gradients of all updates that were made could be compared."""
        compared = [it for it in self if it.check in {"gradient scale", "gradient direction"}]
        return bool(compared) and all(it.level != "unknown" for it in compared)

    def named(self, check: Check) -> tuple[Finding, ...]:
        """Return the findings of one check."""
        return tuple(finding for finding in self if finding.check == check)

    def table(self) -> str:
        """Format the findings in 100 columns, faults first, each with its remedy below.

        Checks that are not made because an argument is missing have one row.

        >>> seen = Finding(check="clipping", level="fine", text="none was seen")
        >>> print(Findings((seen,)).table())
        audit: gradients not compared, 1 fine
        fine     clipping            none was seen
        """
        levels, checks = get_args(Level), get_args(Check)
        order = sorted(self, key=lambda it: (levels.index(it.level), checks.index(it.check)))
        counts = Counter(finding.level for finding in self)
        parts = [plural(counts["fault"], "fault") if counts["fault"] else "no fault"]
        if not counts["fault"] and not self.is_compared:
            parts = ["gradients not compared"]
        parts += [plural(counts["note"], "note")] * bool(counts["note"])
        parts += [f"{counts[level]} {level}" for level in ("unknown", "fine") if counts[level]]
        rows = {level: [str(it) for it in order if it.level == level] for level in levels}
        missing = [it for it in order if it.argument]
        rows["unknown"] = [str(it) for it in order if it.level == "unknown" and not it.argument]
        if missing:
            text = ", ".join(it.check for it in missing)
            remedy = "call largebatch.audit with "
            remedy += ", ".join(dict.fromkeys(it.argument for it in missing))
            rows["unknown"].append(_lines_of("unknown", "not examined", text, remedy))
        lines = ["audit: " + ", ".join(parts)]
        return "\n".join([*lines, *(row for level in levels for row in rows[level])])
