"""Rules turn measured numbers into findings: of an audit, a diagnosis, a verdict, or MLPerf.

A check has three steps. It measures, and returns the numbers as evidence, a class of its own. A
table of rules has everything that can be wrong with these numbers: each rule has its condition, the
text with the numbers, and what to change. `examine` returns a finding for each rule that holds,
`decide` only for the first one. Nothing is measured in a table, and nothing is worded outside one.

>>> from typing import NamedTuple
>>> class Warmth(NamedTuple):
...     degrees: float
>>> TABLE: tuple[Rule[Warmth], ...] = (
...     Rule(
...         check="fever",
...         level="fault",
...         when=lambda e: e.degrees > 38,
...         text=lambda e: f"{e.degrees:g} degrees",
...         remedy="rest",
...     ),
...     Rule(check="fever", level="fine", text=lambda e: f"{e.degrees:g} degrees"),
... )
>>> [finding.level for finding in decide(Warmth(39.5), TABLE)]
['fault']
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Generic, Literal, TypeVar

Level = Literal["fault", "note", "unknown", "fine"]
"""How a check ended: `fault`, something is wrong and changes the result; `note`, a number differs
from a published rule or costs time; `unknown`, the check could not be made; `fine`."""

Evidence = TypeVar("Evidence")


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Result of one check."""

    check: str
    """Name of the check: a row of an audit, the cause of a bad run, a key of a recipe."""

    level: Level
    text: str
    """What was measured, with its numbers: one sentence without a final period."""

    remedy: str = ""
    """What to change, in one line; empty if nothing is wrong."""

    figure: float | None = None
    """The number that decides, in the unit that `text` names."""

    argument: str = ""
    """Argument of `audit` without which the check is not made, and what it is; else empty."""

    chart: str = ""
    """Name of the chart of a report that shows it; else empty."""


def _always(_: object) -> bool:
    return True


# Without slots, in which Python 3.11 raises a TypeError for Rule[Evidence](...) of a frozen class.
@dataclass(frozen=True, kw_only=True)
class Rule(Generic[Evidence]):
    """A row of a table: what is found, and from which numbers; fields as in `Finding`."""

    check: str
    level: Level
    when: Callable[[Evidence], bool] = _always
    """Return True if the rule holds. A comparison with NaN, for a number that is not known, is
    False."""

    text: str | Callable[[Evidence], str]
    remedy: str | Callable[[Evidence], str] = ""
    figure: Callable[[Evidence], float | None] | None = None
    argument: str = ""
    chart: str = ""
    unless: frozenset[str] = frozenset()
    """Checks whose earlier faults explain this one, which is then not reported."""

    def finding(self, evidence: Evidence) -> Finding:
        """Return the finding of this rule, whether it holds or not."""
        return Finding(
            check=self.check,
            level=self.level,
            text=self.text(evidence) if callable(self.text) else self.text,
            remedy=self.remedy(evidence) if callable(self.remedy) else self.remedy,
            figure=self.figure(evidence) if self.figure else None,
            argument=self.argument,
            chart=self.chart,
        )


def examine(
    evidence: Evidence | None, rules: Iterable[Rule[Evidence]], earlier: Iterable[Finding] = ()
) -> Iterator[Finding]:
    """Yield the findings of all rules that hold, in their order; none without evidence.

    A rule is left out if a fault among `earlier` findings, or one that it yielded, explains it.
    """
    if evidence is None:
        return
    # A note explains nothing: it does not change the result.
    faults = {finding.check for finding in earlier if finding.level == "fault"}
    for rule in rules:
        if rule.unless.isdisjoint(faults) and rule.when(evidence):
            if rule.level == "fault":
                faults.add(rule.check)
            yield rule.finding(evidence)


def decide(
    evidence: Evidence | None, rules: Iterable[Rule[Evidence]], earlier: Iterable[Finding] = ()
) -> list[Finding]:
    """Return the finding of the first rule that holds, as a list, which is empty if none holds."""
    return list(islice(examine(evidence, rules, earlier), 1))
