"""Held-out training images, for decisions on stages or for validation; never trained on.

The choice is written out here: the numbers of the samples sorted by Philox words of a stream of its
own, of which the first are held out.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import short_runs
import torch
from decoding import noting, worker
from hypothesis import given
from hypothesis import strategies as st
from plain_images import GREY, load
from torch.nn import functional as F

from largebatch import run
from largebatch.data.datasets import digits
from largebatch.data.order import divide
from largebatch.data.types import Request
from largebatch.distributed.serial import Serial
from largebatch.errors import LargebatchError
from largebatch.recipe.loading import load_recipe, parse_recipe
from largebatch.recipe.recipe import Recipe
from largebatch.runs.checkpoints import evaluate_checkpoint, polish_checkpoint
from largebatch.runs.options import Options

DIGITS = Path(__file__).parents[2] / "recipes" / "quickstart" / "digits_96.yaml"
CPU = Serial(torch.device("cpu"))
HELD_OUT, VALIDATION = 5, 7


def by_hand(seed: int, num_samples: int, held_out: int, stream: int = HELD_OUT) -> set[int]:
    generator = np.random.Philox(key=[seed, stream], counter=[0, 0, 0, 0])
    words = [int(generator.random_raw()) for _ in range(num_samples)]
    return set(sorted(range(num_samples), key=words.__getitem__)[:held_out])


def a_recipe(num_samples: int, held_out: int, *, batch: int = 12, measured: int = 2) -> Recipe:
    polish = (
        f"clean: {{steps: 1}}, statistics: {{samples: {measured}}}, affine: {{steps: 9, lr: 1}}"
    )
    return load_recipe(
        DIGITS,
        [
            *("data.source=synthetic", f"data.train_samples={num_samples}", "data.image_size=8"),
            *("data.crop_area=[0.2, 1]", "data.classes=2", "data.val_samples=3"),
            *(f"batch.global_batch={batch}", "batch.bn_span=2", "loss.label_smoothing=0"),
            *("duration={steps: 9}", "schedule.warmup=null", "evaluation={}"),
            f"polish={{{polish}, keep: better, held_out: {held_out}}}",
        ],
    )


class Asked:
    """Requests of all workers to their decoders, in the order of the run."""

    def __init__(self, recipe: Recipe, *, workers: int = 1, device_batch: int = 2) -> None:
        self.workers = [
            worker(recipe, rank=rank, workers=workers, device_batch=device_batch)
            for rank in range(workers)
        ]

    def __call__(self, stage: str, *given: Any, **options: Any) -> list[int]:  # noqa: ANN401 -- of the stage
        """Return the samples of a method of the pipelines that yields batches."""
        parts: list[list[Request]] = []
        for pipeline in self.workers:
            asked: list[Request] = []
            list(getattr(noting(pipeline, asked), stage)(*given, **options))
            parts.append(asked)
        longest = max(map(len, parts))
        rounds = [[p[i] for p in parts if i < len(p)] for i in range(longest)]
        return [s for together in rounds for one in together for s in one.samples.tolist()]


@given(
    workers=st.integers(1, 4),
    accumulation=st.integers(1, 3),
    half=st.integers(1, 3),
    num_samples=st.integers(4, 60),
    data=st.data(),
)
def test_every_stage_uses_all_but_the_held_out_samples_once_per_epoch(
    workers: int, accumulation: int, half: int, num_samples: int, data: st.DataObject
) -> None:
    held_out = data.draw(st.integers(1, num_samples - 2))
    measured = 2 * data.draw(st.integers(1, (num_samples - held_out) // 2))
    batch = workers * accumulation * 2 * half
    recipe = a_recipe(num_samples, held_out, batch=batch, measured=measured)
    expected = by_hand(recipe.seed, num_samples, held_out)
    others = sorted(set(range(num_samples)) - expected)
    asked = Asked(recipe, workers=workers, device_batch=2 * half)
    steps = range(-(-2 * len(others) // batch))
    for clean in (False, True):
        found = asked("training", steps, clean=clean)
        assert len(found) == len(steps) * batch
        for epoch in range(2):
            assert sorted(found[epoch * len(others) :][: len(others)]) == others
    assert set(asked("statistics", measured)) <= set(others)
    assert len(set(asked("statistics", measured))) == measured
    assert sorted(asked("held_out")) == sorted(expected)


def test_the_held_out_samples_depend_on_the_seed_not_on_the_order_of_training() -> None:
    trained, held_out = divide(1437, held_out=200, seed=1)
    assert set(held_out.tolist()) == by_hand(1, 1437, 200)
    assert set(held_out.tolist()) != by_hand(2, 1437, 200)
    assert sorted([*trained, *held_out]) == list(range(1437))
    first = Asked(a_recipe(1437, 200))("training", range(20), clean=False)
    assert len(set(first)) == 240  # else one would be missing from the epoch


def a_split_recipe(num_samples: int, *, seed: int = 3, polish: str = "null") -> Recipe:
    words = [f"data.held_out={{samples: 7, seed: {seed}}}", f"polish={polish}"]
    base = a_recipe(num_samples, 1).model_dump_json()
    return parse_recipe(base, words)


@pytest.mark.parametrize(("workers", "device_batch"), [(1, 4), (3, 2)])
def test_validation_images_are_the_same_on_all_workers_and_never_trained_on(
    workers: int, device_batch: int
) -> None:
    expected = by_hand(3, 40, 7, stream=VALIDATION)
    polish = "{statistics: {samples: 26}, keep: better, held_out: 7}"
    for recipe in (a_split_recipe(40), a_split_recipe(40, polish=polish)):
        asked = Asked(recipe, workers=workers, device_batch=device_batch)
        assert sorted(asked("validation")) == sorted(expected)
        trained = asked("training", range(9), clean=False)
        decide = asked("held_out")
        assert len(set(decide)) == (7 if recipe.polish else 0)
        assert set(trained) == set(range(40)) - expected - set(decide)
        assert not expected & set(decide)
    assert set(asked("statistics", 26)) == set(trained)


def test_validation_images_can_be_measured_after_a_run_that_held_out_others(tmp_path: Path) -> None:
    """By timm's model and images read by Pillow; only an evaluation may change this."""
    recipe = short_runs.a_recipe(short_runs.CLEAN, changes=("data.held_out={samples: 200}",))
    run(recipe, out=tmp_path / "run")
    options = Options(overrides=("data.held_out=null",))
    metrics = evaluate_checkpoint(tmp_path / "run", options).metrics
    files = sorted(digits.write_digits().glob("val/*/*"))
    images, labels = load(files, colours=GREY, size=16)
    model = short_runs.timms(recipe)
    model.load_state_dict(short_runs.weights(tmp_path / "run"))
    with torch.no_grad():
        logits = model.eval()(images)
    assert metrics.samples == len(files) == 360
    assert metrics.loss == pytest.approx(F.cross_entropy(logits, labels).item(), rel=1e-4)
    with pytest.raises(LargebatchError, match="held_out=null"):
        evaluate_checkpoint(tmp_path / "run", options, training=True)
    with pytest.raises(LargebatchError, match="held_out=null"):
        polish_checkpoint(tmp_path / "run", replace(options, out=tmp_path / "polished"))
