"""From the recipe's words to the rate of every step."""

import re
from pathlib import Path
from typing import Any

import lrbench
import numpy as np
import pytest
from schedules_of import course_of, schedule_of

from largebatch.errors import RecipeError
from largebatch.recipe import schedule
from largebatch.recipe.loading import load_recipe, parse_recipe
from largebatch.recipe.recipe import Recipe
from largebatch.recipe.section import alternatives, kinds_of
from largebatch.recipe.writing import dump_yaml

FOLDER = Path(__file__).parents[2] / "recipes"
DIGITS = (
    FOLDER / "quickstart" / "digits_96.yaml"
)  # 14.97 steps an epoch, 75 steps of warm-up, 599 steps
DELL = "{peak_lr: 0.4, warmup: null, decay: {kind: steps, at: [{epochs: 10}, {epochs: 60}]}}"
WARMUP, STEPS = 75, 599


def digits(*overrides: str) -> Recipe:
    return load_recipe(DIGITS, overrides)


def pieces(*parts: str) -> str:
    return f"schedule.decay={{kind: piecewise, pieces: [{', '.join(parts)}]}}"


def test_fujitsus_rates_are_the_published_ones() -> None:
    """Update n has the rate of step n: MXNet counts an update before it asks for its rate."""
    for name, epoch in (("86016_fujitsu", 15), ("86016_hpdc", 15), ("81920_hpdc", 16)):
        rate = schedule_of(load_recipe(FOLDER / "imagenet" / f"resnet50_{name}.yaml"))
        assert rate(0) == pytest.approx(13 / (36 * epoch))  # 0.0241 at 86,016, not 0
        assert rate(36 * epoch - 1) == 13.0
        # 0.057 -> 0.0325 while polishing; the last step before it has 0.057
        assert rate(85 * epoch - 1) == pytest.approx(0.057, abs=5e-4)
        assert rate(88 * epoch - 2) > rate(88 * epoch - 1) == pytest.approx(0.0325)
        assert rate(90 * epoch - 1) == pytest.approx(0.0325)


def test_mlperfs_rates_follow_the_rule() -> None:
    rate = schedule_of(load_recipe(FOLDER / "imagenet" / "resnet50_32768_mlperf.yaml"))
    assert rate(0) == pytest.approx(21.2 / 626)
    assert rate(625) == pytest.approx(21.2)
    decay = 2268 - 626 + 1
    assert rate(2267) == pytest.approx(1e-4 + (21.2 - 1e-4) * (1 - (2268 - 626) / decay) ** 2)


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
        (
            ["schedule.decay={kind: tri, low_lr: 0.25, half_cycle: {epochs: 1}}"],
            {0: 0.0, 74: 0.25 * 74 / 75, 75: 0.25, 90: 1.0, 91: 0.95, 105: 0.25},
        ),
    ],
)
def test_the_recipes_schedule_has_these_rates(
    overrides: list[str], expected: dict[int, float]
) -> None:
    rate = schedule_of(digits("schedule.peak_lr=1", *overrides))
    assert {step: rate(step) for step in expected} == pytest.approx(expected)


@pytest.mark.parametrize(
    ("words", "reference"),
    [
        ("kind: fix", {}),
        ("kind: step, every: {steps: 60}, gamma: 0.5", {"n": 60, "gamma": 0.5}),
        ("kind: step, every: {epochs: 4}", {"n": 60, "gamma": 0.1}),
        ("kind: exp, gamma: 0.99", {"gamma": 0.99}),
        ("kind: inv, gamma: 1e-4, power: 0.75", {"gamma": 1e-4, "p": 0.75}),
        ("kind: poly, power: 1.5", {"n": STEPS - WARMUP, "p": 1.5}),
        ("kind: poly, over: {steps: 300}", {"n": 300, "p": 2.0}),
        ("kind: tri, low_lr: 0.25, half_cycle: {steps: 50}", {"n": 50, "k1": 0.25}),
        ("kind: tri2, low_lr: 0.25, half_cycle: {epochs: 3}", {"n": 45, "k1": 0.25}),
        (
            "kind: triexp, low_lr: 0.25, half_cycle: {steps: 50}, gamma: 0.99",
            {"n": 50, "k1": 0.25, "gamma": 0.99},
        ),
        ("kind: sin, low_lr: 0.25, half_cycle: {steps: 50}", {"n": 50, "k1": 0.25}),
        ("kind: sin2, low_lr: 0.25, half_cycle: {steps: 50}", {"n": 50, "k1": 0.25}),
        (
            "kind: sinexp, low_lr: 0.25, half_cycle: {steps: 50}, gamma: 0.99",
            {"n": 50, "k1": 0.25, "gamma": 0.99},
        ),
        ("kind: cos, low_lr: 0.25, cycle: {steps: 100}", {"n": 100, "k1": 0.25}),
    ],
)
def test_every_kind_is_lrbenchs_function_after_the_warm_up(
    words: str, reference: dict[str, Any]
) -> None:
    name = words.split(",", maxsplit=1)[0].removeprefix("kind: ")
    rate = schedule_of(digits("schedule.peak_lr=1.5", f"schedule.decay={{{words}}}"))
    known = {"k0": 1.5, "k1": 0.0, "n": 1, "gamma": 1.0, "p": 1.0} | reference
    expected = lrbench.rates(name, np.arange(STEPS - WARMUP, dtype=float), **known)
    rates = [rate(step) for step in range(STEPS)]
    np.testing.assert_allclose(rates[WARMUP:], expected, rtol=1e-12, atol=1e-12)
    ramp = expected[0] * np.arange(WARMUP) / WARMUP
    np.testing.assert_allclose(rates[:WARMUP], ramp, rtol=1e-12)


def test_every_kind_has_a_row_on_the_page_of_learning_rates() -> None:
    kinds = {*alternatives(schedule.Decay), *kinds_of(schedule.Piecewise)}
    page = FOLDER.parent / "docs" / "learning-rates.md"
    table = page.read_text(encoding="utf-8").partition("| `kind` |")[2].partition("\n\n")[0]
    first_cells = "".join(line.split("|")[1] for line in table.splitlines()[1:])
    assert {*re.findall(r"`([\w-]+)`", first_cells)} == kinds


@pytest.mark.parametrize(
    ("short", "long"),
    [
        ("kind: fix", "kind: constant"),
        ("kind: poly, power: 3.0", "kind: polynomial, power: 3.0"),
        ("kind: nstep, at: [{epochs: 9}]", "kind: steps, at: [{epochs: 9}]"),
    ],
)
def test_lrbenchs_name_is_a_second_spelling(short: str, long: str) -> None:
    ours, other = (digits(f"schedule.decay={{{words}}}") for words in (short, long))
    assert course_of(ours).rates == course_of(other).rates
    assert parse_recipe(dump_yaml(ours)) == ours


@pytest.mark.parametrize("first", [0, 1])
def test_an_exponential_that_begins_low_is_numpys_geometric_series(first: int) -> None:
    words = ("duration={steps: 41}", "schedule.warmup=null", f"schedule.first_step={first}")
    gamma = (1e-3 / 20) ** (1 / 40)
    decay = f"schedule.decay={{kind: exp, gamma: {gamma!r}, begin: low}}"
    rates = course_of(digits("polish=null", "schedule.peak_lr=20", decay, *words)).rates
    expected = np.geomspace(1e-3, 20, 41)
    np.testing.assert_allclose(rates, expected, rtol=1e-12)
    assert rates[-1] == 20


def test_dells_schedule_is_a_line_of_a_recipe() -> None:
    """FACTS section 9: 0.4 for 10 epochs, 0.04 until 60, 0.004 until 90."""
    assert f"schedule: {DELL}" in (FOLDER.parent / "docs" / "learning-rates.md").read_text()
    recipe = digits(f"schedule={DELL}", "duration.epochs=90")
    rate = schedule_of(recipe)
    per_epoch = 1437 / 96
    for step in range(1348):
        epoch = step / per_epoch
        if abs(epoch - 10) > 1 / per_epoch and abs(epoch - 60) > 1 / per_epoch:
            assert rate(step) == pytest.approx(0.4 if epoch < 10 else 0.04 if epoch < 60 else 0.004)


def test_pieces_begin_at_the_end_of_the_warm_up_and_epochs_do_not_drift() -> None:
    """Seven times 3.1 epochs are 21.7 epochs, 324.8 steps; seven times 46 would be 322."""
    part = "{length: {epochs: 3.1}, peak_lr: %s, decay: {kind: exp, gamma: 0.9}}"
    rates = [0.5, 0.4, 0.3, 0.25, 0.2, 0.15, 0.1]
    last = "{length: null, peak_lr: 0.05, decay: {kind: fix}}"
    rate = schedule_of(digits(pieces(*(part % peak for peak in rates), last)))
    starts = [75, 121, 168, 214, 261, 307, 353, 400]
    for start, peak in zip(starts, [*rates, 0.05], strict=True):
        assert rate(start) == peak
        if peak != 0.05:
            assert rate(start + 10) == pytest.approx(peak * 0.9**10)
    assert rate(399) == pytest.approx(0.1 * 0.9**46)
    assert rate(598) == 0.05


def test_a_piece_holds_any_policy_on_a_clock_of_its_own() -> None:
    rate = schedule_of(
        digits(
            pieces(
                "{length: {steps: 100}, peak_lr: 0.2, decay: {kind: nstep, at: [{steps: 60}]}}",
                "{length: {epochs: 10}, peak_lr: 0.5, decay: "
                "{kind: tri, low_lr: 0.1, half_cycle: {steps: 50}}}",
                "{length: null, peak_lr: 0.3, decay: {kind: poly, power: 1.0}}",
            )
        )
    )
    expected = {134: 0.2, 135: 0.02, 174: 0.02, 175: 0.1, 225: 0.5, 275: 0.1, 324: 0.492}
    last = 325  # 100 steps and 149.69 after the warm-up
    expected |= {last: 0.3, last + 137: 0.15, 598: 0.3 / 274}
    assert {step: rate(step) for step in expected} == pytest.approx(expected)


FIX = "{length: {epochs: 10}, peak_lr: 0.5, decay: {kind: fix}}"
LAST = "{length: null, peak_lr: 0.1, decay: {kind: fix}}"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("schedule.decay={kind: steps, at: [{epochs: 5}]}", " 75$"),
        ("schedule.decay={kind: steps, at: [{epochs: 20}, {epochs: 10}]}", " 299, 150"),
        ("schedule.decay={kind: steps, at: [{steps: 599}]}", " 599"),
        ("schedule.decay={kind: step, every: {steps: 524}}", "decay.every .* 523"),
        ("schedule.decay={kind: poly, over: {steps: 525}}", "decay.over .* 524"),
        (
            "schedule.decay={kind: tri, low_lr: 0.1, half_cycle: {steps: 524}}",
            "decay.half_cycle .* 523",
        ),
        (
            "schedule.decay={kind: cos, low_lr: 0.1, cycle: {steps: 1047}}",
            "decay.cycle .* 1,046",
        ),
        ("schedule.decay={kind: tri, low_lr: 0, half_cycle: {epochs: 5}}", "start_lr"),
        ("schedule.start_lr=0.5", "start_lr"),
        (pieces(FIX.replace("10", "36"), LAST), "pieces.0.length"),
        (pieces(FIX.replace("10", "35"), LAST), "pieces.0.length"),
        (pieces(FIX, FIX.replace("epochs: 10", "steps: 400"), LAST), "pieces.1.length"),
        (pieces(FIX, FIX.replace("10", "0.01"), LAST), "pieces.1.length"),
        (
            pieces(FIX, LAST.replace("kind: fix", "kind: step, every: {epochs: 30}")),
            "schedule.decay.pieces.1.decay.every",
        ),
    ],
)
def test_lengths_and_rates_that_contradict_each_other_are_refused(
    override: str, message: str
) -> None:
    with pytest.raises(RecipeError, match=message):
        schedule_of(digits(override))


@pytest.mark.parametrize(
    "overrides",
    [
        ["schedule.decay={kind: step, every: {steps: 523}}"],
        ["schedule.decay={kind: poly, over: {steps: 524}}"],
        ["schedule.decay={kind: steps, at: [{steps: 76}, {steps: 598}]}"],
        [pieces(FIX.replace("epochs: 10", "steps: 523"), LAST)],
    ],
)
def test_lengths_that_just_fit_are_taken(overrides: list[str]) -> None:
    rates = course_of(digits(*overrides)).rates
    assert len(set(rates[WARMUP:])) > 1


@pytest.mark.parametrize("kind", ["tri", "tri2", "triexp, gamma: 1.0", "sin", "sin2", "cos"])
def test_the_longest_cycle_reaches_its_other_rate_at_the_last_step(kind: str) -> None:
    name, length = ("cycle", 1046) if kind == "cos" else ("half_cycle", 523)
    words = f"kind: {kind}, low_lr: 0.1, {name}: {{steps: {length}}}"
    rates = course_of(digits(f"schedule.decay={{{words}}}")).rates[WARMUP:]
    assert rates[-1] == (0.1 if kind == "cos" else 0.5)
    assert rates.index(rates[-1]) == len(rates) - 1
