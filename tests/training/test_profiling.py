"""`--profile FROM:TO`: a trace of these updates."""

import json
from pathlib import Path
from typing import Any

import pytest
from short_runs import AFFINE, CLEAN, a_recipe

from largebatch import run
from largebatch.errors import PlanError


def steps(folder: Path) -> int:
    """Return the number of updates in the trace, which have one backward pass each."""
    trace: dict[str, Any] = json.loads((folder / "trace.json").read_text())
    name = "aten::_log_softmax_backward_data"
    return sum(event.get("name") == name for event in trace["traceEvents"])


@pytest.mark.parametrize("numbers", [(3, 5), (1, 2), (8, 8)])
def test_a_profile_has_these_updates_and_no_other(tmp_path: Path, numbers: tuple[int, int]) -> None:
    """The clean stage begins after 6."""
    folder, (first, last) = tmp_path / "run", numbers
    run(a_recipe(CLEAN, AFFINE), out=folder, profile=numbers)
    assert steps(folder) == last - first + 1


@pytest.mark.parametrize("numbers", [(7, 9), (9, 12)])
def test_updates_that_are_not_made_are_refused(tmp_path: Path, numbers: tuple[int, int]) -> None:
    folder = tmp_path / "run"
    with pytest.raises(PlanError, match="--profile"):
        run(a_recipe(CLEAN), out=folder, profile=numbers)
    assert not folder.exists()


def test_a_restart_profiles_what_is_left(tmp_path: Path) -> None:
    folder, recipe = tmp_path / "run", a_recipe(CLEAN)
    run(recipe, out=folder, max_steps=2)
    for until in (4, 8):  # the second time nothing is left
        run(recipe, out=folder, profile=(1, 3), max_steps=until, resume="auto")
        assert steps(folder) == 1
