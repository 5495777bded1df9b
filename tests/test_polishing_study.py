"""The polishing study: sharing stages changes no result, and its statistics are correct."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import ttest_1samp
from short_runs import SMALL

from largebatch import load_recipe, run
from largebatch.data.index.index import Index
from largebatch.recipe.polish import Affine, Polish, Statistics
from largebatch.recipe.section import Duration
from largebatch.training.checkpoint import load_checkpoint

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "benchmarks"))

from polishing_cells import Cell, Size, device_batch, recipe_of, train_arms  # noqa: E402
from polishing_data import SETS, draw  # noqa: E402
from polishing_figure import draw_all  # noqa: E402
from polishing_study import GRID, _selected, best_rates, cells, has, to_tune, write  # noqa: E402
from polishing_tables import student, tables  # noqa: E402

STATISTICS = Statistics(samples=1437)
POLISHED = {
    "clean 1": Polish(clean=Duration(epochs=1), statistics=STATISTICS),
    "affine": Polish(affine=Affine(epochs=2, lr=0.1), statistics=STATISTICS),
}


@pytest.mark.long
def test_an_arm_equals_a_run_without_shared_stages(
    tmp_path: Path,
) -> None:
    changes = ["polish=null", "duration.epochs=2", "schedule.warmup.epochs=1", *SMALL]
    recipe = load_recipe(
        ROOT / "recipes" / "quickstart" / "digits_96.yaml",
        [*changes, "evaluation.every_epochs=null"],
    )
    cell = Cell(data="digits", batch="large", area=0.35, seed=1, rate=1, clean=(1,), affine=True)
    arms = train_arms(cell, recipe, tmp_path / "shared", data=None)
    assert set(arms) == cell.arms
    for name, polish in POLISHED.items():
        own = recipe.model_copy(update={"polish": polish})
        run(own.with_execution(device_batch=device_batch(recipe)), out=tmp_path / name)
        alone = load_checkpoint(max((tmp_path / name / "checkpoints").glob("*.safetensors")))
        shared = load_checkpoint(
            max((tmp_path / "shared" / name / "checkpoints").glob("*.safetensors"))
        )
        for key, tensor in alone.state["model"].items():
            assert torch.equal(shared.state["model"][key], tensor), (name, key)
        names = ("control" if name == "affine" else "", name, f"{name} + statistics")
        for arm, stage in zip(names, alone.stages, strict=True):
            if arm:
                assert arms[arm] == {"top1": stage.top1, "loss": stage.loss}


def test_parts_of_a_set_are_disjoint_balanced_and_the_first_is_always_the_same() -> None:
    labels = np.random.default_rng(0).integers(0, 4, 400)
    sizes = np.full(400, 32)
    index = Index(
        root=Path(), classes=tuple("abcd"), paths=[""] * 400, labels=labels,
        heights=sizes, widths=sizes,
    )  # fmt: skip
    first, second = draw(index, [40, 20])
    assert not set(first) & set(second)
    assert np.bincount(labels[first]).tolist() == [10] * 4
    assert np.bincount(labels[second]).tolist() == [5] * 4
    assert first.tolist() == draw(index, [40, 0])[0].tolist()
    with pytest.raises(ValueError, match="same number"):
        draw(index, [41])


def test_an_interval_is_that_of_a_t_test() -> None:
    values = [1.3, 0.2, 2.4, 1.1, 0.9]
    expected = ttest_1samp(values, 0).confidence_interval(0.95)
    found = student(values)
    assert (found["low"], found["high"]) == pytest.approx((expected.low, expected.high))
    assert found["mean"] == pytest.approx(1.18)


def test_differences_are_paired_by_seed() -> None:
    top1 = {1: (0.5, 0.52), 2: (0.6, 0.63), 3: (0.7, 0.74)}
    cells = {
        f"x{seed}": {
            "group": "g",
            "seed": seed,
            "arms": {"control": {"top1": control}, "clean 2": {"top1": clean}},
        }
        for seed, (control, clean) in top1.items()
    }
    (row,) = [row for row in tables(cells)["polishing"] if row["arm"] == "clean 2"]
    assert row["difference"]["mean"] == pytest.approx(3)
    assert row["difference"]["high"] == pytest.approx(3 + 4.302653 / 3**0.5)  # t of 2 degrees


@pytest.mark.parametrize("data", ["cifar10", "fashion_mnist"])
@pytest.mark.parametrize("optimizer", ["lars", "sgd"])
def test_both_batches_train_the_same_epochs_with_one_span(data: str, optimizer: str) -> None:
    size = Size(images=7_680, epochs=12)
    large, small = (
        recipe_of(
            Cell(data=data, batch=batch, area=0.35, seed=1, rate=1, optimizer=optimizer),
            size,
            val_samples=10_000,
        )
        for batch in ("large", "small")
    )
    assert large.batch.global_batch == 32 * small.batch.global_batch
    assert large.batch.bn_span == small.batch.bn_span == small.batch.global_batch
    assert large.duration == small.duration == Duration(epochs=12)
    assert large.data == small.data


def test_rates_are_tried_until_the_best_has_neighbours_on_both_sides() -> None:
    tuning: dict[str, Any] = {}
    asked = []
    while missing := [cell for cell in to_tune(tuning) if cell.data == "cifar10"]:
        asked += [cell.rate for cell in missing if cell.batch == "large"]
        for cell in missing:
            best = 40 if cell.batch == "large" else 0.3
            top1 = -abs(cell.rate - best) / best
            tuning[f"{cell.key} {cell.rate}"] = {
                "group": cell.group,
                "rate": cell.rate,
                "arms": {"control": {"top1": top1}},
            }
    assert asked == [2, 4, 8, 16, 32, 64]
    rates = best_rates(tuning)
    assert rates["cifar10", "lars", "large"] == 32
    assert rates["cifar10", "lars", "small"] == 0.3
    assert rates["cifar10", "sgd", "small"] == 0.3
    assert all(cell.data == "cifar10" for cell in cells(5, rates))
    by_batch = {cell.batch: cell.rate for cell in cells(1, rates) if cell.optimizer == "sgd"}
    assert by_batch["large"] == 32 * by_batch["small"]


def test_an_unfinished_search_has_no_rate() -> None:
    first = to_tune({})[0]
    tuning = {"a": {"group": first.group, "rate": 4.0, "arms": {"control": {"top1": 0.5}}}}
    assert not best_rates(tuning)


def test_a_result_at_another_rate_or_with_fewer_arms_is_not_reused() -> None:
    cell = Cell(data="cifar10", batch="large", area=0.35, seed=1, rate=2)
    assert has({cell.key: result(cell.arms, rate=2)}, cell)
    assert not has({cell.key: result(cell.arms, rate=4)}, cell)
    assert not has({cell.key: result(cell.arms - {"clean 2"}, rate=2)}, cell)
    assert not has({}, cell)


def test_a_cell_that_diverged_is_not_trained_again() -> None:
    cell = Cell(data="cifar10", batch="large", area=0.35, seed=1, rate=2)
    diverged = {"rate": 2.0, "arms": {"control": {"top1": 0.1, "loss": None}}}
    assert has({cell.key: diverged}, cell)


def result(arms: set[str], *, rate: float) -> dict[str, Any]:
    return {"rate": rate, "arms": {arm: {"top1": 0.5, "loss": 1.0} for arm in arms}}


def test_labels_are_complete_words() -> None:
    one, ten = (Cell(data="cifar10", batch="large", area=0.35, seed=n, rate=2) for n in (1, 10))
    assert _selected([one, ten], ["large", "seed 1"]) == [one]


def synthetic() -> dict[str, Any]:
    """A study of two seeds that has all the cells there are."""
    rates = {(data, *pair): 1.0 for data in SETS for pair in GRID}
    done = {}
    for cell in cells(2, rates):
        arms = {name: {"top1": 0.5 + 0.01 * cell.seed, "loss": 1.0} for name in cell.arms}
        done[cell.key] = {"group": cell.group, "seed": cell.seed, "rate": 1.0, "arms": arms}
    size = Size(images=7_680, epochs=12)
    return {
        "cells": done,
        "tuning": {},
        "images": size.images,
        "epochs": size.epochs,
        "large_batch": size.large_batch,
        "small_batch": size.small_batch,
        "test_images": 10_000,
    }


def test_a_written_result_states_its_current_circumstances(tmp_path: Path) -> None:
    write(synthetic() | {"command": "an old one", "commit": "0"}, tmp_path / "study.json")
    found = json.loads((tmp_path / "study.json").read_text())
    assert found["command"] == " ".join(["python", *sys.argv])
    assert found["commit"] != "0"
    row = next(row for row in found["polishing"] if row["arm"] == "clean 2")
    assert (row["top1"]["mean"], row["difference"]["mean"]) == (pytest.approx(51.5), 0)


def test_every_image_of_a_whole_study_is_drawn(tmp_path: Path) -> None:
    draw_all(synthetic(), tmp_path)
    names = {path.name for path in tmp_path.glob("*.png")}
    assert names == {f"polishing_study{part}.png" for part in ("", "_rates", "_batches")}
