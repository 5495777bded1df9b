import math
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from largebatch.errors import PlanError, RecipeError
from largebatch.recipe.arithmetic.plan import describe_spans, make_plan
from largebatch.recipe.loading import load_recipe
from largebatch.recipe.recipe import Recipe

FOLDER = Path(__file__).parents[3] / "recipes"


def digits(*overrides: str) -> Recipe:
    return load_recipe(FOLDER / "quickstart" / "digits_96.yaml", overrides)


def test_fujitsus_run_has_its_published_shape() -> None:
    recipe = load_recipe(FOLDER / "imagenet" / "resnet50_86016_fujitsu.yaml")
    plan = make_plan(recipe, workers=2048)
    assert (plan.device_batch, plan.accumulation, plan.bn_span) == (42, 1, 42)
    assert (plan.steps, plan.warmup_steps, plan.clean_steps) == (1350, 540, 75)


def test_mlperfs_run_has_the_shape_of_the_rule() -> None:
    recipe = load_recipe(FOLDER / "imagenet" / "resnet50_32768_mlperf.yaml")
    plan = make_plan(recipe, workers=64)
    assert (plan.steps, plan.warmup_steps, plan.accumulation) == (2268, 626, 2)
    assert [round(plan.epoch(step)) for step in plan.evaluate_after[:3]] == [3, 7, 11]


def test_epochs_become_steps_once_and_nothing_is_dropped() -> None:
    plan = make_plan(digits(), workers=2)
    assert plan.steps_per_epoch == pytest.approx(14.96875)
    assert plan.steps == 599  # 40 epochs are 598.75 batches; the last one wraps
    assert plan.warmup_steps == 75
    assert plan.train_steps == 524
    assert plan.epoch(plan.steps) >= 40


def test_every_position_is_taken_once_in_every_division() -> None:
    for workers, device_batch in product((1, 2, 4), (8, 12, 24)):
        recipe = digits("batch.bn_span=4", "polish=null")
        plan = make_plan(recipe.with_execution(device_batch=device_batch), workers=workers)
        taken = [
            position
            for step in range(2)
            for micro in range(plan.accumulation)
            for rank in range(workers)
            for position in plan.positions(step, micro, rank)
        ]
        assert taken == list(range(2 * 96))


def test_the_device_batch_is_the_largest_that_holds_whole_spans() -> None:
    recipe = load_recipe(FOLDER / "imagenet" / "resnet50_86016_fujitsu.yaml")
    assert make_plan(recipe, workers=1).device_batch == 168  # 252 and 210 do not divide 86,016
    assert make_plan(recipe, workers=512).device_batch == 168
    big_span = digits("batch.global_batch=1437", "batch.bn_span=479", "data.train_samples=1437")
    assert make_plan(big_span, workers=3).device_batch == 479


@pytest.mark.parametrize(
    ("workers", "device_batch", "possible"),
    [
        (5, None, "1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 96"),
        (0, None, "1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 96"),
        (1, 32, "48, 96"),
        (2, 16, "24, 48"),  # three workers would have to share a span
        (4, 8, "12, 24"),
    ],
)
def test_a_batch_that_cannot_be_divided_is_refused_with_possible_numbers(
    workers: int, device_batch: int | None, possible: str
) -> None:
    with pytest.raises(PlanError, match=f": {possible}$"):
        make_plan(digits().with_execution(device_batch=device_batch), workers=workers)


def test_workers_share_spans_where_a_worker_can_hold_no_whole_one() -> None:
    recipe = load_recipe(FOLDER / "imagenet" / "resnet50_32768_mlperf.yaml")
    plan = make_plan(recipe, workers=1024)
    assert (plan.device_batch, plan.accumulation, plan.sync_workers) == (32, 1, 4)
    assert plan.statistics_batch == 128
    words = describe_spans(plan)
    assert words.startswith("128 samples = 4 workers x 32, which exchange statistics (a worker's")
    assert make_plan(recipe, workers=256).sync_workers == 1
    asked = make_plan(recipe.with_execution(device_batch=64), workers=256)
    assert (asked.accumulation, asked.sync_workers) == (2, 2)
    assert describe_spans(asked).endswith("(because of the device batch)")
    assert make_plan(digits(), workers=96).sync_workers == 48
    plain = digits("model={name: lenet5}", "batch.bn_span=null", "polish=null")
    assert make_plan(plain, workers=96).sync_workers == 1
    assert describe_spans(make_plan(plain, workers=96)) == "no BatchNorm"


@given(st.integers(1, 24), st.integers(2, 24), st.integers(1, 24))
def test_every_division_of_the_global_batch_has_a_plan_with_whole_spans(
    workers: int, span: int, factor: int
) -> None:
    global_batch = math.lcm(workers, span) * factor
    recipe = digits(f"batch.global_batch={global_batch}", f"batch.bn_span={span}", "polish=null",
                    "schedule.warmup=null", "data.train_samples=14400")  # fmt: skip
    plan = make_plan(recipe, workers=workers)
    assert plan.workers * plan.device_batch * plan.accumulation == global_batch
    assert plan.workers % plan.sync_workers == 0
    together = plan.sync_workers * plan.device_batch
    assert together == span if plan.sync_workers > 1 else together % span == 0


def test_measuring_takes_any_device_batch_and_whole_spans_for_statistics() -> None:
    for device_batch, whole in ((None, 96), (5, 48), (48, 48), (60, 96)):
        plan = make_plan(digits()).measuring(workers=5, device_batch=device_batch)
        assert (plan.workers, plan.device_batch) == (5, device_batch or 96)
        assert (plan.statistics_batch, plan.sync_workers) == (whole, 1)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("schedule.warmup.epochs=40", r"schedule.warmup \(599 steps\)"),
        ("polish.clean.epochs=50", r"polish.clean \(748 steps\).*duration"),
    ],
)
def test_lengths_that_contradict_each_other_are_refused(override: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        make_plan(digits(override), workers=1)


def test_accuracy_is_measured_at_the_interval_in_epochs() -> None:
    plan = make_plan(
        digits("evaluation={every_epochs: 4, offset_epochs: 1}", "duration.epochs=12"), workers=1
    )
    assert plan.evaluate_after == (15, 75, 135)
    assert make_plan(digits("evaluation={}"), workers=1).evaluate_after == ()


def test_a_run_that_would_hardly_do_more_than_evaluate_is_refused() -> None:
    changes = ["duration={steps: 2000000}", "evaluation.every_epochs=0.1"]
    with pytest.raises(RecipeError, match="0.1 .*1,33.,.* 100,"):
        make_plan(digits(*changes), workers=1)
