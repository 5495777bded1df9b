"""The schedule of a suggested recipe where policies were measured, and where none fits."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from optuna.storages import InMemoryStorage
from policy_databases import Policy, fill_storage
from schedules_of import schedule_of
from short_studies import STUDY

from largebatch.lab.planner.draft import draft
from largebatch.lab.planner.suggest import DataSet, Suggestion, suggest
from largebatch.lab.studies.policies.groups import Group, groups_of
from largebatch.lab.studies.policies.shape import shape_for
from largebatch.lab.studies.queue.results import CellResults, read_results
from largebatch.recipe.arithmetic.plan import make_plan
from largebatch.recipe.loading import parse_recipe
from largebatch.recipe.recipe import Recipe

DIGITS = DataSet(samples=1437, val_samples=360, classes=10, image_size=16)
BEST = Policy(reached=[4] * 3, top1=[0.96, 0.95, 0.97])
OTHER = Policy(reached=[4] * 3, top1=[0.9, 0.91, 0.9])
HALVES = {"warmup": None, "decay": {"kind": "steps", "gamma": 0.5, "at": [{"steps": 5}]}}
COSINE = {"warmup": {"epochs": 0.2}, "decay": {"kind": "cosine", "end_lr": 0.01}}


def measured(folder: Path, shape: dict[str, Any], *, batch: int = 96) -> Group:
    storage = InMemoryStorage()
    digits = STUDY["recipes"]["digits"]
    changes = {**digits["set"], "batch.global_batch": batch}
    fill_storage(
        storage,
        folder,
        {"shape": BEST, "other": OTHER},
        policies={"shape": shape, "other": {"decay": {"kind": "constant"}}},
        recipes={"digits": {**digits, "set": changes}},
    )
    (group,) = groups_of("a database", read_results(storage))
    return group


def suggested(batch: int = 96) -> Suggestion:
    return suggest(batch, data=DIGITS, model="lenet5", epochs=4)


def rates(recipe: Recipe) -> list[float]:
    schedule = schedule_of(recipe)
    return [schedule(step) for step in range(make_plan(recipe, workers=1).steps)]


def of_batch(group: Group, batch: int) -> Group:
    def change(cell: CellResults) -> CellResults:
        sizes = cell.recipe.batch.model_copy(update={"global_batch": batch})
        return replace(cell, recipe=cell.recipe.model_copy(update={"batch": sizes}))

    return changed(group, change)


def changed(group: Group, change: Callable[[CellResults], CellResults]) -> Group:
    return replace(group, cells=tuple(map(change, group.cells)))


@pytest.mark.parametrize("shape", [HALVES, COSINE], ids=["steps", "cosine"])
@pytest.mark.parametrize(("batch", "of"), [(96, 96), (64, 48)])
def test_the_shape_that_was_measured_is_stretched_over_the_suggested_run(
    tmp_path: Path, shape: dict[str, Any], batch: int, of: int
) -> None:
    """Held against the measured rates, interpolated where as large a part of the run has passed."""
    group, found = measured(tmp_path, shape, batch=of), suggested(batch)
    taken = shape_for(found, [of_batch(group, 96), group])
    assert taken is not None
    recipe = parse_recipe(draft(found, schedule=taken.schedule), source="suggested")
    assert recipe.schedule.peak_lr == found.peak_lr
    own, here = rates(group.cells[0].recipe), rates(recipe)
    assert (len(own), len(here) > 50) == (12, True)
    places = np.arange(len(here)) * 12 / len(here)
    expected = np.interp(places, range(12), own) / group.cells[0].recipe.schedule.peak_lr
    inside = (places <= 11) & ((shape is COSINE) | (places < 4) | (places > 5.2))
    assert np.array(here)[inside] / found.peak_lr == pytest.approx(expected[inside], abs=0.02)


def test_the_words_name_the_study_the_policy_and_what_was_not_taken(tmp_path: Path) -> None:
    group = measured(tmp_path, COSINE)
    taken = shape_for(suggested(), [group])
    assert taken is not None
    assert (
        "the shape of shape, which has the highest top-1 of 2 policies in digits-96, lenet5, "
        in (taken.words)
    )
    assert "other is 5.67 points (" in taken.words
    assert (
        "its rate is not (schedule.peak_lr 0.5 with lars): the peak is the points'" in taken.words
    )


def test_of_two_batches_the_nearest_is_that_of_the_smaller_ratio(tmp_path: Path) -> None:
    """56 is 32 more than 24 and 40 less than 96; 2.3 times the one, and the other 1.7 times it."""
    group = measured(tmp_path, COSINE)
    taken = shape_for(suggested(56), [of_batch(group, 24), group])
    assert taken is not None
    assert "in digits-96, lenet5, batch 96, " in taken.words


def test_no_shape_is_taken_where_too_little_is_known(tmp_path: Path) -> None:
    group = measured(tmp_path, COSINE)
    few = changed(group, lambda cell: replace(cell, seeds=cell.seeds[:2]))
    taken = shape_for(suggested(), [few])
    assert taken is not None
    assert taken.schedule is None
    assert "insufficient data: 2 seeds: the noise of seeds is hardly known" in taken.words
    beyond = shape_for(suggested(64), [group])
    assert beyond is not None
    assert beyond.schedule is None
    assert "in batches of 96 to 96, and 64 lies beyond them" in beyond.words
    assert shape_for(replace(suggested(), model="resnet18"), [group]) is None
    assert shape_for(replace(suggested(), data=replace(DIGITS, classes=9)), [group]) is None
