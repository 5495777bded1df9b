"""Every planted fault is found, named and measured, and no correct loop has a fault."""

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import correct_loops as correct
import faulty_loops as faulty
import pytest
from planted_audit import findings_of, not_known
from planted_parts import FAULTS

from largebatch.audit import Findings

USUAL = {
    *("accumulation_and_clipping", "average_and_frozen_layer", "everything_is_checked"),
    *("plain_parallel", "recomputation", "scaler_skips_first_updates", "two_optimizers"),
    *("other_outputs_in_training", "weighted_draws", "validation_by_samplers_of_one_data_set"),
    *("shorter_last_window", "class_weights_in_a_function"),
}
"""Correct loops of every run of the tests; the others are long tests."""


def planted() -> Iterator[Any]:
    """Yield the planted faults: the first of each check, and the others as long tests."""
    checks = set()
    for name, expected in FAULTS.items():
        yield pytest.param(name, marks=[pytest.mark.long] * (expected.check in checks))
        checks.add(expected.check)


def found_in(module: ModuleType, request: pytest.FixtureRequest) -> dict[str, Findings | str]:
    """Return what the audit found in the loops of a module that are selected."""
    selected = [it for it in request.session.items if isinstance(it, pytest.Function)]
    names = [it.callspec.params["name"] for it in selected if module.__name__ in it.fixturenames]
    return findings_of([getattr(module, str(name)) for name in names])


@pytest.fixture(scope="module", name="faulty_loops")
def of_faulty(request: pytest.FixtureRequest) -> dict[str, Findings | str]:
    return found_in(faulty, request)


@pytest.fixture(scope="module", name="correct_loops")
def of_correct(request: pytest.FixtureRequest) -> dict[str, Findings | str]:
    return found_in(correct, request)


@pytest.mark.parametrize("name", list(planted()))
def test_a_planted_fault_is_found_with_its_figure(
    name: str, faulty_loops: dict[str, Findings | str]
) -> None:
    expected, findings = FAULTS[name], faulty_loops[name]
    assert isinstance(findings, Findings), findings
    hits = [it for it in findings.named(expected.check) if it.level == expected.level]
    assert len(hits) == 1, findings.table()
    assert hits[0].figure == pytest.approx(expected.figure, rel=expected.tolerance), hits
    assert hits[0].remedy
    faults = {*expected.also, *([expected.check] if expected.level == "fault" else [])}
    assert {it.check for it in findings.faults} == faults, findings.table()


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(it.__name__, marks=[pytest.mark.long] * (it.__name__ not in USUAL))
        for it in correct.LOOPS
    ],
)
def test_a_correct_loop_has_no_fault(name: str, correct_loops: dict[str, Findings | str]) -> None:
    findings = correct_loops[name]
    assert isinstance(findings, Findings), findings
    assert not findings.faults, findings.table()
    assert not not_known(findings), findings.table()
    if name == "scaler_skips_first_updates":
        assert not [it for it in findings.named("batch norm momentum") if it.level == "note"]
