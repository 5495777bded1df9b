"""Results of an audit, and the table that prints them."""

import textwrap
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

from largebatch.formatting import plural
from largebatch.rules import Finding, Level

Check = Literal[
    "world size",
    "repeated run",
    "first part",
    "compiled code",
    "channels last",
    "autocast",
    "gradient scale",
    "gradient direction",
    "clipping",
    "precision",
    "samples",
    "epoch order",
    "augmentation",
    "dropout",
    "random numbers",
    "learning rates",
    "loss scale",
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
    "best checkpoint",
]
"""Names of the checks, in the order of the table: causes before what follows from them."""

_wrap = partial(textwrap.wrap, width=100, break_long_words=False, break_on_hyphens=False)
"""Breaks a line of the table between words."""

_INDENT = 29  # column at which its texts begin


def _lines_of(level: str, title: str, text: str, remedy: str) -> str:
    lines = _wrap(f"{level:8} {title:19} {text}", subsequent_indent=" " * _INDENT)
    if remedy:
        text = f"{'':{_INDENT}}-> {remedy}"
        lines += _wrap(text, subsequent_indent=" " * (_INDENT + 3))
    return "\n".join(lines)


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
        levels = [it.level for it in self if it.check in {"gradient scale", "gradient direction"}]
        return bool(levels) and "unknown" not in levels

    def named(self, check: Check) -> tuple[Finding, ...]:
        """Return the findings of one check."""
        return tuple(finding for finding in self if finding.check == check)

    def table(self) -> str:
        """Format the findings in 100 columns, faults first, each with its remedy below.

        Checks that are not made because an argument is missing have one row.

        >>> clipping = Finding(check="clipping", level="fine", text="none was seen")
        >>> print(Findings((clipping,)).table())
        audit: gradients not compared, 1 fine
        fine     clipping            none was seen
        """
        checks = get_args(Check)
        in_order = sorted(self, key=lambda finding: checks.index(finding.check))
        rows = [self._summary()]
        for level in get_args(Level):
            of_level = [it for it in in_order if it.level == level]
            rows += [
                _lines_of(level, it.check, it.text, it.remedy) for it in of_level if not it.argument
            ]
            # Most calls leave arguments out: a row for each would hide what was found.
            if missing := [it for it in of_level if it.argument]:
                text = ", ".join(it.check for it in missing)
                remedy = ", ".join(dict.fromkeys(it.argument for it in missing))
                remedy = f"call largebatch.audit with {remedy}"
                rows.append(_lines_of(level, "not examined", text, remedy))
        return "\n".join(rows)

    def _summary(self) -> str:
        counts = Counter(finding.level for finding in self)
        parts = [self._verdict()]
        if counts["note"]:
            parts.append(plural(counts["note"], "note"))
        parts += [f"{counts[level]} {level}" for level in ("unknown", "fine") if counts[level]]
        return "audit: " + ", ".join(parts)

    def _verdict(self) -> str:
        if self.faults:
            return plural(len(self.faults), "fault")
        return "no fault" if self.is_compared else "gradients not compared"
