"""Recipes of other optimizers than LARS, and of changing batches or images, by their sources."""

import math
from pathlib import Path

import numpy as np
import pytest
from schedules_of import schedule_of

from largebatch import load_recipe
from largebatch.recipe.arithmetic.plan import make_plan
from largebatch.recipe.optimizers import LAMB, SGD, AdamW, Muon, MuonAdamW, ScheduleFree, Shampoo

FOLDER = Path(__file__).parents[2] / "recipes" / "imagenet"

SHAMPOO = {
    32768: {
        "learning_rate": 16.22,
        "shampoo_beta1": 0.96,
        "shampoo_beta2": 0.75,
        "weight_decay": 6.248644874764753e-05,
        "shampoo_start_step": 5,
        "num_epochs": 44,
        "warmup_epochs": 5,
        "label_smoothing": 0.2,
    },
    65536: {
        "learning_rate": 12.0,
        "shampoo_beta1": 0.953,
        "shampoo_beta2": 0.666,
        "weight_decay": 0.000225,
        "shampoo_start_step": 5,
        "num_epochs": 60,
        "warmup_epochs": 2,
        "label_smoothing": 0.1,
    },
}
"""mlcommons/training_results_v1.0, Google, resnet-research-JAX-Distributed-Shampoo: train.py's
shampoo_params, with the label smoothing of run_and_time.sh or the flag's default."""

EPOCH = {32768: 157 / 4, 65536: 79 / 4}
"""Its steps_per_epoch: those of four epochs, rounded up, over four."""


@pytest.mark.parametrize("batch", SHAMPOO)
def test_shampoo_is_the_entry_of_google(batch: int) -> None:
    source, recipe = SHAMPOO[batch], load_recipe(FOLDER / f"resnet50_{batch}_shampoo.yaml")
    section = recipe.optimizer
    assert isinstance(section, Shampoo)
    assert recipe.batch.global_batch == batch
    assert recipe.schedule.peak_lr == source["learning_rate"]
    assert (section.momentum, section.beta2) == (source["shampoo_beta1"], source["shampoo_beta2"])
    assert section.weight_decay == pytest.approx(source["weight_decay"], rel=1e-7)
    assert section.start_step == source["shampoo_start_step"]
    assert (section.root, section.block_size, section.root_every) == (4, 128, 1)
    assert (section.graft, section.nesterov) == ("sgd", True)
    assert recipe.loss.label_smoothing == source["label_smoothing"]
    plan = make_plan(recipe, workers=128)
    assert plan.steps == EPOCH[batch] * source["num_epochs"]
    assert plan.warmup_steps == pytest.approx(EPOCH[batch] * source["warmup_epochs"], abs=0.5)


def test_lamb_is_the_code_of_its_authors() -> None:
    """fastalgo/imagenet_resnet50_lamb: run.sh at 32,768, and the flags' defaults.

    Its rate is (total - step) * peak / (total - warm-up) after the warm-up.
    """
    recipe = load_recipe(FOLDER / "resnet50_32768_lamb.yaml")
    section = recipe.optimizer
    assert isinstance(section, LAMB)
    assert (section.beta1, section.beta2, section.eps) == (0.9, 0.999, 1e-6)
    assert section.weight_decay == 1.5
    assert section.bias_correction is False
    assert section.max_grad_norm == 1.0
    assert recipe.loss.label_smoothing == 0.1
    plan = make_plan(recipe, workers=256)
    assert (plan.global_batch, plan.steps, plan.warmup_steps) == (32768, 3519, 782)
    rate = schedule_of(recipe)
    for step in (0, 300, 782, 2000, 3400):
        expected = 0.04 * (step / 782 if step <= 782 else (3519 - step) / (3519 - 782))
        assert rate(step) == pytest.approx(expected, rel=1e-3)


def test_schedule_free_is_the_public_configuration() -> None:
    recipe = load_recipe(FOLDER / "resnet50_1024_schedule_free.yaml")
    section = recipe.optimizer
    assert isinstance(section, ScheduleFree)
    assert (recipe.batch.global_batch, recipe.duration.epochs) == (1024, 90)
    assert (section.momentum, section.weight_decay) == (0.9, 5e-5)
    assert (section.weight_power, section.weight_lr_power) == (0.75, 2.0)
    assert section.statistics_samples == 102400
    assert recipe.loss.label_smoothing == 0.1
    warmup, rate = make_plan(recipe, workers=8).warmup_steps, schedule_of(recipe)
    assert warmup == pytest.approx(5 * 1281167 / 1024, abs=1)
    assert rate(0) == pytest.approx(10 / warmup, rel=1e-6)  # the library's (k + 1) / warm-up
    assert rate(warmup) == rate(50_000) == 10.0


NADAMW = {"learning_rate": 0.001308209823469072, "weight_decay": 0.16375311233774334}
"""mlcommons/submissions_algorithms, algoperf_v05, external_tuning/baseline, the first trial of its
tuning_search_space.json; its batch for ImageNet is 1,024."""


@pytest.mark.parametrize("batch", [8192, 32768])
def test_muon_has_the_rate_of_algoperf_scaled_to_its_batch(batch: int) -> None:
    recipe = load_recipe(FOLDER / f"resnet50_{batch}_muon.yaml")
    section, root = recipe.optimizer, math.sqrt(batch / 1024)
    assert isinstance(section, Muon)
    assert isinstance(section.others, MuonAdamW)
    assert section.adjust_lr == "match_rms_adamw"
    assert recipe.schedule.peak_lr == pytest.approx(NADAMW["learning_rate"] * root, rel=2e-3)
    assert section.weight_decay == pytest.approx(NADAMW["weight_decay"] * root, rel=2e-3)
    assert section.others.weight_decay == section.weight_decay
    assert section.others.lr is None
    plan, rate = make_plan(recipe, workers=64), schedule_of(recipe)
    assert plan.warmup_steps == pytest.approx(0.1 * plan.steps, abs=1)
    middle = (plan.warmup_steps + plan.steps) // 2
    assert rate(middle) == pytest.approx(recipe.schedule.peak_lr / 2, rel=1e-2)


@pytest.mark.parametrize("batch", [8192, 32768])
def test_muon_differs_from_lars_in_optimizer_and_schedule_only(batch: int) -> None:
    muon, lars = (
        load_recipe(FOLDER / f"resnet50_{batch}_{name}.yaml").model_dump(
            exclude={"name", "optimizer", "schedule"}
        )
        for name in ("muon", "nus")
    )
    assert muon == lars


FFCV = {16: (11, 13), 88: (65, 76)}
"""libffcv/ffcv-imagenet, rn50_configs: start_ramp and end_ramp by the number of epochs."""


@pytest.mark.parametrize("epochs", FFCV)
def test_ffcv_has_the_sizes_and_rates_of_its_script(epochs: int) -> None:
    """get_resolution and get_cyclic_lr of train_imagenet.py, whose epochs are counted from 0."""
    recipe = load_recipe(FOLDER / f"resnet50_4096_ffcv_{epochs}.yaml")
    assert isinstance(recipe.optimizer, SGD)
    assert (recipe.optimizer.momentum, recipe.optimizer.weight_decay) == (0.9, 1e-4)
    assert recipe.loss.label_smoothing == 0.1
    plan, rate = make_plan(recipe, workers=8), schedule_of(recipe)
    assert plan.device_batch == 512
    for epoch in range(epochs):
        wanted = np.interp([epoch], FFCV[epochs], [160, 192])[0]
        step = round((epoch + 0.5) * plan.steps_per_epoch)
        ((_, size),) = plan.sized(range(step, step + 1), otherwise=0)
        assert size == int(np.round(wanted / 32)) * 32
        expected = np.interp(plan.epoch(step), [0, 2, epochs], [1.7e-4, 1.7, 0])
        assert rate(step) == pytest.approx(expected, abs=2e-3)
    assert recipe.data.image_size == 256
    assert recipe.data.eval_resize == round(256 * 256 / 224)


def test_the_vision_transformer_has_the_rate_of_big_vision_scaled_to_its_batch() -> None:
    """configs/vit_s16_i1k.py; there `wd` is not multiplied by the rate, and `lr` is its peak."""
    lr, wd, warmup = 0.001, 0.0001, 10_000
    recipe = load_recipe(FOLDER / "vit_s16_4096_adamw.yaml")
    section, factor = recipe.optimizer, recipe.batch.global_batch / 1024
    assert isinstance(section, AdamW)
    assert recipe.schedule.peak_lr == pytest.approx(lr * math.sqrt(factor))
    assert recipe.schedule.peak_lr * section.weight_decay == pytest.approx(wd * factor)
    plan = make_plan(recipe, workers=64)
    assert plan.warmup_steps == warmup / factor
    assert plan.bn_span is None


def test_the_batch_doubles_after_a_third_of_the_epochs_on_as_many_workers_as_in_the_paper() -> None:
    recipe = load_recipe(FOLDER / "resnet50_34816_batch_schedule.yaml")
    plan = make_plan(recipe, workers=2176)
    assert (plan.device_batch, plan.sync_workers) == (16, 8)
    sizes = [(len(part), size, number) for part, size, number in plan.within(range(plan.steps))]
    assert sizes == [(1104, 34816, 1), (1104, 69632, 2)]
    assert plan.epoch(1104) == pytest.approx(30, abs=0.02)
    assert 90 <= plan.epoch(plan.steps) < 90 + 69632 / 1281167
    assert plan.epoch(plan.warmup_steps) == pytest.approx(16, abs=0.02)


def test_the_sizes_are_ffcvs_in_proportion() -> None:
    plan = make_plan(
        load_recipe(FOLDER.parent / "imagenette" / "imagenette_resnet18_progressive.yaml"),
        workers=1,
    )
    epochs = [
        (size, plan.epoch(part.stop)) for part, size in plan.sized(range(plan.steps), otherwise=0)
    ]
    assert [size for size, _ in epochs] == [96, 128]
    assert [end for _, end in epochs] == pytest.approx([60, 80], abs=0.02)
