"""Recipes between the reference points: against NumPy, and against the points themselves."""

import math
from pathlib import Path

import numpy as np
import pytest
from schedules_of import schedule_of

from largebatch.cli.main import DONE, USER, main
from largebatch.errors import RecipeError
from largebatch.lab.planner.suggest import (
    IMAGES,
    SETTINGS,
    VALIDATION,
    fit_epochs,
    reference_points,
    suggest,
)
from largebatch.recipe.arithmetic.plan import make_plan
from largebatch.recipe.loading import load_recipe, parse_recipe
from largebatch.recipe.optimizers import LARS

CIFAR = load_recipe("cifar10_resnet8_128")

# mlperf-logging, rcps_resnet.json: runs less the fastest and the slowest
MEANS = {
    1632: 35.0,
    3264: 35.154,
    4096: 39.875,
    8192: 41.875,
    13056: 45.5,
    32768: 56.0,
    49152: 68.0,
    58880: 80.0,
    65536: 84.5,
    67840: 85.846,
}


def law(batches: list[int]) -> tuple[float, float]:
    """Fit E_min and B_crit by NumPy: rows are a / E + s B / E = 1."""
    mean = np.array([MEANS[batch] for batch in batches])
    matrix = np.stack([1 / mean, np.array(batches) / mean], axis=1)
    (shortest, slope), *_ = np.linalg.lstsq(matrix, np.ones(len(batches)))
    return float(shortest), float(shortest / slope)


def test_the_points_are_those_of_mlperf() -> None:
    points = reference_points()
    assert {point.batch: point.mean_epochs for point in points} == MEANS
    data = load_recipe(points[0].name).data
    assert (data.train_samples, data.val_samples) == (IMAGES, VALIDATION)


def test_the_epoch_law_is_that_of_numpy_and_of_the_field() -> None:
    found = fit_epochs(reference_points())
    assert (found.shortest, found.critical) == pytest.approx(law(list(MEANS)), rel=1e-9)
    assert found.shortest == pytest.approx(34.5, rel=0.01)
    assert found.critical == pytest.approx(46_149, rel=0.02)
    errors = [abs(found(batch) / mean - 1) for batch, mean in MEANS.items()]
    assert max(errors) < 0.06


@pytest.mark.parametrize("batch", [1_920, 6_000, 10_240, 24_576, 40_960, 57_344, 66_560])
def test_between_points_settings_are_power_laws_of_the_batch(batch: int) -> None:
    points = reference_points()
    found = suggest(batch).recipe
    schedule, epochs = found.schedule, found.duration.epochs
    assert schedule.warmup is not None
    assert schedule.warmup.epochs is not None
    assert epochs is not None
    assert isinstance(found.optimizer, LARS)
    for ours, key in (
        (schedule.peak_lr, "learning rate"),
        (schedule.warmup.epochs / epochs, "warm-up, share of the run"),
        (1 - found.optimizer.momentum, "1 - momentum"),
        (found.optimizer.weight_decay, "weight decay"),
    ):
        x, y = (
            np.log([point.batch for point in points]),
            np.log([SETTINGS[key](point.recipe) for point in points]),
        )
        expected = math.exp(np.interp(math.log(batch), x, y))
        assert ours == pytest.approx(expected, rel=5e-3), key
    assert found.batch.bn_span is not None
    assert batch % found.batch.bn_span == 0
    assert epochs >= fit_epochs(points)(batch)


@pytest.mark.parametrize("point", reference_points(), ids=lambda point: point.name)
def test_at_a_reference_point_it_is_that_points_recipe(point: object) -> None:
    name = getattr(point, "name", "")
    theirs = load_recipe(name)
    found = suggest(theirs.batch.global_batch)
    ours = parse_recipe(found.text)
    for key in ("duration", "data", "model", "batch", "optimizer", "schedule", "loss"):
        if key == "schedule":
            warmup, expected = ours.schedule.warmup, theirs.schedule.warmup
            assert warmup is not None
            assert expected is not None
            assert warmup.epochs == pytest.approx(expected.epochs, rel=5e-3)
            assert ours.schedule.model_copy(update={"warmup": expected}) == theirs.schedule
        else:
            assert getattr(ours, key) == getattr(theirs, key)
    assert name in found.source


@pytest.mark.parametrize("batch", [1_632, 5_040, 30_000, 67_840, 75_000, 86_016])
@pytest.mark.parametrize("epochs", [None, 30])
def test_what_is_suggested_loads_plans_and_polishes(batch: int, epochs: int | None) -> None:
    recipe = parse_recipe(suggest(batch, epochs=epochs).text)
    plan = make_plan(recipe, workers=1)
    assert 0 < plan.warmup_steps < plan.steps
    assert plan.clean_steps == pytest.approx(plan.steps * 75 / 1350, rel=5e-3, abs=1)
    assert recipe.polish is not None
    assert recipe.polish.statistics is not None
    rates = list(map(schedule_of(recipe), range(plan.steps)))
    assert max(rates) == pytest.approx(recipe.schedule.peak_lr, rel=0.01)
    if epochs:
        assert recipe.duration.epochs == epochs


def test_beyond_the_points_it_extrapolates_and_prints_so() -> None:
    found, last = suggest(80_000), load_recipe(reference_points()[-1].name)
    assert found.recipe.schedule.peak_lr == last.schedule.peak_lr
    assert found.recipe.optimizer == last.optimizer
    assert f"{34.53 * (1 + 80_000 / 46_764):.1f}" in found.text
    assert "extrapolates: 80,000 is 1.18 times" in found.source
    assert "extrapolates" not in suggest(60_000).source


def test_another_data_set_is_looked_up_by_updates_in_an_epoch() -> None:
    """CIFAR-10 in batches of 1,000 makes 50 updates an epoch, as ImageNet in 25,623."""
    recipe = parse_recipe(suggest(1_000, base=CIFAR, epochs=30).text)
    like = suggest(25_600, epochs=30).recipe
    assert recipe.schedule.peak_lr == pytest.approx(like.schedule.peak_lr, rel=1e-3)
    assert recipe.schedule.warmup == like.schedule.warmup
    assert isinstance(recipe.optimizer, LARS)
    assert (recipe.data, recipe.model) == (CIFAR.data, CIFAR.model)
    assert make_plan(recipe, workers=1).steps == 1_500


def test_the_range_for_other_data_is_what_the_messages_give() -> None:
    for batch in (1, 10**7):
        with pytest.raises(RecipeError, match="--batch") as caught:
            suggest(batch, base=CIFAR)
        assert "3,35" in str(caught.value)  # 86,016 of ImageNet
    with pytest.raises(RecipeError, match="64 to 3,35"):
        suggest(63, base=CIFAR)
    assert suggest(64, base=CIFAR).recipe.batch.global_batch == 64


@pytest.mark.parametrize("batch", [6_007, 8_209, 65_537])
def test_a_batch_without_spans_is_refused_with_the_nearest_that_have_some(batch: int) -> None:
    with pytest.raises(RecipeError, match="spans") as caught:
        suggest(batch)
    below, above = (
        int(number.replace(",", ""))
        for number in str(caught.value).rpartition(": ")[2].split(" and ")
    )
    assert below < batch < above
    for near in (below, above):
        assert suggest(near).recipe.batch.bn_span in range(32, 513)
    for other in range(below + 1, above):
        assert not [span for span in range(32, 513) if other % span == 0]


@pytest.mark.parametrize(
    ("options", "number"),
    [
        (["--batch", "1000"], "1,632"),
        (["--batch", "86017"], "86,016"),
        (["--batch", "6007"], "6,006"),
        (["nowhere", "--batch", "4096"], "nowhere"),
    ],
)
def test_what_it_cannot_answer_is_one_line_and_no_file(
    options: list[str],
    number: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["lab", "suggest", *options]) == USER
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("\n") == 1
    assert number in shown.err
    assert not list(tmp_path.iterdir())


def test_what_does_not_transfer_to_another_optimizer_is_marked() -> None:
    lines = suggest(4096).text.splitlines()
    marked = [line.split(":")[0].strip() for line in lines if "# for LARS" in line]
    assert marked == ["momentum", "weight_decay", "peak_lr", "warmup"]


def test_a_recipe_keeps_its_images_network_and_loss(tmp_path: Path) -> None:
    out, mine = tmp_path / "mine.yaml", load_recipe("digits_96")
    assert main(["lab", "suggest", "digits_96", "--batch", "64", "--out", str(out)]) == DONE
    found = load_recipe(out)
    assert (found.data, found.model, found.loss) == (mine.data, mine.model, mine.loss)
    assert found.batch.global_batch == 64
    assert isinstance(found.optimizer, LARS)


def test_a_network_without_batchnorm_gets_no_spans_and_no_polishing() -> None:
    changes = ("model={name: lenet5}", "batch.bn_span=null", "polish=null", "seed=3")
    mine = load_recipe("digits_96", [*changes, "execution.device_batch=96"])
    suggested = suggest(64, base=mine)
    found = parse_recipe(suggested.text)
    assert (found.batch.bn_span, found.polish, found.seed) == (None, None, 3)
    assert found.execution.cache == mine.execution.cache
    assert found.execution.device_batch is None
    assert not [word for word in ("BatchNorm", "divisor", "polish:") if word in suggested.source]
