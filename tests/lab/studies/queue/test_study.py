"""The study file and its cells: what is refused, and which recipes the runs of a cell have."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from schedules_of import schedule_of
from short_studies import STUDY, write_study

from largebatch import load_recipe
from largebatch.errors import RecipeError
from largebatch.lab.studies.policies.page import PAGE
from largebatch.lab.studies.queue import study as study_module
from largebatch.lab.studies.queue.cells import Cell, cells_of, rungs
from largebatch.lab.studies.queue.phases import first_values, seed_slots
from largebatch.lab.studies.queue.study import (
    RATE,
    load_configuration_study,
    load_study,
    settings_here,
)
from largebatch.recipe.arithmetic.plan import make_plan
from largebatch.recipe.recipe import Recipe
from largebatch.recipe.section import Duration

EXAMPLES = Path(__file__).parents[4] / "docs" / "examples"
TRIANGLE = {"kind": "tri", "low_lr": 0.05, "half_cycle": {"steps": 3}}
PIECES = [
    {"length": {"steps": 4}, "peak_lr": 0.5, "decay": {"kind": "constant"}},
    {"length": None, "peak_lr": 0.1, "decay": {"kind": "cosine", "end_lr": 0.01}},
]


def cells(folder: Path, **changes: Any) -> list[Cell]:  # noqa: ANN401 -- any part of a study
    return cells_of(load_study(write_study(folder, **changes)), folder)


def a_cell(folder: Path, *, search: dict[str, Any] | None = None, **parts: Any) -> Cell:  # noqa: ANN401
    (cell,) = cells(folder, policies={"one": parts}, search={**STUDY["search"], **(search or {})})
    return cell


def rates(recipe: Recipe) -> list[float]:
    schedule = schedule_of(recipe)
    return [schedule(step) for step in range(make_plan(recipe, workers=1).steps)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seedz": 3}, r"seedz: unknown key; did you mean 'seeds'\?"),
        ({"name": "a/b"}, "name: string should match pattern"),
        ({"policies": {}}, "policies: dictionary should have at least 1 item"),
        ({"search": {"trials": 3}}, "search.held_out: missing"),
        (
            {"search": {**STUDY["search"], "metric": "f1"}},
            "search.metric: input should be 'top1' or 'top5', got \"f1\"",
        ),
        (
            {"search": {**STUDY["search"], "seed": 2}},
            r"search.seed \(2\) is one of the seeds 1 to 2",
        ),
        (
            {"search": {**STUDY["search"], "keys": {RATE: [2, 1]}}},
            "keys.schedule.peak_lr: the first factor must be below the second one",
        ),
        (
            {"policies": {"a": {"decay": {"kind": "fix"}}, "b": {"decay": {"kind": "fix"}}}},
            "policies.a and policies.b are the same: leave one of them out",
        ),
        (
            {"policies": {"Fix": {"decay": {"kind": "fix"}}, "fix": {}}},
            "policies.Fix and policies.fix name the same folder where case makes no difference",
        ),
        (
            {"recipes": {"Study.db-wal": {"recipe": "digits_96"}}},
            "recipes.Study.db-wal: a study has a file of this name",
        ),
        (
            {"recipes": {PAGE: {"recipe": "digits_96"}}},
            "recipes.study.html: a study has a file of this name; give another",
        ),
        ({"robustness_seeds": 3}, r"robustness_seeds \(3\) must not exceed seeds \(2\)"),
        ({"robustness_scales": [0.5, 1]}, "expected different multiples, without 1"),
        ({"robustness_scales": [0.5, 0.5]}, "expected different multiples, without 1"),
        (
            {"recipes": {"digits": {"recipe": "digits_96", "sets": {}}}},
            r"recipes.digits.sets: unknown key; did you mean 'set'\?",
        ),
    ],
)
def test_a_study_file_with_a_mistake_is_refused_by_its_key(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(RecipeError, match=message):
        load_study(write_study(tmp_path, **changes))


def test_a_policy_that_is_given_twice_is_refused_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "study.yaml"
    path.write_text("name: a\npolicies:\n  flat: {decay: {kind: fix}}\n  flat: {}\n")
    with pytest.raises(RecipeError, match=r'study.yaml:4: found duplicate key "flat"$'):
        load_study(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"policies": {"up": {"decay": {"kind": "cosin"}}}},
            "recipe digits with policy up: (?s:.*)cosin",
        ),
        (
            {"recipes": {"no": {"recipe": "no_such_recipe"}}},
            "recipe no with policy fall: .*neither a file nor an installed recipe",
        ),
        (
            {"recipes": {"late": {"recipe": "digits_96_softsync"}}},
            "recipe late with policy fall: .*has a protocol; `largebatch study staleness` compares",
        ),
        (
            {"search": {**STUDY["search"], "keys": {"optimizer.moment": [0.1, 2]}}},
            r"search.keys.optimizer.moment: unknown key; did you mean 'momentum'\?",
        ),
        (
            {
                "search": {
                    **STUDY["search"],
                    "keys": {RATE: [0.1, 2], "schedule.decay.cycle": [1, 2]},
                }
            },
            "search.keys.schedule.decay.cycle: no policy of the study has this key",
        ),
        (
            {"search": {**STUDY["search"], "keys": {"polish.scope": [0.1, 2]}}},
            "search.keys.polish.scope: the recipe has null there, expected a number above 0",
        ),
        (
            {"search": {**STUDY["search"], "keys": {"optimizer.momentum": [0.1, 2]}}},
            r"optimizer.momentum: input should be less than 1",
        ),
        (
            {"search": {**STUDY["search"], "held_out": 2000}},
            r"data.held_out.samples \(2000\) must be fewer than data.train_samples \(1437\)",
        ),
    ],
)
def test_a_cell_that_cannot_be_run_is_refused_by_its_names(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(RecipeError, match=message):
        cells(tmp_path, **changes)


@pytest.mark.parametrize(
    "parts",
    [
        {"decay": TRIANGLE},
        {"decay": {"kind": "piecewise", "pieces": PIECES}},
        {"warmup": {"steps": 3}, "start_lr": 0.1, "decay": {"kind": "poly", "end_lr": 0.2}},
        {"decay": {"kind": "exp", "gamma": 0.8}},
    ],
)
def test_every_rate_of_a_schedule_moves_with_the_peak_so_that_its_shape_stays(
    tmp_path: Path, parts: dict[str, Any]
) -> None:
    cell = a_cell(tmp_path, **parts)
    own = rates(cell.recipe)
    for factor in (1 / 16, 0.3, 16.0):
        found = rates(cell.at({RATE: 0.5 * factor}))
        assert found == pytest.approx([factor * rate for rate in own], rel=1e-9)


def test_a_seed_has_the_recipe_that_train_is_given_with_the_values_that_were_found(
    tmp_path: Path,
) -> None:
    cell = a_cell(tmp_path, decay={"kind": "cosine"})
    changes = [
        f"{key}={json.dumps(value)}" for key, value in STUDY["recipes"]["digits"]["set"].items()
    ]
    changes += ["schedule.decay={kind: cosine}", "schedule.peak_lr=0.2", "seed=2"]
    assert cell.seed_recipe({RATE: 0.2}, seed=2) == load_recipe("digits_96", changes)
    assert cell.seed_recipe({RATE: 0.2}, seed=2, scale=0.1).schedule.peak_lr == 0.02


def test_a_trial_never_sees_the_validation_images(tmp_path: Path) -> None:
    data = a_cell(tmp_path, decay={"kind": "constant"}).trial_recipe({RATE: 0.2}).data
    assert data.held_out is not None
    assert (data.held_out.samples, data.train_split) == (300, 1137)
    assert a_cell(tmp_path).seed_recipe({}, seed=1).data.held_out is None


def test_a_shorter_trial_follows_the_same_shape(tmp_path: Path) -> None:
    """Held against the rates of the whole run, read at places that lie apart by 1 / part."""
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


def test_a_trial_of_epochs_that_lack_the_images_held_out_ends_at_the_same_rate(
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
    """150 updates are 10 epochs of 15 or, without the images held out, 12.5 of 12."""
    parts = {"warmup": {"epochs": 2}, "decay": {"kind": "steps", "at": [{"epochs": 6}]}}
    digits = STUDY["recipes"]["digits"]
    changes = {"duration": {"steps": 150}, "evaluation": {"every_epochs": 2}}
    recipes = {"digits": {**digits, "set": {**digits["set"], **changes}}}
    search = {**STUDY["search"], "prune": False}
    (cell,) = cells(tmp_path, recipes=recipes, policies={"one": parts}, search=search)
    trial = cell.trial_recipe({})
    assert rates(trial) == rates(cell.recipe)
    evaluated = make_plan(trial, workers=1).evaluate_after
    assert evaluated == pytest.approx(cell.plan.evaluate_after, rel=0.02)


def test_a_trial_is_compared_on_the_way_and_not_within_its_warm_up(tmp_path: Path) -> None:
    long_warmup = a_cell(tmp_path, warmup={"steps": 5}).trial_recipe({})
    plan = make_plan(long_warmup, workers=1)
    assert rungs(plan) == [6, 9]
    assert set(rungs(plan)) <= set(plan.evaluate_after)
    assert rungs(make_plan(a_cell(tmp_path, warmup=None).trial_recipe({}), workers=1)) == [3, 6, 9]


def test_all_searches_have_the_same_budget_and_begin_at_the_same_factors(tmp_path: Path) -> None:
    search = {
        **STUDY["search"],
        "trials": 5,
        "keys": {RATE: [0.5, 16], "loss.label_smoothing": [0.5, 2]},
    }
    for cell in cells(tmp_path, search=search):
        first = first_values(cell)
        assert len(first) == 5
        assert first == [
            {RATE: 0.5, "loss.label_smoothing": 0.1},
            {RATE: 1.25, "loss.label_smoothing": 0.1},  # 0.4 times the rate is out of the range
            {RATE: 3.125, "loss.label_smoothing": 0.1},
            *({}, {}),
        ]


def test_the_example_can_be_run() -> None:
    study = load_study(EXAMPLES / "digits_policies.yaml")
    assert len(cells_of(study, EXAMPLES)) == 4


def test_a_key_of_a_shape_is_searched_for_the_policies_that_have_it(tmp_path: Path) -> None:
    waves = {"decay": {"kind": "tri", "low_lr": 0.1, "half_cycle": {"epochs": 0.2}}}
    keys = {RATE: [0.1, 2], "schedule.decay.half_cycle.epochs": [0.5, 2],
            "schedule.decay.low_lr": [0.5, 2]}  # fmt: skip
    changes = {"policies": {"fix": {"decay": {"kind": "fix"}}, "tri": waves}}
    study = load_study(write_study(tmp_path, **changes, search={**STUDY["search"], "keys": keys}))
    fix, tri = cells_of(study, tmp_path)
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


def test_lrbench_is_installed_and_its_runs_are_at_these_scales() -> None:
    study = load_study(Path("lrbench"))
    cells = cells_of(study, Path())
    assert len(cells) == 20
    scales = {slot.about["scale"] for slot in seed_slots(study)}
    assert scales == {0.25, 0.5, 1, 2, 4}
    with pytest.raises(RecipeError, match="neither a file nor an installed study; those are lrb"):
        load_study(Path("lrbenc"))


def test_settings_whose_library_is_missing_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    study = load_configuration_study(Path("gtdlbench"))
    assert {"dali", "two-workers-horovod"} < study.settings.keys()
    monkeypatch.setattr(study_module, "find_spec", lambda name: None)
    left = settings_here(study)
    assert study.settings.keys() - left.settings.keys() == {"dali", "two-workers-horovod"}
    cells = {cell.variant: cell for cell in cells_of(left, Path())}
    assert cells["avx2"].environment["ONEDNN_MAX_CPU_ISA"] == "AVX2"
