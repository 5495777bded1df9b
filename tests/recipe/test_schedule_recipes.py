"""The recipes whose batch or image size changes: their plans, and one that starts on its images."""

from pathlib import Path

import pytest
from real_subsets import CLASSES, SAMPLES, TRAIN, write_subset
from short_runs import log

from largebatch import load_recipe, run
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


def test_the_progressive_recipe_starts_on_real_images_across_a_change(
    real_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = write_subset(real_data / "imagenette224", tmp_path / "images")
    sizes = "[{until: {steps: 2}, image_size: 32}, {until: null, image_size: 48}]"
    small = ("data.image_size=64", "data.eval_resize=73", f"data.resolution={sizes}")
    recipe = load_recipe(PROGRESSIVE, [*SAMPLES, *small])
    assert recipe.train_samples == CLASSES * TRAIN
    summary = run(recipe, data=folder, out=tmp_path / "run", max_steps=3)
    assert (summary.status, summary.samples) == ("paused", 3 * 32)
    assert [record["step"] for record in log(tmp_path / "run", "step")] == [0, 1, 2]
