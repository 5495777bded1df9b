"""Study files and their cells: what is refused, and the recipes of runs."""

import json
import re
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from schedules_of import schedule_of
from short_studies import (
    GRID,
    POLICIES,
    SCALING,
    SERVERS,
    SETTINGS,
    STALENESS,
    VARIED,
    a_record,
    cells_in,
    write_study,
)

from largebatch import load_recipe
from largebatch.errors import LargebatchError, RecipeError
from largebatch.lab.studies import trained
from largebatch.lab.studies.runner import kind_of
from largebatch.lab.studies.study import RATE, Slot, load_study
from largebatch.lab.studies.trained import TrainedCell
from largebatch.recipe.arithmetic.plan import make_plan
from largebatch.recipe.recipe import Recipe
from largebatch.recipe.section import Duration

SEARCH = POLICIES["search"]
SEED, TRIAL = Slot(name="seed-2", seed=2), Slot(name="search-001", seed=100, trial=1)
STEPS = {"kind": "steps", "at": [{"steps": 4}, {"steps": 8}], "gamma": 0.5}
AT = "schedule.decay.at"
CROSSING = {f"{AT}.0.steps": [0.75, 1.5], f"{AT}.1.steps": [0.5, 1.4]}
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
        (POLICIES, {"search": {**SEARCH, "factors": [2, 1]}}, "search"),
        (POLICIES, {"seeds": 100}, "seeds"),
        (POLICIES, {"search": {**SEARCH, "keys": {"a": [2, 1]}}}, "search"),
        (POLICIES, {"search": {**SEARCH, "keys": {RATE: [1, 2]}}}, f"keys.{RATE}"),
        (POLICIES, {"robustness_seeds": 3}, "robustness_seeds"),
        (POLICIES, {"robustness_scales": [0.5, 1.0]}, "robustness_scales"),
        (VARIED, {"robustness_seeds": 1}, "robustness_seeds"),
        *(
            (VARIED, {"settings": {"a": {"environment": {name: "1"}}}}, name)
            for name in (
                *("PYTHONPATH", "LD_PRELOAD", "LD_LIBRARY_PATH", "PATH", "PYTHONSTARTUP", "HOME"),
                *(
                    "OMP_TOOL_LIBRARIES",
                    "NCCL_NET_PLUGIN",
                    "CUDA_INJECTION64_PATH",
                    "",
                    "omp_places",
                ),
                *("TORCHINDUCTOR_CACHE_DIR", "LD_AUDIT", "BASH_ENV", "OMP_NUM_THREADS=1", "A\nB"),
            )
        ),
        (VARIED, {"settings": {"a": {"environment": {"MKL_CBWR": "a\0b"}}}}, "MKL_CBWR"),
        (
            VARIED,
            {"settings": {"a": {"threads": 2, "environment": {"OMP_NUM_THREADS": "4"}}}},
            "OMP_NUM_THREADS",
        ),
        (POLICIES, {"recipes": {"digits": {"recipe": "digits_96", "sets": {}}}}, "digits.sets"),
        (VARIED, {"settings": {}}, "settings"),
        (VARIED, {"settings": {"a": {"worker": 2}}}, "settings.a.worker"),
        (VARIED, {"settings": {"a": {"threads": 0}}}, "settings.a.threads"),
        (VARIED, {"targets": [0.5]}, "targets"),
        (STALENESS, {"staleness__grids": [{**GRID, "recipes": ["no"]}]}, "grids.0.recipes"),
        (STALENESS, {"staleness__grids": [{**GRID, "times": ["no"]}]}, "grids.0.times"),
        (STALENESS, {"staleness__grids": [{**GRID, "sigma": [-1]}]}, "grids.0.sigma.0"),
        (SERVERS, {"servers__layouts": {"alone": "torch"}}, "layouts.alone"),
        (SERVERS, {"servers__layouts": {"x": "central"}}, "layouts.x"),
        (SERVERS, {"servers__megabits": 0}, "megabits"),
        (SERVERS, {"recipes__lenet5__on_hosts": None}, "lenet5.on_hosts"),
        (SERVERS, {"recipes__lenet5__on_hosts__workers": [1]}, "workers.0"),
        (SERVERS, {"recipes__lenet5__on_hosts__compute__computed": None}, "computed"),
        (SCALING, {"scaling__workers": [2, 3]}, "workers"),
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
    path.write_text("name: a\npolicies:\n  flat: {decay: {kind: fix}}\n  flat: {}\n")
    with pytest.raises(RecipeError, match=r"study.yaml:4.*flat"):
        load_study(path)


@pytest.mark.parametrize(
    ("study", "changes", "words"),
    [
        (POLICIES, {"policies": {"up": {"decay": {"kind": "cosin"}}}}, ["up", "cosin"]),
        (POLICIES, {"recipes": {"no": {"recipe": "no_such_recipe"}}}, ["no", "no_such_recipe"]),
        (POLICIES, {"recipes": {"late": {"recipe": "digits_96_softsync"}}}, ["late", "protocol"]),
        (POLICIES, {"search": {**SEARCH, "held_out": 2000}}, ["held_out"]),
        (POLICIES, {"search": {**SEARCH, "keys": {"schedule.decay.gama": [0.5, 2]}}}, ["gama"]),
        (POLICIES, {"search": {**SEARCH, "keys": {"batch.no": [0.5, 2]}}}, ["batch.no"]),
        (POLICIES, {"search": {**SEARCH, "keys": {"model.name": [0.5, 2]}}}, ["model.name"]),
        (POLICIES, {"search": {**SEARCH, "keys": {"schedule.decay.power": [1, 1e6]}}}, ["fall"]),
        (
            POLICIES, {"search": {**SEARCH, "keys": {"batch.global_batch": [0.5, 2]}}},
            ["fall", "batch.global_batch", "settings"],
        ),
        (  # both at their lowest or highest values fit, one high and one low are in no order
            POLICIES,
            {
                "policies": {"crossing": {"decay": STEPS}},
                "search": {**SEARCH, "keys": CROSSING},
            },
            ["crossing", f"{AT}.0.steps 6", f"{AT}.1.steps 4"],
        ),
        (VARIED, {"settings": {"a": {"set": {"batch.globl": 3}}}}, ["a", "globl"]),
        (VARIED, {"settings": {"a": {"workers": 7}}}, ["a", "7 workers"]),
        (STALENESS, {"staleness__grids": [{**GRID, "sigma": [5]}]}, ["usual-sigma5", "n (5)"]),
        (
            STALENESS, {"staleness__grids": [{**GRID, "recipes": ["polished"], "mu": [4]}]},
            ["batch.bn_span"],
        ),
        (SERVERS, {"recipes__lenet5__on_hosts__updates": 40}, ["alone-1", "43"]),
        (SERVERS, {"recipes__lenet5__recipe": "digits_96_softsync"}, ["protocol"]),
        (SCALING, {"recipes__lenet5__on_hosts__updates": 40}, ["40 updates"]),
        (
            SCALING, {"recipes__lenet5__on_hosts__mini_batch": 300,
                      "recipes__lenet5__on_hosts__compute__computed": 300},
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
        {"warmup": {"steps": 3}, "start_lr": 0.1, "decay": {"kind": "poly", "end_lr": 0.2}},
        {"decay": {"kind": "exp", "gamma": 0.8}},
    ],
)
def test_every_rate_of_a_schedule_scales_with_the_peak(
    tmp_path: Path, parts: dict[str, Any]
) -> None:
    cell = a_cell(tmp_path, **parts)
    own = rates(cell.recipe)
    for factor in (1 / 16, 0.3, 16.0):
        found = rates(cell.recipe_of(SEED, {RATE: 0.5 * factor}))
        assert found == pytest.approx([factor * rate for rate in own], rel=1e-9)


def test_a_seed_has_the_recipe_of_train_at_the_rate_found(tmp_path: Path) -> None:
    cell = a_cell(tmp_path, decay={"kind": "cosine"})
    changes = [f"{key}={json.dumps(value)}" for key, value in SETTINGS.items()]
    changes += ["schedule.decay={kind: cosine}", "schedule.peak_lr=0.2", "seed=2"]
    assert cell.recipe_of(SEED, {RATE: 0.2}) == load_recipe("digits_96", changes)


def test_range_and_steps_of_a_shape_are_searched_beside_the_rate(tmp_path: Path) -> None:
    """By hand: a third of the peak rises over 3 updates; the rate is doubled, so is low_lr."""
    wave = {"decay": {"kind": "tri", "low_lr": 0.1, "half_cycle": {"steps": 3}}}
    step = {"decay": {"kind": "steps", "at": [{"steps": 4}, {"steps": 8}], "gamma": 0.5}}
    low, half = "schedule.decay.low_lr", "schedule.decay.half_cycle.steps"
    second = "schedule.decay.at.1.steps"
    keys = {low: [0.5, 2.0], half: [0.5, 2.0], second: [0.9, 1.2]}
    waving, stepping = cells(
        tmp_path, policies={"wave": wave, "step": step}, search={**SEARCH, "keys": keys}
    )
    assert waving.ranges == {RATE: (0.5 / 16, 8.0), low: (0.05, 0.2), half: (1.5, 6.0)}
    assert list(stepping.ranges) == [RATE, second]
    found = waving.recipe_of(SEED, {RATE: 1.0, low: 0.2, half: 2.2}).schedule
    assert (found.peak_lr, found.decay.low_lr, found.decay.half_cycle.steps) == (1.0, 0.4, 2)  # type: ignore[union-attr]
    found = stepping.recipe_of(SEED, {second: 9.4}).schedule
    assert [point.steps for point in found.decay.at] == [4, 9]  # type: ignore[union-attr]
    first = waving.values([], TRIAL)
    assert first == {RATE: 0.5, low: 0.1, half: 3.0}
    trials = [
        {**a_record(0.5 + number / 20, seed=100), "values": {**first, RATE: rate}}
        for number, rate in enumerate((0.5, 0.2, 1.25, 0.08, 3.125))
    ]
    drawn = waving.values(trials, replace(TRIAL, trial=6))
    assert drawn.keys() == first.keys()
    assert all(low <= drawn[key] <= high for key, (low, high) in waving.ranges.items())
    assert drawn[low] != 0.1
    best = waving.values(trials, SEED)
    assert best[RATE] == 3.125
    assert best.keys() == first.keys()


def test_a_trial_never_sees_the_validation_images(tmp_path: Path) -> None:
    data = a_cell(tmp_path, decay={"kind": "constant"}).recipe_of(TRIAL, {RATE: 0.2}).data
    assert data.held_out is not None
    assert (data.held_out.samples, data.train_split) == (300, 1137)


def test_a_trial_of_epochs_without_the_held_out_images_ends_at_the_same_rate(
    tmp_path: Path,
) -> None:
    """1,437 images make 75 updates in 5 epochs, 1,137 make 60 of them."""
    cell = a_cell(tmp_path, warmup=None, decay={"kind": "exp", "gamma": 0.98})
    recipe = cell.recipe.model_copy(update={"duration": Duration(epochs=5)})
    whole = rates(recipe)
    trial = rates(replace(cell, recipe=recipe).recipe_of(TRIAL, {}))
    assert (len(whole), len(trial)) == (75, 60)
    assert trial[-1] == pytest.approx(whole[-1], rel=0.02)


def test_a_trial_of_updates_has_lengths_in_epochs_at_the_same_updates(tmp_path: Path) -> None:
    """150 updates are 10 epochs of 15 or, without the held-out images, 12.5 of 12."""
    parts = {"warmup": {"epochs": 2}, "decay": {"kind": "steps", "at": [{"epochs": 6}]}}
    changes = {**SETTINGS, "duration": {"steps": 150}, "evaluation": {"every_epochs": 2}}
    digits = {"digits": {"recipe": "digits_96", "set": changes}}
    (cell,) = cells(tmp_path, recipes=digits, policies={"one": parts})
    trial = cell.recipe_of(TRIAL, {})
    assert rates(trial) == rates(cell.recipe)
    evaluated = make_plan(trial, workers=1).evaluate_after
    assert evaluated == pytest.approx(make_plan(cell.recipe, workers=1).evaluate_after, rel=0.02)


def test_runs_of_a_tracked_study_are_one_group(tmp_path: Path) -> None:
    tracked = {**SETTINGS, "tracking": ["wandb"]}
    for changes, group in ((SETTINGS, None), (tracked, "tracked")):
        digits = {"digits": {"recipe": "digits_96", "set": changes}}
        found = cells(tmp_path, recipes=digits, name="tracked")
        assert {cell.recipe.tracking.group for cell in found} == {group}


def test_settings_whose_library_is_missing_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    study = load_study("gtdlbench")
    assert study.settings is not None
    assert {"dali", "two-workers-horovod"} < study.settings.keys()
    monkeypatch.setattr(trained, "find_spec", lambda _: None)
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
        ("digits-policies", 4, 36),
        ("digits-settings", 10, 30),
        ("digits-staleness", 7, 21),
        ("digits-servers", 5, 25),
    ],
)
def test_installed_studies_have_their_runs(
    name: str, cells: int, runs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outside of the repository, and as many as the header of the file says."""
    monkeypatch.chdir(tmp_path)
    study = load_study(name)
    found = kind_of(study).cells_of(study, Path(name).parent)
    assert (len(found), sum(len(cell.slots) for cell in found)) == (cells, runs)
    header = (files("largebatch") / f"lab/studies/presets/{name}.yaml").read_text()
    said = re.search(r"= (\d+) runs", header)
    assert said is None or int(said[1]) == runs


def test_an_unknown_study_is_answered_with_the_installed_ones() -> None:
    with pytest.raises(RecipeError, match=r"rudr: .*lrbench.*rudra"):
        load_study("rudr")
