"""Every planted fault is found, named and measured, and no correct script has a fault."""

from collections.abc import Iterator
from typing import Any

import pytest
from planted_audit import findings_of, load, names_in

from largebatch.audit import Findings


def planted() -> Iterator[Any]:
    """Yield the planted faults: the first of each check, and the others as long tests."""
    checks = set()
    for name in names_in("faults"):
        check = load("faults", name).EXPECTED
        yield pytest.param(name, marks=[pytest.mark.long] * (check in checks))
        checks.add(check)


USUAL = {
    *("accumulation_and_clipping", "average_and_frozen_layer", "everything_is_checked"),
    *("plain_parallel", "recomputation", "scaler_skips_first_updates", "two_optimizers"),
    *("two_scaled_optimizers_clipped_together", "weighted_draws"),
}
"""Correct scripts of every run of the tests; the others are long tests."""


def found_in(folder: str, request: pytest.FixtureRequest) -> dict[str, Findings | str]:
    """Return what the audit found in the scripts of a folder that are selected."""
    selected = [it for it in request.session.items if isinstance(it, pytest.Function)]
    names = [it.callspec.params["name"] for it in selected if folder in it.fixturenames]
    return findings_of(folder, [str(name) for name in names])


@pytest.fixture(scope="module")
def faults(request: pytest.FixtureRequest) -> dict[str, Findings | str]:
    return found_in("faults", request)


@pytest.fixture(scope="module")
def correct(request: pytest.FixtureRequest) -> dict[str, Findings | str]:
    return found_in("correct", request)


@pytest.mark.parametrize("name", list(planted()))
def test_a_planted_fault_is_found_with_its_figure(
    name: str, faults: dict[str, Findings | str]
) -> None:
    script, findings = load("faults", name), faults[name]
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


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.long] * (name not in USUAL))
        for name in names_in("correct")
    ],
)
def test_a_correct_script_has_no_fault(name: str, correct: dict[str, Findings | str]) -> None:
    findings = correct[name]
    assert isinstance(findings, Findings), findings
    assert not findings.faults, findings.table()
    assert not [it for it in findings if it.level == "unknown"], findings.table()
    without = getattr(load("correct", name), "NO_NOTE", None)
    assert without not in {it.check for it in findings if it.level == "note"}, findings.table()
