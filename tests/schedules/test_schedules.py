import inspect
import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import lrbench
import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from largebatch.schedules import functions
from largebatch.schedules.functions import (
    Schedule,
    constant,
    cosine,
    multistep,
    polynomial,
    sine,
    skip,
    triangular,
    warmup,
)

DECAY = polynomial(peak=8.0, steps=4, power=2.0)

# LRBench's names: (larger of k0 and k1, smaller, l, gamma, p) -> ours.
OURS: dict[str, Callable[[float, float, int, float, float], Schedule]] = {
    "fix": lambda peak, low, n, gamma, p: constant(peak=peak),
    "step": lambda peak, low, n, gamma, p: functions.step(peak=peak, steps=n, gamma=gamma),
    "exp": lambda peak, low, n, gamma, p: functions.exponential(peak=peak, gamma=gamma),
    "inv": lambda peak, low, n, gamma, p: functions.inverse(peak=peak, gamma=gamma, power=p),
    "poly": lambda peak, low, n, gamma, p: polynomial(peak=peak, steps=n, power=p),
    "tri": lambda peak, low, n, gamma, p: triangular(peak=peak, low=low, steps=n),
    "tri2": lambda peak, low, n, gamma, p: triangular(peak=peak, low=low, steps=n, factor=0.5),
    "triexp": lambda peak, low, n, gamma, p: triangular(peak=peak, low=low, steps=n, gamma=gamma),
    "sin": lambda peak, low, n, gamma, p: sine(peak=peak, low=low, steps=n),
    "sin2": lambda peak, low, n, gamma, p: sine(peak=peak, low=low, steps=n, factor=0.5),
    "sinexp": lambda peak, low, n, gamma, p: sine(peak=peak, low=low, steps=n, gamma=gamma),
    "cos": lambda peak, low, n, gamma, p: functions.cosine_cycles(peak=peak, low=low, steps=n),
}

every_policy = pytest.mark.parametrize("name", OURS)
lengths = st.integers(1, 2000)
a_rate = st.just(0.0) | st.floats(1e-9, 100)
rates_of_two = st.tuples(a_rate, a_rate)
gammas = st.floats(1e-3, 1)
powers = st.floats(0.1, 4)


def around(length: int) -> list[int]:
    """Return the steps at which an off-by-one would show, and some between."""
    edges = {k * length + d for k in range(6) for d in (-1, 0, 1)}
    return sorted(
        {step for step in edges if step >= 0} | {length * part // 7 for part in range(42)}
    )


@every_policy
@given(k=rates_of_two, length=lengths, gamma=gammas, p=powers)
@example(k=(0.1, 0.3), length=1, gamma=0.5, p=1.0)
@example(k=(3.0, 3.0), length=7, gamma=1.0, p=2.0)
def test_a_policy_is_lrbenchs_formula_and_stays_between_its_rates(
    name: str, k: tuple[float, float], length: int, gamma: float, p: float
) -> None:
    peak, low = max(k), min(k)
    ours = OURS[name](peak, low, length, gamma, p)
    steps = around(length)
    rates = [ours(step) for step in steps]
    k0 = peak if name in lrbench.DECAYS else k[0]
    expected = lrbench.rates(
        name, np.array(steps, float), k0=k0, k1=k[1], n=length, gamma=gamma, p=p
    )
    np.testing.assert_allclose(rates, expected, rtol=1e-12, atol=1e-12 * peak)
    assert all(map(math.isfinite, rates))
    floor = 0.0 if name in lrbench.DECAYS else low
    assert floor <= min(rates)
    assert max(rates) <= peak


@given(
    boundaries=st.lists(st.integers(1, 500), min_size=1, max_size=6, unique=True).map(sorted),
    peak=st.floats(1e-6, 100),
    gamma=gammas,
)
def test_multistep_is_lrbenchs_nstep(boundaries: Sequence[int], peak: float, gamma: float) -> None:
    ours = multistep(peak=peak, boundaries=boundaries, gamma=gamma)
    steps = range(boundaries[-1] + 2)
    expected = peak * lrbench.nstep(np.array(steps, float), boundaries, gamma)
    rates = [ours(step) for step in steps]
    np.testing.assert_allclose(rates, expected, rtol=1e-12)
    assert all(later <= earlier for earlier, later in itertools.pairwise(rates))


@pytest.mark.parametrize("name", ["tri2", "sin2", "step", "exp", "triexp", "inv"])
def test_a_policy_that_decays_indefinitely_does_not_overflow(name: str) -> None:
    ours = OURS[name](1.0, 0.25, 1, 0.5, 3.0)
    assert 0.0 <= ours(10**7 + 1) <= 0.25


def test_cosine_pieces_are_the_warm_restarts_of_torch() -> None:
    """SGDR (arXiv:1608.03983), each fall twice as long."""
    pieces = [cosine(peak=3.0, steps=steps) for steps in (4, 8, 16)]
    ours = functions.piecewise(pieces, boundaries=[4, 12])
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=3.0)
    theirs = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=4, T_mult=2)
    for step in range(28):
        theirs.step(step)
        assert ours(step) == pytest.approx(theirs.get_last_lr()[0], abs=1e-12)


def listed(rates: list[float]) -> functions.Policy:
    return lambda step: rates[int(step)]


@given(
    lists=st.lists(st.lists(st.floats(0, 10), min_size=1, max_size=5), min_size=1, max_size=5),
    more=st.integers(0, 3),
)
def test_pieces_follow_each_other_and_count_from_their_own_start(
    lists: list[list[float]], more: int
) -> None:
    ends = np.cumsum([len(rates) for rates in lists]).tolist()
    lists[-1] += [lists[-1][-1]] * more
    ours = functions.piecewise([listed(rates) for rates in lists], boundaries=ends[:-1])
    expected = [rate for rates in lists for rate in rates]
    assert [ours(step) for step in range(len(expected))] == expected


NAN, INF = math.nan, math.inf
NO_RATE = (-1.0, NAN, INF)
NO_LENGTH = (-3, 0, NAN, INF)
NO_FRACTION = (-0.5, 0.0, 1.5, NAN, INF)
NOT_POSITIVE = (-1.0, 0.0, NAN, INF)
OF_TWO_RATES = {"peak": NO_RATE, "low": (*NO_RATE, 2.0), "steps": NO_LENGTH}
OF_WAVES = OF_TWO_RATES | {"factor": NO_FRACTION, "gamma": NO_FRACTION}

# A schedule that can be -> the values that one of its arguments cannot have.
WRONG: dict[str, tuple[Callable[..., Schedule], dict[str, Any], dict[str, tuple[Any, ...]]]] = {
    "constant": (constant, {"peak": 1.0}, {"peak": NO_RATE}),
    "step": (
        functions.step,
        {"peak": 1.0, "steps": 3, "gamma": 0.5},
        {"peak": NO_RATE, "steps": NO_LENGTH, "gamma": NO_FRACTION},
    ),
    "multistep": (
        multistep,
        {"peak": 1.0, "boundaries": [2, 4], "gamma": 0.5},
        {
            "peak": NO_RATE,
            "boundaries": ([-2, 4], [2, NAN], [NAN], [2, INF], [4, 2]),
            "gamma": NO_FRACTION,
        },
    ),
    "exponential": (
        functions.exponential,
        {"peak": 1.0, "gamma": 0.5},
        {"peak": NO_RATE, "gamma": NO_FRACTION},
    ),
    "exponential_rise": (
        functions.exponential_rise,
        {"peak": 1.0, "gamma": 0.5, "steps": 3},
        {"peak": NO_RATE, "gamma": NO_FRACTION, "steps": (-1, NAN, INF)},
    ),
    "inverse": (
        functions.inverse,
        {"peak": 1.0, "gamma": 0.5, "power": 2.0},
        {"peak": NO_RATE, "gamma": NOT_POSITIVE, "power": NOT_POSITIVE},
    ),
    "polynomial": (
        polynomial,
        {"peak": 1.0, "steps": 3, "power": 2.0, "end": 0.1},
        {"peak": NO_RATE, "steps": NO_LENGTH, "power": NOT_POSITIVE, "end": (*NO_RATE, 2.0)},
    ),
    "cosine": (
        cosine,
        {"peak": 1.0, "steps": 3, "end": 0.1},
        {"peak": NO_RATE, "steps": NO_LENGTH, "end": (*NO_RATE, 2.0)},
    ),
    "cosine_cycles": (
        functions.cosine_cycles, {"peak": 1.0, "low": 0.1, "steps": 3}, OF_TWO_RATES,
    ),
    **{
        make.__name__: (
            make, {"peak": 1.0, "low": 0.1, "steps": 3, "factor": 0.5, "gamma": 0.9}, OF_WAVES,
        )
        for make in (triangular, sine)
    },
    "piecewise": (
        partial(functions.piecewise, [DECAY, DECAY]),
        {"boundaries": [3]},
        {"boundaries": ([-3], [0], [NAN], [INF])},
    ),
    "warmup": (
        partial(warmup, DECAY),
        {"steps": 3, "start": 0.1},
        {"steps": (-3, NAN, INF), "start": (*NO_RATE, 9.0)},
    ),
    "skip": (partial(skip, DECAY), {"steps": 1}, {"steps": (-1, NAN, INF)}),
}  # fmt: skip


def test_every_function_of_a_rate_has_arguments_that_it_refuses() -> None:
    made = {name for name, value in vars(functions).items()
            if inspect.isfunction(value) and value.__module__ == functions.__name__}  # fmt: skip
    assert {name for name in made if not name.startswith("_")} == WRONG.keys()


@pytest.mark.parametrize(
    ("name", "argument", "value"),
    [
        (name, argument, value)
        for name, (_, _, wrong) in WRONG.items()
        for argument, values in wrong.items()
        for value in values
    ],
)
def test_a_rate_or_length_that_cannot_be_is_refused(name: str, argument: str, value: Any) -> None:  # noqa: ANN401 -- wrong on purpose
    make, arguments, wrong = WRONG[name]
    assert wrong.keys() == arguments.keys()
    assert make(**arguments)(0) >= 0
    with pytest.raises(ValueError, match=r" got |exceed"):
        make(**arguments | {argument: value})
