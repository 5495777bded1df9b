"""Distributions of compute times against SciPy's, and their numbers against each other."""

from itertools import islice

import numpy as np
import pytest
from scipy import stats

from largebatch.lab.protocols.cluster import (
    Distribution,
    Exponential,
    Lognormal,
    Recorded,
    Stragglers,
    compute_times,
)

RECORD = (0.5, 1.0, 1.0, 2.5)


def drawn(distribution: Distribution, number: int = 20_000, **keys: float) -> np.ndarray:
    times = compute_times(distribution, seed=3, learner=1, **keys)
    return np.fromiter(islice(times, number), dtype=np.float64)


@pytest.mark.parametrize(
    ("distribution", "expected"),
    [
        (Exponential(kind="exponential", mean=2.0), stats.expon(scale=2.0)),
        (Exponential(kind="exponential", mean=2.0, least=1.5), stats.expon(1.5, 2.0)),
        (Lognormal(kind="lognormal", median=0.3, sigma=0.7), stats.lognorm(0.7, scale=0.3)),
    ],
)
def test_times_have_the_distribution_of_scipy(
    distribution: Distribution, expected: stats.rv_continuous
) -> None:
    assert stats.kstest(drawn(distribution), expected.cdf).pvalue > 0.01
    assert distribution.expectation == pytest.approx(expected.mean())


def test_recorded_times_come_back_each_as_often() -> None:
    seconds = drawn(Recorded(kind="recorded", seconds=RECORD))
    shares = {value: float((seconds == value).mean()) for value in set(RECORD)}
    assert shares == pytest.approx({0.5: 0.25, 1.0: 0.5, 2.5: 0.25}, abs=0.01)
    assert set(seconds) == set(RECORD)


def test_stragglers_of_a_distribution_are_the_mixture() -> None:
    usual = Exponential(kind="exponential", mean=1.0)
    slowed = Stragglers(kind="stragglers", usual=usual, probability=0.2, factor=4.0)

    def mixture(x: np.ndarray) -> np.ndarray:
        cdf: np.ndarray = 0.8 * stats.expon.cdf(x) + 0.2 * stats.expon.cdf(x, scale=4.0)
        return cdf

    assert stats.kstest(drawn(slowed), mixture).pvalue > 0.01


def test_learners_and_seeds_draw_their_own_and_a_slow_one_takes_a_multiple() -> None:
    usual = Exponential(kind="exponential", mean=1.0)
    first = drawn(usual, 200)
    assert (first == drawn(usual, 200)).all()
    assert drawn(usual, 200, factor=3.0) == pytest.approx(3 * first)
    other = list(islice(compute_times(usual, seed=3, learner=2), 200))
    assert not np.isin(other, first).any()
