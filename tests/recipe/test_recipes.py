"""Every recipe that comes with the package: it loads, plans, and starts on its real data."""

import math
from pathlib import Path

import pytest
from real_subsets import CLASSES, SAMPLES, TRAIN, write_subset
from schedules_of import schedule_of
from short_runs import log

from largebatch import load_recipe, run
from largebatch.recipe.arithmetic.plan import make_plan
from largebatch.recipe.recipe import Recipe

RECIPES = Path(__file__).parents[2] / "recipes"
FILES = {path.stem: path for path in sorted(RECIPES.glob("*/*.yaml"))}

PAIRS = {
    "cifar10": ("cifar10_resnet8_128", "cifar10_resnet8_3200"),
    "fashion_mnist": ("fashion_mnist_resnet9_128", "fashion_mnist_resnet9_1920"),
    "imagenette224": ("imagenette_resnet18_128px_32", "imagenette_resnet18_128px_160"),
}
LONG = {name: [pytest.mark.long] for name in PAIRS["imagenette224"]}
BY_RECIPE = [
    pytest.param(data, name, id=name, marks=LONG.get(name, []))
    for data, pair in PAIRS.items()
    for name in pair
]


def load(name: str, *changes: str) -> Recipe:
    return load_recipe(FILES[name], changes)


@pytest.mark.parametrize("name", FILES)
def test_every_recipe_loads_and_can_be_planned(name: str) -> None:
    recipe = load(name)
    assert recipe.name == name.replace("_", "-")
    plan = make_plan(recipe, workers=1)
    rates = list(map(schedule_of(recipe), range(plan.steps)))
    assert max(rates) == pytest.approx(recipe.schedule.peak_lr, rel=0.01)
    text = FILES[name].read_text()
    assert "\n# Measured" in text


@pytest.mark.parametrize(("small", "large"), PAIRS.values(), ids=PAIRS)
def test_a_pair_differs_only_in_what_a_large_batch_needs(small: str, large: str) -> None:
    ours, other = load(small), load(large)
    for key in ("data", "model", "duration", "seed", "precision"):
        assert getattr(ours, key) == getattr(other, key)
    assert ours.batch.bn_span == other.batch.bn_span
    assert (ours.optimizer.kind, other.optimizer.kind) == ("sgd", "lars")
    assert ours.polish is None
    assert other.polish is not None
    assert other.polish.statistics is not None
    assert other.polish.statistics.samples == other.data.train_samples
    assert other.schedule.warmup is not None
    assert other.loss.label_smoothing == 0.1


@pytest.mark.parametrize(
    ("name", "steps", "steps_per_epoch"),
    [
        pytest.param("cifar10_resnet8_128", 64_063, 390.6, id="He et al.'s 64,000 iterations"),
        pytest.param("cifar10_resnet8_3200", 2_563, 15.6, id="cifar10"),
        pytest.param("cifar10_resnet9_128", 5_079, 390.6, id="cifar10 small, short"),
        pytest.param("cifar10_resnet9_1600", 407, 31.2, id="cifar10 large, short"),
        pytest.param("cifar10_airbench_2000", 200, 25.0, id="airbench94's 200 updates"),
        pytest.param("cifar10_airbench_2000_nesterov", 200, 25.0, id="airbench94, Nesterov"),
        pytest.param("fashion_mnist_resnet9_128", 3_282, 468.8, id="fashion small"),
        pytest.param("fashion_mnist_resnet9_1920", 219, 31.2, id="fashion large"),
        pytest.param("imagenette_resnet18_128px_32", 6_250, 78.1, id="imagenette small"),
        pytest.param("imagenette_resnet18_128px_160", 1_250, 15.6, id="imagenette large"),
    ],
)
def test_the_plans_are_these(name: str, steps: int, steps_per_epoch: float) -> None:
    """15.6 updates an epoch are those of ImageNet in batches of 81,920, 31.2 in half of that."""
    plan = make_plan(load(name), workers=2)
    assert plan.steps == steps
    assert round(plan.steps_per_epoch, 1) == steps_per_epoch


@pytest.fixture(scope="module")
def folders(real_data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A few images of each set."""
    root = tmp_path_factory.mktemp("real")
    return {name: write_subset(real_data / name, root / name) for name in PAIRS}


@pytest.mark.parametrize(("data", "name"), BY_RECIPE)
def test_it_starts_on_real_images(
    data: str,
    name: str,
    folders: dict[str, Path],
    tmp_path: Path,
    own_cache: None,
) -> None:
    """Three updates in batches of at most 64, Imagenette's at half the size.

    The loss begins near that of guessing, ln 10.
    """
    recipe = load(name)
    changes = [*SAMPLES, f"batch.global_batch={min(recipe.batch.global_batch, 64)}"]
    if recipe.polish is not None:
        changes.append(f"polish.statistics.samples={CLASSES * TRAIN}")
    if recipe.data.eval_resize is not None:
        changes += ["data.image_size=64", "data.eval_resize=73"]
    changed = load(name, *changes)
    summary = run(changed, data=folders[data], out=tmp_path / "run", max_steps=3)
    records = log(tmp_path / "run", "step")
    assert summary.steps == len(records) == 3
    rate = schedule_of(changed)
    assert [record["lr"] for record in records] == pytest.approx([rate(step) for step in range(3)])
    assert records[0]["loss"] == pytest.approx(math.log(10), abs=1.0)
    assert all(math.isfinite(record["loss"]) for record in records)
