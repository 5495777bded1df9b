"""Distributions of compute times against SciPy's, and their numbers against each other."""

from itertools import islice

import numpy as np
import pytest
from scipy import stats

from largebatch.lab.protocols.simulator import (
    ComputeTime,
    Lognormal,
    Recorded,
    Stragglers,
    compute_times,
    expectation,
)

RECORD = (0.5, 1.0, 1.0, 2.5)
USUAL = Lognormal(kind="lognormal", median=0.3, sigma=0.7)


def drawn(distribution: ComputeTime, number: int = 20_000, **keys: float) -> np.ndarray:
    times = compute_times(distribution, seed=3, learner=1, **keys)
    return np.fromiter(islice(times, number), dtype=np.float64)


def test_times_have_the_distribution_of_scipy() -> None:
    expected = stats.lognorm(0.7, scale=0.3)
    assert stats.kstest(drawn(USUAL), expected.cdf).pvalue > 0.01
    assert expectation(USUAL) == pytest.approx(expected.mean())


def test_recorded_times_come_back_each_as_often() -> None:
    seconds = drawn(Recorded(kind="recorded", seconds=RECORD))
    shares = {value: float((seconds == value).mean()) for value in set(RECORD)}
    assert shares == pytest.approx({0.5: 0.25, 1.0: 0.5, 2.5: 0.25}, abs=0.01)
    assert set(seconds) == set(RECORD)


def test_stragglers_of_a_distribution_are_the_mixture() -> None:
    slowed = Stragglers(kind="stragglers", usual=USUAL, probability=0.2, factor=4.0)
    usual = stats.lognorm(0.7, scale=0.3)

    def mixture(x: np.ndarray) -> np.ndarray:
        cdf: np.ndarray = 0.8 * usual.cdf(x) + 0.2 * usual.cdf(x / 4)
        return cdf

    assert stats.kstest(drawn(slowed), mixture).pvalue > 0.01
    assert expectation(slowed) == pytest.approx(1.6 * usual.mean())


def test_learners_and_seeds_draw_their_own_and_a_slow_one_takes_a_multiple() -> None:
    first = drawn(USUAL, 200)
    assert (first == drawn(USUAL, 200)).all()
    assert drawn(USUAL, 200, factor=3.0) == pytest.approx(3 * first)
    other = list(islice(compute_times(USUAL, seed=3, learner=2), 200))
    assert not np.isin(other, first).any()
