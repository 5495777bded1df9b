"""Scripts that resume wrongly are named with a figure, and those that resume rightly are not."""

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from programs import output_of
from resumed_loops import CORRECT, FAULTS, HELD, Resumed
from resumed_runs import findings_of

UNSEEN = {"statistics_of_a_function_lost"}
"""Faults that an audit does not name: statistics that are in no module's buffers."""

LIBRARIES = {"accelerate", "lightning", "timm", "transformers"}
"""Correct scripts of other libraries, which start as a user's do."""

USUAL = {"generator_of_the_loader_lost", "one_worker_then_two"}
"""Scripts of every run of the tests; the others are long tests."""


def cases(scripts: dict[str, Resumed]) -> list[Any]:
    return [
        pytest.param(script, id=name, marks=[pytest.mark.long] * (name not in USUAL))
        for name, script in scripts.items()
        if name not in LIBRARIES | UNSEEN
    ]


@pytest.mark.parametrize("script", cases(FAULTS | HELD))
def test_a_planted_fault_is_named_with_its_figure(script: Resumed, tmp_path: Path) -> None:
    findings = findings_of(script, tmp_path)
    assert {it.check for it in findings.faults} == {script.check}, findings.table()
    # Distances of tensors are estimates; their number is exact.
    figure = pytest.approx(script.figure, rel=0.01 if script.figure >= 0.01 else 0.5)
    assert any(it.figure == figure for it in findings.faults), findings.faults
    assert all(it.remedy for it in findings.faults)
    assert not findings.ok


@pytest.mark.parametrize("script", cases(CORRECT))
def test_a_correct_resumption_has_no_fault(script: Resumed, tmp_path: Path) -> None:
    findings = findings_of(script, tmp_path)
    assert findings.ok, findings.table()


def audited(**commands: str) -> str:
    """Return the table that the command prints for three commands; fail if there is a fault."""
    options = [word for name, text in commands.items() for word in (f"--{name}", text)]
    return output_of(sys.executable, "-m", "largebatch", "audit", "resume", *options)


@pytest.mark.long
@pytest.mark.parametrize("library", sorted(LIBRARIES))
def test_a_resumption_by_another_library_has_no_fault(library: str, tmp_path: Path) -> None:
    if find_spec(library) is None:
        pytest.skip(f"pip install {library}")
    script = CORRECT[library].write(tmp_path)
    commands = {name: f"{script} {words}" for name, words in CORRECT[library].arguments.items()}
    assert audited(**commands).startswith("audit: the same training")


@pytest.mark.long
def test_a_resumed_run_of_this_package_is_the_same_training() -> None:
    command = (
        "-m largebatch train digits_96 --out run --set evaluation={} --set polish=null "
        "--set model.arguments.channels=[8,8,16,16] --set model.arguments.layers=[1,1,1,1] "
        "--set data.image_size=16 --max-steps"
    )
    table = audited(whole=f"{command} 4", first=f"{command} 2", rest=f"{command} 4 --resume yes")
    assert table.startswith("audit: the same training")
