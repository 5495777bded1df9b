"""The studies of benchmarks/defaults.py."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "benchmarks"))
from defaults import STUDY, apart, more_seeds  # noqa: E402

from largebatch.lab.studies.queue.cells import cells_of  # noqa: E402
from largebatch.lab.studies.queue.study import ConfigurationStudy, load_configuration_study  # noqa: E402
from largebatch.recipe.loading import validate_tree  # noqa: E402


def test_both_studies_can_be_planned() -> None:
    both = load_configuration_study(STUDY)
    more = validate_tree(ConfigurationStudy, more_seeds(), source="more seeds")
    assert len(cells_of(both, ROOT)) == 10
    assert [cell.variant for cell in cells_of(more, ROOT)] == [
        "caffe-mnist", "torch-mnist", "theano-mnist",
    ]  # fmt: skip


def test_settings_are_apart_by_the_pairs_of_seeds_of_the_best_and_the_worst() -> None:
    top1 = {"a": {1: 0.9, 2: 0.92}, "b": {1: 0.7, 2: 0.75}, "c": {1: 0.8, 2: 0.8}}
    found = apart(top1)
    assert (found["best"], found["worst"]) == ("a", "b")
    assert found["points"]["mean"] == pytest.approx(18.5)
    # one of three pairs: t at 1 - .05 / 6 with one degree of freedom is 38.188; 1.5 is the error
    assert found["points"]["low"] == pytest.approx(18.5 - 38.188 * 1.5, abs=0.01)
