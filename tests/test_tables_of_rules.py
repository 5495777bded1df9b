"""Findings from tables of rules, and what the tables of the audit have in common."""

import math
import re
from collections.abc import Iterator
from importlib import import_module
from pkgutil import iter_modules
from typing import Any, NamedTuple, get_args

from documents import DOCS

from largebatch.audit import rules as audit_rules
from largebatch.audit.findings import Check
from largebatch.report import causes
from largebatch.rules import Finding, Rule, decide, examine


class Load(NamedTuple):
    """Evidence of these tests."""

    tons: float


TABLE: tuple[Rule[Load], ...] = (
    Rule(check="bridge", level="fault", when=lambda e: e.tons > 30, text="it breaks"),
    Rule(
        check="road",
        level="fault",
        when=lambda e: e.tons > 20,
        text=lambda e: f"{e.tons:g} t",
        remedy=lambda e: f"unload {e.tons - 20:g} t",
        figure=lambda e: e.tons,
        unless=frozenset({"bridge"}),
    ),
    Rule(check="toll", level="note", when=lambda e: e.tons > 10, text="it costs"),
    Rule(
        check="queue",
        level="note",
        when=lambda e: e.tons > 10,
        text="it waits",
        unless=frozenset({"toll"}),
    ),
)


def checks(findings: list[Finding]) -> list[str]:
    return [finding.check for finding in findings]


def test_all_rules_that_hold_are_found_but_those_that_a_fault_explains() -> None:
    assert checks([*examine(Load(15), TABLE)]) == ["toll", "queue"]
    assert checks([*examine(Load(25), TABLE)]) == ["road", "toll", "queue"]
    assert checks([*examine(Load(35), TABLE)]) == ["bridge", "toll", "queue"]
    assert checks(decide(Load(35), TABLE)) == ["bridge"]
    earlier = Finding(check="bridge", level="fault", text="")
    assert checks([*examine(Load(25), TABLE, [earlier])]) == ["toll", "queue"]
    noted = Finding(check="bridge", level="note", text="")
    assert checks([*examine(Load(25), TABLE, [noted])]) == ["road", "toll", "queue"]


def test_a_finding_has_the_numbers_of_its_evidence() -> None:
    expected = Finding(check="road", level="fault", text="25 t", remedy="unload 5 t", figure=25.0)
    assert decide(Load(25), TABLE) == [expected]


def test_nothing_is_found_without_evidence_or_in_numbers_that_are_not_known() -> None:
    assert decide(None, TABLE) == decide(Load(math.nan), TABLE) == []


def tables_in(*modules: Any) -> Iterator[Rule[Any]]:  # noqa: ANN401 -- modules
    """Yield all rules in the tables of modules."""
    for module in modules:
        for value in vars(module).values():
            for table in value.values() if isinstance(value, dict) else [value]:
                if isinstance(table, tuple) and table and isinstance(table[0], Rule):
                    yield from table


AUDIT = [
    *tables_in(
        *(
            import_module(f"{audit_rules.__name__}.{module.name}")
            for module in iter_modules(audit_rules.__path__)
        )
    )
]


def test_each_rule_names_what_to_change_unless_all_is_fine() -> None:
    for rule in [*AUDIT, *tables_in(causes)]:
        assert bool(rule.remedy) == (rule.level != "fine"), rule


def test_the_page_of_the_audit_has_each_check_and_which_of_them_can_be_a_fault() -> None:
    page = (DOCS / "audit.md").read_text(encoding="utf-8")
    tables = page.split("| check | figure |")[1:]  # of loops, and of a resumed training
    faults: dict[str, bool] = {}
    for row in (row for table in tables for row in table.partition("\n\n")[0].splitlines()[2:]):
        names, _, fault = row.strip("| ").split(" | ")
        for name in names.split(", "):
            faults[name] = faults.get(name, False) or not fault.startswith("none")
    of_tables = {rule.check: False for rule in AUDIT}
    of_tables |= {rule.check: True for rule in AUDIT if rule.level == "fault"}
    assert faults == of_tables
    assert of_tables.keys() == set(get_args(Check))


def test_the_page_of_the_diagnosis_has_each_cause() -> None:
    page = (DOCS / "diagnose.md").read_text(encoding="utf-8")
    rows = page.partition("| cause |")[2].partition("\n\n")[0]
    named = re.findall(r"^\| ([^|]+) \|", rows, re.MULTILINE)
    assert set(named) == {rule.check for rule in tables_in(causes)}
