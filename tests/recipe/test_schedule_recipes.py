"""The recipes whose batch or image size changes: their plans, and one that starts on its images."""

from pathlib import Path

import pytest

from largebatch import load_recipe
from largebatch.recipe.arithmetic.plan import make_plan

RECIPES = Path(__file__).parents[2] / "recipes"
PROGRESSIVE = RECIPES / "imagenette" / "imagenette_resnet18_progressive.yaml"


def test_the_batch_doubles_after_a_third_of_the_epochs_on_as_many_workers_as_in_the_paper() -> None:
    recipe = load_recipe(RECIPES / "imagenet" / "resnet50_34816_batch_schedule.yaml")
    plan = make_plan(recipe, workers=2176)
    assert (plan.device_batch, plan.sync_workers) == (16, 8)
    sizes = [(len(part), size, number) for part, size, number in plan.within(range(plan.steps))]
    assert sizes == [(1104, 34816, 1), (1104, 69632, 2)]
    assert plan.epoch(1104) == pytest.approx(30, abs=0.02)
    assert 90 <= plan.epoch(plan.steps) < 90 + 69632 / 1281167
    assert plan.epoch(plan.warmup_steps) == pytest.approx(16, abs=0.02)


def test_the_sizes_are_ffcvs_in_proportion() -> None:
    plan = make_plan(load_recipe(PROGRESSIVE), workers=1)
    epochs = [
        (size, plan.epoch(part.stop)) for part, size in plan.sized(range(plan.steps), otherwise=0)
    ]
    assert [size for size, _ in epochs] == [96, 128]
    assert [end for _, end in epochs] == pytest.approx([60, 80], abs=0.02)
