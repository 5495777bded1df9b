"""A batch schedule: which update takes which samples, at which learning rate, and what is refused.

The references are counted here sample by sample, and the rates are those of before there was one.
"""

import math
from itertools import accumulate, pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedules_of import course_of, schedule_of

from largebatch.cli.main import USER, main
from largebatch.errors import PlanError, RecipeError
from largebatch.recipe.arithmetic.plan import Plan, make_plan
from largebatch.recipe.loading import load_recipe, parse_recipe
from largebatch.recipe.recipe import Recipe
from largebatch.recipe.writing import dump_yaml

FOLDER = Path(__file__).parents[3] / "recipes"
DIGITS = FOLDER / "quickstart" / "digits_96.yaml"
DOUBLED = "batch.schedule=[{after: {epochs: 10}, global_batch: 192, lr_factor: 1}]"


def digits(*overrides: str) -> Recipe:
    return load_recipe(DIGITS, overrides)


def batches(plan: Plan) -> list[int]:
    return [plan.batch_at(step) for step in range(plan.steps)]


def test_the_batch_changes_at_the_nearest_whole_update_and_an_epoch_then_has_fewer_steps() -> None:
    plan = make_plan(digits(DOUBLED), workers=2)
    assert batches(plan) == [96] * 150 + [192] * (plan.steps - 150)  # 10 epochs are 149.7 updates
    seen = 150 * 96 + (plan.steps - 150) * 192
    assert plan.position(plan.steps) == seen
    assert seen - 192 < 40 * 1437 <= seen
    assert plan.epoch(plan.steps) == seen / 1437
    clean = (plan.clean_steps * 192) / 1437
    assert abs(clean - 5) <= 96 / 1437  # the last 5 epochs, to the nearest update
    nearest = [min(range(600), key=lambda k: abs(plan.epoch(k) - 5 * n)) for n in range(1, 9)]
    assert list(plan.evaluate_after) == nearest


@pytest.mark.parametrize("epochs", [0.1, 2, 9.9, 10.1, 15, 29.7])
def test_clean_epochs_are_counted_back_from_the_end_across_changes(epochs: float) -> None:
    changes = "{after: {epochs: 10}, global_batch: 48, lr_factor: 1}, " + change(
        after={"epochs": 30}
    )
    plan = make_plan(
        digits(f"batch.schedule=[{changes}]", f"polish.clean={{epochs: {epochs}}}"), workers=1
    )
    whole = plan.epoch(plan.steps)
    errors = [abs(whole - plan.epoch(plan.steps - k) - epochs) for k in range(1, plan.steps)]
    assert errors[plan.clean_steps - 1] == pytest.approx(min(errors), abs=1e-9)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=4),
    st.sampled_from([1, 2, 4]),
    st.data(),
)
def test_every_sample_of_the_run_is_taken_once_in_every_division(
    factors: list[int], workers: int, data: st.DataObject
) -> None:
    steps = sorted(data.draw(st.sets(st.integers(1, 9), min_size=len(factors), max_size=9)))
    changes = [
        f"{{after: {{steps: {step}}}, global_batch: {16 * factor}, lr_factor: 1}}"
        for step, factor in zip(steps, factors, strict=False)
    ]
    recipe = digits(
        *("batch.global_batch=16", "batch.bn_span=4", "duration={steps: 12}", "polish=null"),
        *("schedule.warmup=null", f"batch.schedule=[{', '.join(changes)}]"),
    )
    plan = make_plan(recipe, workers=workers)
    taken = [
        position
        for part, _, accumulation in plan.within(range(plan.steps))
        for step in part
        for micro in range(accumulation)
        for rank in range(workers)
        for position in plan.positions(step, micro, rank)
    ]
    assert taken == list(range(plan.position(plan.steps)))
    sizes = batches(plan)
    assert [plan.position(step) for step in range(13)] == [0, *accumulate(sizes)]


def test_the_rate_follows_the_samples_seen_so_that_epochs_mean_epochs() -> None:
    """A run of whole epochs: at the same epoch the rate is that of the recipe with one batch."""
    size = ("data.train_samples=9600", "duration.epochs=20", "schedule.warmup.epochs=4")
    one = digits(*size, "polish=null")
    change = "batch.schedule=[{after: {epochs: 5}, global_batch: 192, lr_factor: 1}]"
    two = digits(*size, "polish=null", change)
    constant, ours = schedule_of(one), schedule_of(two)
    plan = make_plan(two, workers=1)
    assert plan.steps == 5 * 100 + 15 * 50
    assert plan.warmup_steps == 400
    assert [ours(step) for step in range(500)] == [constant(step) for step in range(500)]
    later = [(ours(500 + k), constant(500 + 2 * k)) for k in range(750)]
    assert all(rate == expected for rate, expected in later)


@pytest.mark.parametrize("batch", [48, 144, 240])
def test_between_two_updates_of_the_first_batch_the_policy_is_the_formula(batch: int) -> None:
    """A fall by hand, t samples after a warm-up by hand, times the factor."""
    change = f"{{after: {{steps: 10}}, global_batch: {batch}, lr_factor: 1.5}}"
    recipe = digits(
        *("duration={steps: 30}", "polish=null", f"batch.schedule=[{change}]"),
        "schedule={peak_lr: 2.0, warmup: {steps: 4}, decay: {kind: polynomial}}",
    )
    rate = schedule_of(recipe)
    total = math.ceil((10 * 96 + 20 * batch) / 96)
    for step in range(30):
        t = step if step < 10 else 10 + (step - 10) * batch / 96
        by_hand = 2 * t / 4 if t < 4 else 2 * (1 - (t - 4) / (total - 4)) ** 2
        factor = 1.0 if step < 10 else 1.5
        assert rate(step) == pytest.approx(factor * by_hand, rel=1e-12)


def test_a_batch_schedule_is_read_back_as_it_was_written() -> None:
    recipe = digits(DOUBLED)
    assert parse_recipe(dump_yaml(recipe)) == recipe
    assert recipe.batch.schedule[-1].global_batch == 192


def change(**values: object) -> str:
    content = {"after": {"epochs": 10}, "global_batch": 192, "lr_factor": 1} | values
    return str(content).replace("'", "")


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        pytest.param(
            [change(after={"epochs": 20}), change()],
            RecipeError,
            r"batch.schedule.1.after.* 224.* 299",
            id="in another order",
        ),
        pytest.param(
            [change(), change(after={"epochs": 10.001})],
            RecipeError,
            r"schedule.1.after.* 150.* 150",
            id="no update between them",
        ),
        pytest.param(
            [change(after={"epochs": 50})],
            RecipeError,
            r"schedule.0.after.* 748.*599",
            id="after the end",
        ),
        pytest.param(
            [change(global_batch=100)],
            RecipeError,
            r"schedule.0.global_batch \(100\).*bn_span \(48\)",
            id="no whole spans",
        ),
        pytest.param(
            [change(global_batch=240)],
            PlanError,
            "batch.schedule.0.global_batch: 240 .*: 1, 2, 3, 4, 6, 8, 12, 16, 24, 48$",
            id="no whole share",
        ),
    ],
)
def test_a_batch_schedule_that_cannot_be_is_refused_by_its_key(
    changes: list[str], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        make_plan(digits(f"batch.schedule=[{', '.join(changes)}]"), workers=32)


def test_a_device_batch_that_does_not_divide_a_later_batch_is_refused_with_possible_ones() -> None:
    recipe = digits("batch.schedule=[{after: {epochs: 10}, global_batch: 144, lr_factor: 1}]")
    assert make_plan(recipe, workers=1).device_batch == 48
    with pytest.raises(PlanError, match=r" 96 .*batch.schedule.0.*144.* 48$"):
        make_plan(recipe.with_execution(device_batch=96), workers=1)
    shared = make_plan(recipe, workers=6)
    assert (shared.device_batch, shared.sync_workers) == (8, 6)


def test_the_command_line_refuses_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    wrong = f"batch.schedule=[{change(after={'epochs': 20})}, {change()}]"
    assert main(["check", str(DIGITS), "--set", wrong]) == USER
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.usefixtures("unmeasured")
def test_the_plan_has_a_row_for_each_batch(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(DIGITS), "--workers", "2", "--set", DOUBLED]) == 0
    shown = capsys.readouterr().out
    assert "global batch  96 = 2 workers x 48\n" in shown
    row = "from 150  192 = 2 workers x 2 micro-batches x 48, epoch 10.02, learning rate of the"
    assert row in shown
    assert "57,600 samples, 40.08 epochs" in shown


def test_the_course_of_a_schedule_is_drawn_by_epoch_across_the_change() -> None:
    course = course_of(digits(DOUBLED))
    epochs = [course.plan.epoch(step) for step in range(len(course.rates) + 1)]
    widths = [round(1437 * (after - before)) for before, after in pairwise(epochs)]
    assert widths == batches(course.plan)
    assert course.facts()["batches"] == "96, 192 from step 150"
