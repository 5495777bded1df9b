"""Runs whose batch and image size change: what they count, and that they are resumed exactly."""

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from decoding import with_decoder
from short_runs import AFFINE, CLEAN, STATISTICS, a_recipe, content, log, weights

from largebatch import run
from largebatch.data.index.index import Index
from largebatch.data.order import sample_ids
from largebatch.data.pipeline import open_images
from largebatch.data.types import DecodedBatches, Request
from largebatch.distributed.serial import Serial
from largebatch.recipe.arithmetic.plan import make_plan

CHANGES = (
    "batch.schedule=["
    "{after: {steps: 3}, global_batch: 144, lr_factor: 1.5}, "
    "{after: {steps: 6}, global_batch: 48, lr_factor: 0.5}]"
)
SIZES = [96] * 3 + [144] * 3 + [48] * 2
GROWING = (
    "data.resolution=[{until: {steps: 2}, image_size: 8}, {until: {steps: 4}, image_size: 24}]"
)
RECIPE = a_recipe(CLEAN, AFFINE, STATISTICS, changes=(CHANGES, GROWING))


def assert_same(one: Path, other: Path) -> None:
    """Compare weights, statistics and momentum, bit by bit."""
    for name, value in weights(one).items():
        assert torch.equal(weights(other)[name], value), name
    ours, theirs = (content(folder)["optimizer"]["state"] for folder in (one, other))
    assert ours.keys() == theirs.keys() != set()
    for key, state in ours.items():
        for name, value in state.items():
            assert torch.equal(theirs[key][name], value)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing interrupts."""
    out = tmp_path_factory.mktemp("batches") / "whole"
    run(RECIPE, out=out)
    return out


def test_a_run_counts_the_samples_of_every_update(whole: Path) -> None:
    summary = json.loads((whole / "summary.json").read_text(encoding="utf-8"))
    assert (summary["status"], summary["steps"]) == ("finished", 8 + 3)
    assert summary["samples"] == sum(SIZES) + 3 * 48  # affine goes on with the last batch
    steps = log(whole, "step")
    assert [round(s["images_per_second"] * s["step_seconds"]) for s in steps] == [*SIZES, *[48] * 3]
    epochs = [sum(SIZES[: k + 1]) / 1437 for k in range(8)]
    assert [step["epoch"] for step in steps[:8]] == pytest.approx(epochs)
    losses = np.array([step["loss"] for step in steps[:8]])
    np.testing.assert_array_less(np.abs(np.diff(np.log(losses))), 0.3)  # a mean over its own batch


def test_a_run_that_is_resumed_across_changes_ends_with_identical_weights(
    whole: Path, tmp_path: Path
) -> None:
    """It stops at a change, and between two."""
    for stop in (3, 5):
        run(RECIPE, out=tmp_path, max_steps=stop, resume=stop > 3)
    summary = run(RECIPE, out=tmp_path, resume=True)
    assert (summary.status, summary.samples) == ("finished", sum(SIZES) + 3 * 48)
    assert_same(whole, tmp_path)


@pytest.mark.parametrize(("workers", "device_batch"), [(1, 48), (2, 24), (4, 12)])
def test_workers_see_together_the_samples_of_one_in_the_order_of_a_constant_batch(
    workers: int, device_batch: int
) -> None:
    recipe = a_recipe(CLEAN, changes=(CHANGES,)).with_execution(device_batch=device_batch)
    plan = make_plan(recipe, workers=workers)
    opened = open_images(recipe, plan, Serial(torch.device("cpu")), folder=None)
    shares: list[list[Request]] = []

    def note(_: Index, wanted: Iterable[Request]) -> DecodedBatches:
        shares.append(list(wanted))
        yield from ()

    for rank in range(workers):
        list(replace(with_decoder(opened, note), rank=rank).training(range(8), clean=False))
    found = [one for together in zip(*shares, strict=True) for one in together]
    whole = opened.training_request(range(sum(SIZES)), clean=False)
    for field in ("samples", "boxes", "flips"):
        parts = np.concatenate([getattr(one, field) for one in found])
        np.testing.assert_array_equal(parts, getattr(whole, field))
    assert (
        whole.samples.tolist() == sample_ids(range(sum(SIZES)), seed=1, num_samples=1437).tolist()
    )
