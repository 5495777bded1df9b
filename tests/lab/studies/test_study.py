"""Study files and their cells: what is refused, and the recipes of runs."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from schedules_of import schedule_of
from short_studies import (
    GRID,
    ON_HOSTS,
    POLICIES,
    SCALING,
    SERVERS,
    SETTINGS,
    STALENESS,
    VARIED,
    cells_in,
    write_study,
)

from largebatch import load_recipe
from largebatch.errors import LargebatchError, RecipeError
from largebatch.lab.studies import trained
from largebatch.lab.studies.runner import cells_of
from largebatch.lab.studies.search import first_values, rungs
from largebatch.lab.studies.study import RATE, load_study
from largebatch.lab.studies.trained import TrainedCell
from largebatch.recipe.arithmetic.plan import make_plan
from largebatch.recipe.recipe import Recipe
from largebatch.recipe.section import Duration

EXAMPLES = Path(__file__).parents[3] / "docs" / "examples"
SEARCH = POLICIES["search"]
PIECES = [
    {"length": {"steps": 4}, "peak_lr": 0.5, "decay": {"kind": "constant"}},
    {"length": None, "peak_lr": 0.1, "decay": {"kind": "cosine", "end_lr": 0.01}},
]


def cells(folder: Path, study: dict[str, Any] = POLICIES, **changes: Any) -> list[TrainedCell]:  # noqa: ANN401 -- any part
    found = cells_in(folder, study, **changes)
    return [cell for cell in found if isinstance(cell, TrainedCell)]


def a_cell(folder: Path, *, search: dict[str, Any] | None = None, **parts: Any) -> TrainedCell:  # noqa: ANN401
    (cell,) = cells(folder, policies={"one": parts}, search={**SEARCH, **(search or {})})
    return cell


def rates(recipe: Recipe) -> list[float]:
    schedule = schedule_of(recipe)
    return [schedule(step) for step in range(make_plan(recipe, workers=1).steps)]


NO_NORM = {"batch.bn_span": None, "polish": None, "model": {"name": "lenet5"}}
ON_LENET = {"recipe": "digits_96", "on_hosts": ON_HOSTS}


@pytest.mark.parametrize(
    ("study", "changes", "key"),
    [
        (POLICIES, {"seedz": 3}, "seedz"),
        (POLICIES, {"name": "a/b"}, "name"),
        (POLICIES, {"policies": {}}, "policies"),
        (POLICIES, {"policies": None}, "policies, settings"),
        (POLICIES, {"settings": {"own": {}}}, "policies, settings"),
        (POLICIES, {"search": None}, "search"),
        (POLICIES, {"search": {"trials": 3}}, "search.held_out"),
        (POLICIES, {"search": {**SEARCH, "metric": "f1"}}, "search.metric"),
        (POLICIES, {"search": {**SEARCH, "seed": 2}}, "search.seed"),
        (POLICIES, {"search": {**SEARCH, "keys": {RATE: [2, 1]}}}, "keys.schedule.peak_lr"),
        (POLICIES, {"policies": {"a": {"warmup": None}, "b": {"warmup": None}}}, "policies.a"),
        (POLICIES, {"policies": {"Fix": {"warmup": None}, "fix": {}}}, "policies.Fix"),
        (POLICIES, {"recipes": {"Study.html": {"recipe": "digits_96"}}}, "recipes.Study.html"),
        (POLICIES, {"robustness_seeds": 3}, "robustness_seeds"),
        (POLICIES, {"robustness_scales": [0.5, 1]}, "robustness_scales"),
        (POLICIES, {"metrics": ["top1"]}, "metrics"),
        (POLICIES, {"recipes": {"digits": {"recipe": "digits_96", "sets": {}}}}, "digits.sets"),
        (VARIED, {"settings": {}}, "settings"),
        (VARIED, {"settings": {"a": {"worker": 2}}}, "settings.a.worker"),
        (VARIED, {"settings": {"a": {"threads": 0}}}, "settings.a.threads"),
        (VARIED, {"settings": {"a": {}, "c": {"set": {}}}}, "settings.a"),
        (VARIED, {"metrics": ["f1"]}, "metrics.0"),
        (VARIED, {"metrics": ["top1", "top1"]}, "metrics"),
        (VARIED, {"targets": [0.5]}, "targets"),
        (STALENESS, {"staleness__grids": [{**GRID, "recipes": ["no"]}]}, "grids.0.recipes"),
        (STALENESS, {"staleness__grids": [{**GRID, "times": ["no"]}]}, "grids.0.times"),
        (STALENESS, {"staleness__grids": [{**GRID, "sigma": [-1]}]}, "grids.0.sigma.0"),
        (STALENESS, {"staleness__speed_up": {"recipe": "no", "mu": [8]}}, "speed_up.recipe"),
        (SERVERS, {"servers__layouts": {"alone": "torch"}}, "layouts.alone"),
        (SERVERS, {"servers__layouts": {"x": "central"}}, "layouts.x"),
        (SERVERS, {"servers__megabits": 0}, "megabits"),
        (SERVERS, {"recipes__lenet5__on_hosts": None}, "lenet5.on_hosts"),
        (SERVERS, {"recipes__lenet5__on_hosts__workers": [1]}, "workers.0"),
        (SERVERS, {"recipes__lenet5__on_hosts__computed": None}, "computed"),
        (SERVERS, {"recipes__lenet5__on_hosts__computed": 17}, "computed"),
        (SCALING, {"scaling__workers": [2, 3]}, "workers"),
        (SCALING, {"scaling__inside": {}}, "inside.gigabytes_per_second"),
    ],
)
def test_a_mistake_in_a_study_is_refused_by_its_key(
    tmp_path: Path, study: dict[str, Any], changes: dict[str, Any], key: str
) -> None:
    with pytest.raises(RecipeError) as error:
        load_study(write_study(tmp_path, study, **changes))
    assert key in str(error.value)


def test_a_simulation_needs_the_time_of_a_gradient(tmp_path: Path) -> None:
    timeless = {"workers": [2], "mini_batch": 16}
    changes = {
        "recipes__lenet5__on_hosts": timeless, "servers__simulated": {"workers": [2]}
    }  # fmt: skip
    with pytest.raises(RecipeError, match=r"lenet5\.on_hosts\.compute"):
        load_study(write_study(tmp_path, SERVERS, **changes))


def test_a_name_given_twice_is_refused_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "study.yaml"
    path.write_text("name: a\npolicies:\n  flat: {decay: {kind: constant}}\n  flat: {}\n")
    with pytest.raises(RecipeError, match=r"study.yaml:4.*flat"):
        load_study(path)


@pytest.mark.parametrize(
    ("study", "changes", "words"),
    [
        (POLICIES, {"policies": {"up": {"decay": {"kind": "cosin"}}}}, ["up", "cosin"]),
        (POLICIES, {"recipes": {"no": {"recipe": "no_such_recipe"}}}, ["no", "no_such_recipe"]),
        (POLICIES, {"recipes": {"late": {"recipe": "digits_96_softsync"}}}, ["late", "protocol"]),
        (
            POLICIES, {"search": {**SEARCH, "keys": {"optimizer.moment": [0.1, 2]}}},
            ["search.keys.optimizer.moment", "'momentum'"],
        ),
        (
            POLICIES, {"search": {**SEARCH, "keys": {RATE: [1, 2], "schedule.decay.no": [1, 2]}}},
            ["search.keys.schedule.decay.no"],
        ),
        (POLICIES, {"search": {**SEARCH, "keys": {"polish.scope": [1, 2]}}}, ["polish.scope"]),
        (POLICIES, {"search": {**SEARCH, "held_out": 2000}}, ["held_out"]),
        (VARIED, {"settings": {"a": {"set": {"batch.globl": 3}}}}, ["a", "globl"]),
        (VARIED, {"settings": {"a": {"workers": 7}}}, ["a", "7 workers"]),
        (STALENESS, {"staleness__grids": [{**GRID, "sigma": [5]}]}, ["usual-sigma5", "n (5)"]),
        (
            STALENESS, {"staleness__grids": [{**GRID, "recipes": ["polished"], "mu": [4]}]},
            ["batch.bn_span"],
        ),
        (SERVERS, {"recipes__lenet5__on_hosts__updates": 40}, ["alone-1", "43"]),
        (SERVERS, {"recipes__lenet5__recipe": "digits_96_softsync"}, ["protocol"]),
        (
            SERVERS,
            {"servers__layouts": {"parts": {"split": "decentralised"}},
             "recipes": {"lenet5": {**ON_LENET, "set": NO_NORM}}},
            ["parts-2", "protocol.split"],
        ),
        (SCALING, {"recipes__lenet5__on_hosts__updates": 40}, ["40 updates"]),
        (
            SCALING, {"recipes__lenet5__on_hosts__mini_batch": 300,
                      "recipes__lenet5__on_hosts__computed": 300},
            ["micro-batches", "computed"],
        ),
    ],
)  # fmt: skip
def test_a_cell_that_cannot_run_is_refused_by_its_names(
    tmp_path: Path, study: dict[str, Any], changes: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(LargebatchError) as error:
        cells_in(tmp_path, study, **changes)
    assert all(word in str(error.value) for word in words)


@pytest.mark.parametrize(
    "parts",
    [
        {"decay": {"kind": "tri", "low_lr": 0.05, "half_cycle": {"steps": 3}}},
        {"decay": {"kind": "piecewise", "pieces": PIECES}},
        {"warmup": {"steps": 3}, "start_lr": 0.1, "decay": {"kind": "polynomial", "end_lr": 0.2}},
        {"decay": {"kind": "exp", "gamma": 0.8}},
    ],
)
def test_every_rate_of_a_schedule_scales_with_the_peak(
    tmp_path: Path, parts: dict[str, Any]
) -> None:
    cell = a_cell(tmp_path, **parts)
    own = rates(cell.recipe)
    for factor in (1 / 16, 0.3, 16.0):
        found = rates(cell.at({RATE: 0.5 * factor}))
        assert found == pytest.approx([factor * rate for rate in own], rel=1e-9)


def test_a_seed_has_the_recipe_of_train_with_the_values_found(tmp_path: Path) -> None:
    cell = a_cell(tmp_path, decay={"kind": "cosine"})
    changes = [f"{key}={json.dumps(value)}" for key, value in SETTINGS.items()]
    changes += ["schedule.decay={kind: cosine}", "schedule.peak_lr=0.2", "seed=2"]
    assert cell.seed_recipe({RATE: 0.2}, seed=2) == load_recipe("digits_96", changes)
    assert cell.seed_recipe({RATE: 0.2}, seed=2, scale=0.1).schedule.peak_lr == 0.02


def test_a_trial_never_sees_the_validation_images(tmp_path: Path) -> None:
    data = a_cell(tmp_path, decay={"kind": "constant"}).trial_recipe({RATE: 0.2}).data
    assert data.held_out is not None
    assert (data.held_out.samples, data.train_split) == (300, 1137)
    assert a_cell(tmp_path).seed_recipe({}, seed=1).data.held_out is None


def test_a_shorter_trial_follows_the_same_shape(tmp_path: Path) -> None:
    """Held against the rates of the whole run, read at multiples of 1 / part."""
    for decay in (
        {"kind": "exp", "gamma": 0.9},
        {"kind": "inv", "gamma": 0.5, "power": 0.75},
        {"kind": "steps", "at": [{"steps": 4}, {"steps": 8}]},
        {"kind": "sinexp", "low_lr": 0.01, "half_cycle": {"steps": 4}, "gamma": 0.95},
    ):
        cell = a_cell(tmp_path, search={"part": 0.5}, warmup=None, decay=decay)
        whole, short = rates(cell.recipe), rates(cell.trial_recipe({}))
        assert len(whole) == 12
        assert short == pytest.approx(whole[::2], rel=1e-6)


def test_a_trial_of_epochs_without_the_held_out_images_ends_at_the_same_rate(
    tmp_path: Path,
) -> None:
    """1,437 images make 75 updates in 5 epochs, 1,137 make 60 of them."""
    cell = a_cell(tmp_path, warmup=None, decay={"kind": "exp", "gamma": 0.98})
    recipe = cell.recipe.model_copy(update={"duration": Duration(epochs=5)})
    whole = rates(recipe)
    trial = rates(replace(cell, recipe=recipe).trial_recipe({}))
    assert (len(whole), len(trial)) == (75, 60)
    assert trial[-1] == pytest.approx(whole[-1], rel=0.02)


def test_a_trial_of_updates_has_lengths_in_epochs_at_the_same_updates(tmp_path: Path) -> None:
    """150 updates are 10 epochs of 15 or, without the held-out images, 12.5 of 12."""
    parts = {"warmup": {"epochs": 2}, "decay": {"kind": "steps", "at": [{"epochs": 6}]}}
    changes = {**SETTINGS, "duration": {"steps": 150}, "evaluation": {"every_epochs": 2}}
    (cell,) = cells(
        tmp_path, recipes={"digits": {"recipe": "digits_96", "set": changes}},
        policies={"one": parts}, search={**SEARCH, "prune": False},
    )  # fmt: skip
    trial = cell.trial_recipe({})
    assert rates(trial) == rates(cell.recipe)
    evaluated = make_plan(trial, workers=1).evaluate_after
    assert evaluated == pytest.approx(cell.plan.evaluate_after, rel=0.02)


def test_a_trial_is_compared_after_its_warm_up(tmp_path: Path) -> None:
    plan = make_plan(a_cell(tmp_path, warmup={"steps": 5}).trial_recipe({}), workers=1)
    assert rungs(plan) == [6, 9]
    assert set(rungs(plan)) <= set(plan.evaluate_after)
    assert rungs(make_plan(a_cell(tmp_path, warmup=None).trial_recipe({}), workers=1)) == [3, 6, 9]


def test_all_searches_begin_at_the_same_factors(tmp_path: Path) -> None:
    keys = {RATE: [0.5, 16], "loss.label_smoothing": [0.5, 2]}
    for cell in cells(tmp_path, search={**SEARCH, "trials": 5, "keys": keys}):
        assert cell.search is not None
        own = {key: cell.own(key) for key in cell.ranges}
        assert first_values(cell.search, own, cell.ranges) == [
            {RATE: 0.5, "loss.label_smoothing": 0.1},
            {RATE: 1.25, "loss.label_smoothing": 0.1},  # 0.4 times the rate is out of the range
            {RATE: 3.125, "loss.label_smoothing": 0.1},
        ]
        assert [slot.trial for slot in cell.slots] == [1, 2, 3, 4, 5, 0, 0]


def test_a_key_of_a_shape_is_searched_for_the_policies_that_have_it(tmp_path: Path) -> None:
    waves = {"decay": {"kind": "tri", "low_lr": 0.1, "half_cycle": {"epochs": 0.2}}}
    keys = {RATE: [0.1, 2], "schedule.decay.half_cycle.epochs": [0.5, 2],
            "schedule.decay.low_lr": [0.5, 2]}  # fmt: skip
    fix, tri = cells(
        tmp_path, policies={"fix": {"decay": {"kind": "constant"}}, "tri": waves},
        search={**SEARCH, "keys": keys},
    )  # fmt: skip
    assert list(fix.ranges) == [RATE]
    assert tri.ranges["schedule.decay.half_cycle.epochs"] == (0.1, 0.4)
    peak = tri.own(RATE)
    values = {
        RATE: 2 * peak, "schedule.decay.low_lr": 0.05, "schedule.decay.half_cycle.epochs": 0.4,
    }  # fmt: skip
    found = tri.at(values).schedule
    assert found.peak_lr == 2 * peak
    assert found.decay.model_dump()["low_lr"] == 0.1  # 0.05 at the recipe's own peak
    assert found.decay.model_dump()["half_cycle"]["epochs"] == 0.4


def test_settings_whose_library_is_missing_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    study = load_study("gtdlbench")
    assert study.settings is not None
    assert {"dali", "two-workers-horovod"} < study.settings.keys()
    monkeypatch.setattr(trained, "find_spec", lambda name: None)
    found = {cell.variant: cell for cell in trained.cells_of(study, Path())}
    assert study.settings.keys() - found.keys() == {"dali", "two-workers-horovod"}
    assert found["avx2"].environment_of_process["ONEDNN_MAX_CPU_ISA"] == "AVX2"


@pytest.mark.parametrize(
    ("name", "cells", "runs"),
    [
        ("lrbench", 20, 460),
        ("rudra", 67, 201),
        ("rudra-small", 9, 27),
        ("rudra-imagenette", 3, 3),
        ("dell", 8, 24),
        (EXAMPLES / "digits_policies.yaml", 4, 52),
        (EXAMPLES / "digits_settings.yaml", 10, 30),
        (EXAMPLES / "digits_staleness.yaml", 7, 21),
        (EXAMPLES / "digits_servers.yaml", 6, 30),
    ],
)
def test_installed_studies_and_examples_have_their_runs(
    name: str | Path, cells: int, runs: int
) -> None:
    found = cells_of(load_study(name), Path(name).parent)
    assert (len(found), sum(len(cell.slots) for cell in found)) == (cells, runs)


def test_an_unknown_study_is_answered_with_the_installed_ones() -> None:
    with pytest.raises(RecipeError, match=r"rudr: .*lrbench.*rudra"):
        load_study("rudr")
