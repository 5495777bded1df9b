"""The table of an audit, and the property that a script's own test requires."""

import inspect
import re
from pathlib import Path
from typing import get_args

import pytest

from largebatch.audit import audit
from largebatch.audit.findings import Check, Finding, Findings, Level

PAGE = Path(__file__).parents[2] / "docs" / "audit.md"
SCALE = Finding(check="gradient scale", level="fine", text="1.0000 times that of one process")


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


def test_long_texts_and_remedies_are_wrapped_under_themselves() -> None:
    long = Finding(
        check="batch norm momentum", level="note", text="word " * 40 + "end", remedy="do " * 60
    )
    lines = str(long).splitlines()
    assert max(map(len, lines)) <= 100
    assert lines[0].startswith("note     batch norm momentum word word")
    remedy = next(place for place, line in enumerate(lines) if "-> do" in line)
    assert {line[:29] for line in lines[1:remedy]} == {" " * 29}
    assert lines[remedy].startswith(" " * 29 + "-> do do")
    assert lines[remedy + 1].startswith(" " * 32 + "do do")
    assert " ".join(" ".join(lines).split()).count("do ") == 59


def test_a_finding_is_printed_as_in_the_table() -> None:
    assert f"{SCALE}" == "fine     gradient scale      1.0000 times that of one process"
    assert str(SCALE) in Findings((SCALE,)).table().splitlines()


def test_the_page_has_a_row_for_every_check_and_every_argument() -> None:
    call, measures = PAGE.read_text(encoding="utf-8").split("## What it measures")
    measures = measures.split("\n#")[0]
    first_cells = re.findall(r"^\| ([a-z, -]+) \|", measures, re.MULTILINE)
    assert {it for cell in first_cells for it in cell.split(", ")} - {"check"} == {*get_args(Check)}
    arguments = re.findall(r"^\| `(\w+)` \|", call, re.MULTILINE)
    assert arguments == list(inspect.signature(audit).parameters)
