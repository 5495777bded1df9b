from itertools import product
from pathlib import Path

import pytest

from largebatch.errors import PlanError, RecipeError
from largebatch.loading import load_recipe
from largebatch.plan import build_schedule, make_plan
from largebatch.recipe import Recipe

FOLDER = Path(__file__).parent.parent / "recipes"


def digits(*overrides: str) -> Recipe:
    return load_recipe(FOLDER / "digits_96.yaml", overrides)


def test_fujitsus_run_has_its_published_shape() -> None:
    recipe = load_recipe(FOLDER / "resnet50_86016_fujitsu.yaml")
    plan = make_plan(recipe, workers=2048)
    assert (plan.device_batch, plan.accumulation, plan.bn_span) == (42, 1, 42)
    assert (plan.steps, plan.warmup_steps, plan.clean_steps) == (1350, 540, 75)
    rate = build_schedule(recipe)
    assert rate(540) == 13.0
    assert rate(1275) == pytest.approx(0.057, abs=5e-4)  # FACTS: 0.057 -> 0.0325 while polishing
    assert rate(1349) == pytest.approx(0.0325)


def test_mlperfs_run_follows_the_rule() -> None:
    recipe = load_recipe(FOLDER / "resnet50_32768_mlperf.yaml")
    plan = make_plan(recipe, workers=64)
    assert (plan.steps, plan.warmup_steps, plan.accumulation) == (2268, 626, 2)
    rate = build_schedule(recipe)
    assert rate(0) == pytest.approx(21.2 / 626)
    assert rate(625) == pytest.approx(21.2)
    decay = 2268 - 626 + 1
    assert rate(2267) == pytest.approx(1e-4 + (21.2 - 1e-4) * (1 - (2268 - 626) / decay) ** 2)
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
        plan = make_plan(recipe, workers=workers, device_batch=device_batch)
        taken = [
            position
            for step in range(2)
            for micro in range(plan.accumulation)
            for rank in range(workers)
            for position in plan.positions(step, micro, rank)
        ]
        assert taken == list(range(2 * 96))


def test_the_device_batch_is_the_largest_that_holds_whole_spans() -> None:
    recipe = load_recipe(FOLDER / "resnet50_86016_fujitsu.yaml")
    assert make_plan(recipe, workers=1).device_batch == 168  # 252 and 210 do not divide 86,016
    assert make_plan(recipe, workers=512).device_batch == 168
    big_span = digits("batch.global_batch=1437", "batch.bn_span=479", "data.train_samples=1437")
    assert make_plan(big_span, workers=3).device_batch == 479


@pytest.mark.parametrize(
    ("workers", "device_batch", "message"),
    [
        (5, None, "96 cannot be divided over 5 workers; possible numbers of workers: 1, 2$"),
        (0, None, "cannot be divided over 0 workers"),
        (4, None, "share of 24 samples is not a multiple of batch.bn_span .48.; use fewer workers"),
        (
            1,
            32,
            "device batch of 32 does not divide .* spans of 48; possible device batches: 48, 96",
        ),
        (1, 0, "device batch of 0 does not divide"),
        (4, 24, "possible device batches: none, use fewer workers"),
    ],
)
def test_a_batch_that_cannot_be_divided_is_refused(
    workers: int, device_batch: int | None, message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        make_plan(digits(), workers=workers, device_batch=device_batch)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("schedule.warmup.epochs=40", r"schedule.warmup \(599 steps\) must be shorter"),
        ("polish.clean.epochs=50", r"polish.clean \(748 steps\) must be shorter than duration"),
    ],
)
def test_lengths_that_contradict_each_other_are_refused(override: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        make_plan(digits(override), workers=1)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["schedule.decay={kind: constant}"], {0: 0.0, 75: 1.0, 598: 1.0}),
        (["schedule.decay={kind: cosine}", "schedule.warmup=null"], {0: 1.0, 599: 0.0}),
        (
            ["schedule.decay={kind: cosine, end_lr: 0.5, over: {steps: 10}}"],
            {75: 1.0, 80: 0.75, 85: 0.5, 300: 0.5},
        ),
        (
            ["schedule.decay={kind: steps, at: [{epochs: 10}, {steps: 400}], gamma: 0.5}"],
            {75: 1.0, 149: 1.0, 150: 0.5, 399: 0.5, 400: 0.25},
        ),
        (["schedule.start_lr=0.5", "schedule.first_step=1"], {0: 0.5 + 0.5 / 75, 74: 1.0}),
    ],
)
def test_the_recipes_schedule_has_these_rates(
    overrides: list[str], expected: dict[int, float]
) -> None:
    rate = build_schedule(digits("schedule.peak_lr=1", *overrides))
    assert {step: rate(step) for step in expected} == pytest.approx(expected)


def test_accuracy_is_measured_every_so_many_epochs() -> None:
    plan = make_plan(
        digits("evaluation={every_epochs: 4, offset_epochs: 1}", "duration.epochs=12"), workers=1
    )
    assert plan.evaluate_after == (15, 75, 135)
    assert make_plan(digits("evaluation={}"), workers=1).evaluate_after == ()


@pytest.mark.parametrize("at", ["[{epochs: 2}]", "[{epochs: 20}, {epochs: 10}]"])
def test_step_decay_points_out_of_order_are_refused(at: str) -> None:
    recipe = digits(f"schedule.decay={{kind: steps, at: {at}}}")
    with pytest.raises(RecipeError, match="one after the other and after the warm-up .75 steps"):
        build_schedule(recipe)
