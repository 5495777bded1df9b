"""Every planted fault is found, named and measured, and no correct script has a fault."""

from collections.abc import Iterator
from typing import Any

import pytest
from planted_audit import findings_of, load, names_in

from largebatch.audit import Findings


def faults() -> Iterator[Any]:
    """Yield the planted faults: the first of each check, and the others as long tests."""
    checks = set()
    for name in names_in("faults"):
        check = load("faults", name).EXPECTED
        yield pytest.param(name, marks=[pytest.mark.long] * (check in checks))
        checks.add(check)


@pytest.fixture(scope="module")
def faulty(request: pytest.FixtureRequest) -> dict[str, Findings | str]:
    """Return what the audit found in the faults that are selected."""
    selected = [it for it in request.session.items if isinstance(it, pytest.Function)]
    with_faults = [it for it in selected if "faulty" in it.fixturenames]
    return findings_of("faults", [str(it.callspec.params["name"]) for it in with_faults])


@pytest.fixture(scope="module")
def correct() -> dict[str, Findings | str]:
    return findings_of("correct")


@pytest.mark.parametrize("name", list(faults()))
def test_a_planted_fault_is_found_with_its_figure(
    name: str, faulty: dict[str, Findings | str]
) -> None:
    script, findings = load("faults", name), faulty[name]
    assert isinstance(findings, Findings), findings
    level = getattr(script, "LEVEL", "fault")
    hits = [it for it in findings.named(script.EXPECTED) if it.level == level]
    assert len(hits) == 1, findings.table()
    tolerance = getattr(script, "TOLERANCE", 0.05)
    assert hits[0].figure == pytest.approx(script.FIGURE, rel=tolerance), findings.table()
    assert hits[0].remedy
    expected = {script.EXPECTED} if level == "fault" else set()
    expected |= set(getattr(script, "ALSO", ()))
    assert {it.check for it in findings.faults} == expected, findings.table()
    assert script.ISSUE
    assert script.__doc__


@pytest.mark.parametrize("name", names_in("correct"))
def test_a_correct_script_has_no_fault(name: str, correct: dict[str, Findings | str]) -> None:
    findings = correct[name]
    assert isinstance(findings, Findings), findings
    assert not findings.faults, findings.table()
    assert not [it for it in findings if it.level == "unknown"], findings.table()
    without = getattr(load("correct", name), "NO_NOTE", None)
    assert without not in {it.check for it in findings if it.level == "note"}, findings.table()
