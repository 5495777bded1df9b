"""Everything that changes an image or a gradient together: the run is that of plain PyTorch.

Losses and weights are compared in float64 with a reference written by hand (plain_run.py,
plain_augment.py), which draws each number by itself and computes whole updates in one process.
"""

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest
import torch
from on_forked_workers import on_forked_workers
from on_workers import has_horovod, on_workers
from plain_run import (
    CASES,
    CLASSES,
    LIMITS,
    MIXED,
    STEPS,
    Case,
    Part,
    Trained,
    plain_run,
    recipe_of,
    train,
    updates_by_hand,
    write_images,
)
from short_runs import log, weights

from largebatch.data.pipeline import open_images
from largebatch.distributed.serial import Serial
from largebatch.recipe.arithmetic.plan import make_plan


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("images")
    write_images(root)
    return root


reference = cache(plain_run)


def train_in_parts(case: Case, parts: Sequence[Part], images: Path, out: Path) -> None:
    for part in parts:
        if part.horovod:
            on_workers(train, case, part, images, out, workers=part.workers, horovod=True)
        elif part.workers == 1:
            train(case, part, images, out)
        else:
            on_forked_workers(train, case, part, images, out, workers=part.workers)


def assert_trained(out: Path, expected: Trained) -> None:
    steps = log(out, "step")
    assert [step["loss"] for step in steps] == pytest.approx(expected.losses, rel=1e-10)
    assert [step["gradient_norm"] for step in steps] == pytest.approx(expected.norms, rel=1e-10)
    torch.testing.assert_close(weights(out), expected.weights, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("case", CASES)
def test_images_are_those_of_pillow_and_torchvision_to_the_last_bit(
    case: Case, images: Path
) -> None:
    recipe = recipe_of(case)
    plan = make_plan(recipe.with_execution(device_batch=32))
    opened = open_images(recipe, plan, Serial(torch.device("cpu")), folder=images)
    for step, (expected, shown) in enumerate(zip(*updates_by_hand(case, images), strict=True)):
        steps = range(step, step + 1)
        batches = [*opened.training(steps, clean=step >= STEPS)]
        assert torch.equal(torch.cat([batch.images for batch in batches]), expected)
        labels = torch.cat([batch.labels for batch in batches])
        if step >= MIXED:
            assert labels.tolist() == [label.own for label in shown]
            continue
        shares = torch.zeros(len(shown), CLASSES)
        for row, label in enumerate(shown):
            shares[row, label.own] += label.share
            shares[row, label.partners] += 1 - label.share
        torch.testing.assert_close(labels, shares)


@pytest.mark.parametrize("case", CASES)
def test_a_run_in_parts_on_one_two_and_three_workers_is_plain_pytorchs(
    case: Case, images: Path, tmp_path: Path
) -> None:
    parts = [Part(1, 4, until=1), Part(2, 1, until=2), Part(3, 4)]
    train_in_parts(case, parts, images, tmp_path / "run")
    expected = reference(case, images)
    assert min(expected.norms) < LIMITS[case] < max(expected.norms)  # some updates are clipped
    assert_trained(tmp_path / "run", expected)


def horovod(workers: int, accumulation: int, until: int = STEPS + 1) -> object:
    part = Part(workers, accumulation, until, horovod=True)
    return pytest.param([part], marks=has_horovod)


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    "parts",
    [
        *([Part(workers, accumulation)] for workers in (1, 2, 3) for accumulation in (1, 4)),
        *(horovod(workers, accumulation) for workers in (2, 3) for accumulation in (1, 4)),
        [Part(3, 1, until=2), Part(1, 1)],
        pytest.param([Part(2, 4, until=3, horovod=True), Part(3, 1)], marks=has_horovod),
        pytest.param([Part(1, 1, until=1), Part(3, 4, horovod=True)], marks=has_horovod),
    ],
    ids=str,
)
def test_any_division_and_any_resumption_is_plain_pytorchs(
    case: Case, parts: Sequence[Part], images: Path, tmp_path: Path
) -> None:
    train_in_parts(case, parts, images, tmp_path / "run")
    assert_trained(tmp_path / "run", reference(case, images))
