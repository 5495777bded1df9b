"""The file of a staleness study, and the recipes of its cells."""

import json
from pathlib import Path

import pytest
from short_staleness import STUDY, write_study

from largebatch.errors import RecipeError
from largebatch.lab.studies.staleness.study import Cell, cells_of, load_study

RESULTS = Path(__file__).parents[4] / "benchmarks" / "results"


def cells(folder: Path, **grid: object) -> dict[str, Cell]:
    path = write_study(folder, grids=[{**STUDY["grids"][0], **grid}])
    return {cell.name: cell for cell in cells_of(load_study(str(path)), folder)}


def test_a_cell_is_a_recipe_with_the_protocol_of_its_point(tmp_path: Path) -> None:
    found = cells(tmp_path, sigma=[0, 2, "lambda"], learners=[6], modulation=["none", "staleness"])
    assert list(found) == [
        "plain-usual-sigma0-mu8-lambda6",
        "plain-usual-sigma2-mu8-lambda6-none",
        "plain-usual-sigma2-mu8-lambda6-staleness",
        "plain-usual-sigma6-mu8-lambda6-none",
        "plain-usual-sigma6-mu8-lambda6-staleness",
    ]
    rules = [cell.rule for cell in found.values()]
    assert [rule.gradients for rule in rules] == [6, 3, 3, 1, 1]
    assert [rule.waits for rule in rules] == [True, False, False, False, False]
    assert [rule.by_staleness for rule in rules] == [False, False, True, False, True]
    assert [cell.recipe.batch.global_batch for cell in found.values()] == [48, 24, 24, 8, 8]
    assert rules[0].rate == pytest.approx((6 * 8 / 32) ** 0.5)
    assert {rule.rate for rule in rules[1:]} == {1.0}


def test_a_gradient_takes_longer_with_more_samples_and_on_a_slow_learner(tmp_path: Path) -> None:
    found = cells(tmp_path, times=["slow"], sigma=[1], mu=[8, 32], learners=[2])
    slow = [cell.cluster.slow for cell in found.values()]
    assert slow == [
        pytest.approx({0: 5 * 0.018, 1: 0.018}),
        pytest.approx({0: 5 * 0.042, 1: 0.042}),
    ]


def test_a_point_that_several_grids_have_is_one_cell(tmp_path: Path) -> None:
    path = write_study(tmp_path, grids=[STUDY["grids"][0]] * 2)
    assert len(cells_of(load_study(str(path)), tmp_path)) == 2


def test_the_installed_study_has_the_points_of_the_papers() -> None:
    found = {cell.name: cell for cell in cells_of(load_study("rudra"), Path())}
    for n in (1, 15, 30):
        for modulation in ("none", "staleness"):
            cell = found[f"sgd-usual-sigma{n}-mu4-lambda30-{modulation}"]
            assert cell.rule.gradients == 30 // n
            assert cell.recipe.batch.global_batch == 4 * (30 // n)
    assert {cell.learners for cell in found.values()} == {1, 4, 10, 30}


def test_the_rates_of_the_installed_study_are_those_that_were_found() -> None:
    (path,) = RESULTS.glob("staleness_cpu2_*.json")
    found = {name: rate["found"] for name, rate in json.loads(path.read_text())["rates"].items()}
    cells = cells_of(load_study("rudra"), Path())
    rates = {cell.name.partition("-")[0]: cell.recipe.schedule.peak_lr for cell in cells}
    assert rates["lars"] == found["lars"] == 0.362
    assert rates["norm"] == rates["polished"] == found["norm"] == 0.0048


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        ({"recipes": ["nothing"]}, "grids.0.recipes: there is no nothing; recipes has plain, po"),
        ({"times": ["never"]}, "grids.0.times: there is no never; times has usual, slow"),
        (
            {"sigma": [5]},
            r"plain-usual-sigma5-mu8-lambda4-staleness: .*\n.*n \(5\) must be at most",
        ),
        ({"recipes": ["polished"], "mu": [4]}, r"batch.bn_span \(8\) must divide the 4 samples"),
        ({"sigma": [-1]}, "grids.0.sigma.0"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, grid: dict[str, object], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        cells(tmp_path, **grid)


def test_a_name_that_is_no_study_is_answered_with_those_that_are() -> None:
    with pytest.raises(RecipeError, match="rudr: neither a file nor an installed .* are rudra"):
        load_study("rudr")


def test_the_small_study_has_the_rates_that_were_found_without_staleness() -> None:
    newest = max(RESULTS.glob("staleness_cpu*.json"))
    rates = json.loads(newest.read_text())["rates"]
    for name in ("rudra", "rudra-small"):
        for cell in cells_of(load_study(name), Path()):
            if cell.configuration != "sgd":
                names = {"lars": "lars", "sgd-in-time": "sgd"}
                found = rates[names.get(cell.configuration, "norm")]["found"]
                assert cell.recipe.schedule.peak_lr == found, cell.name


def test_imagenette_stands_for_imagenet_with_one_run_of_each_protocol() -> None:
    study = load_study("rudra-imagenette")
    found = cells_of(study, Path())
    assert study.seeds == 1
    assert [cell.sigma for cell in found] == [0, 1, 18]
    assert {(cell.learners, cell.mu, cell.recipe.data.image_size) for cell in found} == {
        (18, 16, 64)
    }
    assert found[0].rule.rate == 1.0  # its batch is that of hardsync


def test_the_machines_of_the_installed_studies_are_about_what_was_measured() -> None:
    newest = max(RESULTS.glob("speed_up_*.json"))
    measured = json.loads(newest.read_text())["measured"]
    for name in ("rudra", "rudra-small", "rudra-imagenette"):
        serving = load_study(name).machines.serving
        assert serving is not None
        found = measured["rudra" if name == "rudra-small" else name]["serving"]
        assert serving.model_dump() == pytest.approx(found, rel=0.15)
