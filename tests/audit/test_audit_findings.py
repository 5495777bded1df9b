"""The table of an audit, and the property that a script's own test requires."""

import pytest

from largebatch.audit.findings import Check, Finding, Findings, Level


def findings(*pairs: tuple[Check, Level]) -> Findings:
    return Findings(tuple(Finding(check=check, level=level, text="") for check, level in pairs))


@pytest.mark.parametrize(
    ("pairs", "is_ok"),
    [
        pytest.param([("gradient scale", "fine"), ("samples", "note")], True, id="a note"),
        pytest.param([("gradient scale", "fine"), ("samples", "unknown")], True, id="not read"),
        pytest.param([("gradient scale", "fine"), ("samples", "fault")], False, id="a fault"),
        pytest.param([("gradient scale", "unknown")], False, id="the step raises"),
        pytest.param([("gradient direction", "unknown")], False, id="another loss"),
        pytest.param([("world size", "fine")], False, id="nothing compared"),
        pytest.param([], False, id="nothing"),
    ],
)
def test_findings_are_ok_if_gradients_were_compared_and_nothing_is_a_fault(
    pairs: list[tuple[Check, Level]], is_ok: bool
) -> None:
    assert findings(*pairs).ok is is_ok
