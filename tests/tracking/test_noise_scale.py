"""The gradient noise scale where it is known: a quadratic whose targets have a known covariance."""

import math
from typing import cast

import numpy as np
import pytest
import torch
from short_runs import DIGITS
from threads import Thread, on_threads
from torch import Tensor, nn

from largebatch import load_recipe
from largebatch.distributed.backend import Backend
from largebatch.distributed.reducer import Reducer, by_bytes
from largebatch.distributed.serial import Serial
from largebatch.errors import PlanError
from largebatch.recipe.arithmetic.plan import make_plan
from largebatch.tracking.noise_scale import (
    NOISE_UPDATES,
    NoiseScale,
    RunningNoise,
    Squares,
    estimate,
    fieller,
)

DIMENSIONS, UPDATES = 40, 3
BATCH = 64
SPREAD = np.linspace(0.5, 2.0, DIMENSIONS)
"""Standard deviations of the targets; the covariance of one sample's gradient is their squares."""

OFFSET = 0.5
KNOWN = float((SPREAD**2).sum() / (DIMENSIONS * OFFSET**2))
"""tr(Sigma) / |G|^2 of the loss |w - x|^2 / 2 where the mean of x is OFFSET away from w."""


class Quadratic(nn.Module):
    """|w - x|^2 / 2, in two tensors, so that there are two groups."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Parameter(torch.zeros(DIMENSIONS // 4, dtype=torch.float64))
        self.right = nn.Parameter(torch.zeros(DIMENSIONS - DIMENSIONS // 4, dtype=torch.float64))

    def forward(self, targets: Tensor) -> Tensor:
        return (torch.cat([self.left, self.right]) - targets).square().sum() / 2


def targets(update: int) -> Tensor:
    draw = np.random.default_rng((3, update))
    return torch.from_numpy(OFFSET + SPREAD * draw.standard_normal((BATCH, DIMENSIONS)))


def measured(worker: Backend, *, device_batch: int) -> list[Squares]:
    """Return what one worker's reducer measures, in the units of mean gradients."""
    model, found = Quadratic(), []
    accumulation = BATCH // worker.world_size // device_batch
    with Reducer(
        model.named_parameters(), worker, grouping=by_bytes(1), divisor=1.0, measure=True
    ) as reducer:
        for update in range(UPDATES):
            shares = targets(update).view(accumulation, worker.world_size, device_batch, -1)
            reducer.zero()
            for micro in range(accumulation):
                if micro == accumulation - 1:
                    reducer.arm()
                (model(shares[micro, worker.rank]) / BATCH).backward()
            reducer.wait()
            assert reducer.squares is not None
            first, whole = reducer.squares.tolist()
            found.append(Squares(first * (BATCH / device_batch) ** 2, whole, device_batch, BATCH))
    return found


def by_hand(update: int, *, workers: int, device_batch: int) -> Squares:
    """The squared lengths of the mean gradients -x, without anything of ours."""
    rows = -targets(update).numpy()
    firsts = rows[: workers * device_batch].reshape(workers, device_batch, -1).mean(1)
    small, big = (firsts**2).sum(1).mean(), (rows.mean(0) ** 2).sum()
    return Squares(float(small), float(big), device_batch, BATCH)


divided = pytest.mark.parametrize(
    ("workers", "device_batch"), [(1, 8), (2, 32), (2, 8), (4, 16)], ids=str
)


@divided
def test_the_reducer_measures_the_gradients_before_and_after_their_sum(
    workers: int, device_batch: int
) -> None:
    if workers == 1:
        each = [measured(Serial(torch.device("cpu")), device_batch=device_batch)]
    else:

        def work(worker: Thread) -> list[Squares]:
            return measured(cast("Backend", worker), device_batch=device_batch)

        each = on_threads(work, workers=workers)
    for update, same in enumerate(zip(*each, strict=True)):
        small = sum(one.small for one in same) / workers
        expected = by_hand(update, workers=workers, device_batch=device_batch)
        assert (small, same[0].big) == pytest.approx(expected[:2], rel=1e-12)


@divided
def test_the_noise_scale_of_a_quadratic_is_the_known_one(workers: int, device_batch: int) -> None:
    squares = [
        by_hand(update, workers=workers, device_batch=device_batch) for update in range(2000)
    ]
    found = estimate(squares)
    assert found.value == pytest.approx(KNOWN, rel=0.05)
    assert found.low < KNOWN < found.high
    assert found.noise == pytest.approx((SPREAD**2).sum(), rel=0.05)
    assert found.signal == pytest.approx(DIMENSIONS * OFFSET**2, rel=0.05)


def test_the_interval_holds_the_true_ratio_19_times_in_20() -> None:
    draw = np.random.default_rng(0)
    held = 0
    for _ in range(1000):
        shared = draw.standard_normal(12)
        tops = 6 + 2 * shared + draw.standard_normal(12)
        bottoms = 2 + 0.5 * shared + 0.5 * draw.standard_normal(12)
        low, high = fieller(tops.tolist(), bottoms.tolist())
        held += low <= 3 <= high
    assert 0.93 < held / 1000 < 0.97


def test_where_the_gradient_may_be_zero_the_noise_scale_has_no_upper_bound() -> None:
    found = estimate([Squares(3.0, 1.0, 1, 2), Squares(1.0, 3.0, 1, 2)])
    assert (found.low, found.high) == (0.0, math.inf)
    none = estimate([Squares(2.0, 0.5, 1, 2)] * 3)
    assert math.isnan(none.value)
    assert isinstance(none, NoiseScale)


def test_noise_that_cannot_be_seen_is_none_and_never_negative() -> None:
    found = estimate([Squares(1.0, 1.01, 1, 2), Squares(1.0, 1.02, 1, 2), Squares(1.0, 1.03, 1, 2)])
    assert (found.value, found.low) == (0.0, 0.0)
    assert found.noise < 0 <= found.high < 0.02


def test_the_running_value_is_in_units_of_the_unscaled_mean_gradient() -> None:
    plan = make_plan(load_recipe(DIGITS), workers=2)
    share = plan.global_batch / plan.device_batch
    noise = RunningNoise(plan)
    first = noise.add(0, 2 * 12.0 * 64 / share**2, 2 * 8.0 * 64, loss_scale=8.0)
    assert first["device_square"] == pytest.approx(12.0)
    assert first["global_square"] == pytest.approx(8.0)
    assert math.isnan(first["noise_scale"])
    second = noise.add(0, 2 * 12.0 * 16 / share**2, 2 * 8.0 * 16, loss_scale=4.0)
    expected = estimate([Squares(12.0, 8.0, 48, 96)] * 2)
    assert second["noise_scale"] == pytest.approx(expected.value)
    overflowed = noise.add(0, math.inf, math.inf, loss_scale=4.0)
    assert overflowed["noise_scale"] == pytest.approx(expected.value)
    for _ in range(NOISE_UPDATES):
        last = noise.add(0, 2 * 10.0 * 4 / share**2, 2 * 8.0 * 4, loss_scale=2.0)
    expected = estimate([Squares(10.0, 8.0, 48, 96)] * 2)
    assert last["noise_scale"] == pytest.approx(expected.value)


def test_a_device_batch_smaller_than_the_global_one_is_chosen_or_asked_for() -> None:
    recipe = load_recipe(DIGITS, ["monitor=noise_scale"])
    whole = recipe.batch.global_batch
    assert make_plan(load_recipe(DIGITS), workers=1).device_batch == whole
    assert make_plan(recipe, workers=1).device_batch == whole // 2
    with pytest.raises(PlanError, match=" 96 "):
        make_plan(recipe.with_execution(device_batch=whole), workers=1)
    with pytest.raises(PlanError, match="monitor: noise_scale"):
        make_plan(load_recipe(DIGITS, ["monitor=noise_scale", "batch.bn_span=96"]), workers=1)
