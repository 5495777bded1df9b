"""`--profile FROM:TO`: a trace of these updates, and a table of it in the report."""

import json
from pathlib import Path
from typing import Any

import pytest
from short_runs import AFFINE, CLEAN, a_recipe

from largebatch import run
from largebatch.cli.main import USER, main
from largebatch.errors import PlanError
from largebatch.report.page import profile_shares
from largebatch.report.run import read_run
from largebatch.tracking.events import Operation, Profile


def steps(folder: Path, name: str) -> int:
    """Return how often the trace has an operation."""
    trace: dict[str, Any] = json.loads((folder / "trace.json").read_text())
    return sum(event.get("name") == name for event in trace["traceEvents"])


def test_a_profile_has_these_updates_and_no_other(tmp_path: Path, draws: None) -> None:
    """Three updates, of one cross-entropy each, and what comes between two."""
    folder = tmp_path / "run"
    run(a_recipe(CLEAN, AFFINE), out=folder, profile=(3, 5))
    assert steps(folder, "aten::cross_entropy_loss") == 3
    found = read_run(folder).profile
    assert found is not None
    assert (found.first, found.step, found.stage) == (3, 5, "train")
    calls = {each.name: each.calls for each in found.operations}
    assert calls["aten::convolution_backward"] % 3 == 0
    assert found.host_seconds <= found.seconds
    page = (folder / "report.html").read_text()
    assert "Where an update goes" in page
    assert "aten::convolution_backward" in page


def test_a_profile_goes_on_until_the_stage_ends(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run(a_recipe(CLEAN), out=folder, profile=(5, 7))  # the clean stage begins after 6
    found = read_run(folder).profile
    assert found is not None
    assert (found.first, found.step) == (5, 6)
    assert steps(folder, "aten::cross_entropy_loss") == 2


@pytest.mark.parametrize("numbers", [(7, 9), (9, 12)])
def test_updates_that_are_not_made_are_refused(tmp_path: Path, numbers: tuple[int, int]) -> None:
    folder = tmp_path / "run"
    with pytest.raises(PlanError, match="among those that are to be made, 1 to 8"):
        run(a_recipe(CLEAN), out=folder, profile=numbers)
    assert not folder.exists()


def test_a_restart_profiles_what_is_left(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    recipe = a_recipe(CLEAN, changes=("evaluation={every_epochs: 0.2}",))
    run(recipe, out=folder, max_steps=2)
    for until in (4, 8):  # the second time nothing is left
        run(recipe, out=folder, profile=(1, 3), max_steps=until, resume="auto")
        found = read_run(folder).profile
        assert found is not None
        assert (found.first, found.step) == (3, 3)
        assert steps(folder, "aten::cross_entropy_loss") == 1  # without the evaluation after 3


@pytest.mark.parametrize("text", ["5", "5:", "7:5", "0:3", "a:b"])
def test_other_words_are_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "digits_96", "--profile", text]) == USER
    assert "--profile" in capsys.readouterr().err


def test_the_shares_are_all_of_the_time() -> None:
    named = (
        Operation(name="conv", calls=8, host_seconds=0.1, device_seconds=0.6),
        Operation(name="add", calls=2, host_seconds=0.2, device_seconds=0.1),
    )
    found = Profile(
        stage="train",
        step=4,
        first=3,
        seconds=1.0,
        host_seconds=0.6,
        device_seconds=0.8,
        operations=named,
    )
    rows = profile_shares(found)
    assert [row.name for row in rows] == [
        *("conv", "add", "all other operations", "Python, and waiting")
    ]
    assert rows[0][1:] == (4.0, 0.1, 0.6)
    assert sum(row.host for row in rows) == pytest.approx(1.0)
    assert sum(row.device for row in rows) == pytest.approx(0.8)
