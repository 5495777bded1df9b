"""The recipes of optimizers other than LARS hold the numbers of their sources, copied out here."""

from pathlib import Path

import pytest
from schedules_of import schedule_of

from largebatch import load_recipe
from largebatch.recipe.arithmetic.plan import make_plan
from largebatch.recipe.installed import origin
from largebatch.recipe.optimizers import LAMB, ScheduleFree, Shampoo

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


def test_what_is_from_memory_is_marked_on_its_line_and_never_called_published() -> None:
    text = (FOLDER / "resnet50_32768_nesterov.yaml").read_text()
    marked = [line.split(":")[0].strip() for line in text.splitlines() if "# from memory" in line]
    assert marked == [
        *("bn_span", "momentum", "weight_decay", "peak_lr", "warmup", "label_smoothing")
    ]
    published = next(line for line in text.splitlines() if line.startswith("# Published"))
    assert published == "# Published: 75.92 % top-1 after 2,512 steps, median of 50 seeds."
    recipe = load_recipe(FOLDER / "resnet50_32768_nesterov.yaml")
    assert recipe.optimizer.kind == "sgd"
    assert recipe.optimizer.nesterov
    assert make_plan(recipe, workers=256).steps == 2512


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_recipe_of_imagenet_names_its_source_and_claims_no_measurement(path: Path) -> None:
    found = origin(path.read_text())
    assert found.after
    assert found.measured == ""
