"""The benchmark of airbench's network: what a run leaves in the results."""

import sys
from pathlib import Path

import pytest
from short_runs import STATISTICS, a_recipe

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
import airbench


def test_a_run_is_measured_on_its_views_and_on_one_and_is_not_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = a_recipe(STATISTICS, changes=("evaluation.views=6",))
    asked: list[str] = []

    def load(_: str, changes: list[str]) -> object:
        asked.extend(changes)
        return recipe

    monkeypatch.setattr(airbench, "load_recipe", load)
    found = airbench.measure("any", seed=3, data=None, work=tmp_path)
    assert asked == ["seed=3"]
    assert found["samples"] == 8 * 96
    assert 0 < found["top1"] <= 1
    assert 0 < found["top1_of_one_view"] <= 1
    again = airbench.measure("any", seed=3, data=None, work=tmp_path)
    assert again == found
