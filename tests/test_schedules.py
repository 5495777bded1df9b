import math

import pytest

from largebatch.schedules import Schedule, constant, cosine, multistep, polynomial, skip, warmup

DECAY = polynomial(peak=8.0, steps=4, power=2.0)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        pytest.param(constant(peak=3.0), [3.0, 3.0], id="constant"),
        pytest.param(DECAY, [8.0, 4.5, 2.0, 0.5, 0.0, 0.0], id="polynomial holds its end"),
        pytest.param(
            polynomial(peak=8.0, steps=2, power=1.0, end=2.0), [8.0, 5.0, 2.0, 2.0], id="end rate"
        ),
        pytest.param(cosine(peak=4.0, steps=2, end=1.0), [4.0, 2.5, 1.0, 1.0], id="cosine"),
        pytest.param(
            multistep(peak=4.0, boundaries=[1, 3], gamma=0.1), [4.0, 0.4, 0.4, 0.04], id="multistep"
        ),
        pytest.param(warmup(DECAY, steps=2), [0.0, 4.0, 8.0, 4.5], id="ramp reaches the peak"),
        pytest.param(warmup(DECAY, steps=0), [8.0, 4.5], id="no ramp"),
        pytest.param(warmup(DECAY, steps=2, start=6.0), [6.0, 7.0, 8.0], id="ramp from a rate"),
        pytest.param(skip(warmup(DECAY, steps=2), steps=1), [4.0, 8.0, 4.5], id="counts from one"),
    ],
)
def test_schedule_gives_these_rates(schedule: Schedule, expected: list[float]) -> None:
    assert [schedule(step) for step in range(len(expected))] == pytest.approx(expected)


def test_fujitsus_formula_is_a_ramp_and_a_polynomial() -> None:
    """FACTS: 13 ((1 - r) (1 - min(t - 540, 780) / 780)^2.2 + r) after 540 steps, r = 0.0025."""
    rate = warmup(polynomial(peak=13.0, steps=780, power=2.2, end=13 * 0.0025), steps=540)
    for step in (0, 1, 539):
        assert rate(step) == pytest.approx(13 * step / 540)
    for step in (540, 541, 1000, 1275, 1319, 1320, 1349):
        fall = math.pow(1 - min(step - 540, 780) / 780, 2.2)
        assert rate(step) == pytest.approx(13 * ((1 - 0.0025) * fall + 0.0025))


def test_mlperfs_formula_counts_from_one() -> None:
    """RULES: base step / W up to W, then end + (base - end) (1 - (step - W) / D)^2, D = T-W+1."""
    base, end, ramp, total = 21.2, 1e-4, 626, 2268
    fall = total - ramp + 1
    rate = skip(warmup(polynomial(peak=base, steps=fall, power=2.0, end=end), steps=ramp), steps=1)
    for number in (1, 2, ramp, ramp + 1, total - 1, total):
        expected = (
            base * number / ramp
            if number <= ramp
            else end + (base - end) * (1 - (number - ramp) / fall) ** 2
        )
        assert rate(number - 1) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        pytest.param(lambda: polynomial(peak=1.0, steps=0, power=1.0), "at least 1, got 0", id="0"),
        pytest.param(lambda: cosine(peak=1.0, steps=-1), "at least 1, got -1", id="negative"),
        pytest.param(
            lambda: multistep(peak=1.0, boundaries=[3, 3], gamma=0.1), "increase", id="boundaries"
        ),
    ],
)
def test_a_schedule_that_cannot_be_is_refused(make: object, message: str) -> None:
    assert callable(make)
    with pytest.raises(ValueError, match=message):
        make()
