"""Tables of rules: each row is a condition with its numbers, a text, a remedy and a link.

A rule is data, so that what is checked, in which order and what explains what can be read in one
place, and a terminal, a page and a test show the same numbers.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

# Without slots: in a class that is generic too, they break the check that it is frozen.
Subject = TypeVar("Subject")
"""What is judged: a run, a suggestion, a study."""

Numbers = Mapping[str, Any]
"""Numbers, and names or places, by the fields of a text."""


@dataclass(frozen=True, kw_only=True)
class Rule(Generic[Subject]):
    """A row of a table."""

    kind: str
    holds: Callable[[Subject], Numbers | None]
    """Return the numbers of the text; None if the rule does not hold."""

    text: str
    """What was found, with fields such as `{loss:.3g}` for the numbers."""

    remedy: str = ""
    """What changes it; may have fields, too."""

    link: str = ""
    """Name of the chart that shows it."""

    unless: frozenset[str] = frozenset()
    """Kinds and groups of harmful findings that explain this one, which is then not reported."""

    group: str = ""
    harms: bool = True
    """False if the result is not worse for it: it costs time, or was corrected."""


@dataclass(frozen=True)
class Finding(Generic[Subject]):
    """A rule that holds, with its numbers."""

    rule: Rule[Subject]
    numbers: Numbers

    @property
    def kind(self) -> str:
        """The kind of its rule."""
        return self.rule.kind

    @property
    def harms(self) -> bool:
        """True if the result is worse for it."""
        return self.rule.harms

    @property
    def figure(self) -> str:
        """The measurement that shows it, as part of a sentence."""
        return self.rule.text.format_map(self.numbers)

    @property
    def remedy(self) -> str:
        """What changes it."""
        return self.rule.remedy.format_map(self.numbers)


def find(rules: Sequence[Rule[Subject]], subject: Subject) -> list[Finding[Subject]]:
    """Return the rules that hold, in their order, without those that an earlier one explains."""
    found: list[Finding[Subject]] = []
    explained: set[str] = set()
    for rule in rules:
        if rule.unless.isdisjoint(explained):
            numbers = rule.holds(subject)
            if numbers is not None:
                found.append(Finding(rule, numbers))
                explained |= {rule.kind, rule.group} if rule.harms else set()
    return found
