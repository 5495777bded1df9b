"""LARS with rates that are tensors, and with norms at the limits of float32."""

import math
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from lars_formula import CONVENTIONS, RATES, Formula, Path, assert_close, choose_path
from torch import Tensor, nn

from largebatch.optim.kernels import fused
from largebatch.optim.lars import LARS
from largebatch.recipe.choices import Convention

__all__ = ["choose_path"]  # the fixture `path`

every_convention = pytest.mark.parametrize("convention", CONVENTIONS)
every_path = pytest.mark.parametrize("way", ["fused", "batched", "apex"])

NUMBERS = {"lr": 1.7, "momentum": 0.9, "weight_decay": 0.05, "eta": 0.02, "eps": 1e-9}


def exactly(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


@every_path
@every_convention
@pytest.mark.parametrize("adapt", [True, False])
def test_hyper_parameters_as_tensors_are_equivalent_and_unchanged(
    path: Path, way: str, convention: Convention, adapt: bool
) -> None:
    path(way)
    weight = nn.Parameter(torch.randn(4, 5, generator=torch.Generator().manual_seed(0)))
    tensors = {key: exactly(value) for key, value in NUMBERS.items()}
    optimizer = LARS([{"params": [weight], "adapt": adapt, **tensors}], convention=convention)
    plain = {"convention": convention, "adapt": adapt, "base_lr": NUMBERS["lr"]}
    formula = Formula(weight, NUMBERS | plain)
    for step, lr in enumerate(RATES):
        grad = torch.randn(4, 5, generator=torch.Generator().manual_seed(step))
        tensors["lr"].fill_(lr)
        weight.grad = grad
        optimizer.step()
        formula.step(grad.double().numpy(), lr)
        assert {key: value.item() for key, value in tensors.items()} == NUMBERS | {"lr": lr}
    assert_close(weight, formula.w, 1e-6)


SIZES = [1e-25, 1e-20, 1.0, 1e20]
"""The square of all but 1.0 is no number of float32."""
PAIRS = [(w, g) for w, g in product(SIZES, SIZES) if w / g > 1e-35]
"""The ratio itself must be a normal number."""


def norms() -> list[Any]:
    """All pairs under all conventions; those that are not long give each pair one in turn."""
    return [
        pytest.param(
            convention,
            *pair,
            marks=[] if number % len(CONVENTIONS) == place else [pytest.mark.long],
        )
        for number, pair in enumerate(PAIRS)
        for place, convention in enumerate(CONVENTIONS)
    ]


@pytest.mark.parametrize("way", ["fused", "batched", "apex", "table"])
@pytest.mark.parametrize(("convention", "weight_size", "grad_size"), norms())
def test_norms_whose_squares_overflow_float32_match_the_formula(
    path: Path, way: str, convention: Convention, weight_size: float, grad_size: float
) -> None:
    path(way)
    draw = torch.Generator().manual_seed(0)
    weight = nn.Parameter(torch.randn(30, 40, generator=draw) * weight_size)
    optimizer = LARS([weight], lr=0.5, weight_decay=0.01, eta=0.02, convention=convention)
    formula = Formula(weight, optimizer.param_groups[0])
    for _ in range(2):
        weight.grad = torch.randn(30, 40, generator=draw) * grad_size
        formula.step(weight.grad.double().numpy(), 0.5)
        optimizer.step()
    assert_close(optimizer.state[weight]["momentum_buffer"], formula.b, 1e-6)
    assert_close(weight, formula.w, 1e-6)


def worst(convention: Convention) -> float:
    """Return the largest loss on the way down a round bowl, |w - c|^2 / 2, which begins at 0.16."""
    weight = nn.Parameter(torch.ones(1, 2, dtype=torch.float64))
    bottom = torch.tensor([[1.4, 0.6]], dtype=torch.float64)
    optimizer = LARS([weight], lr=1.0, eta=0.1, convention=convention)
    losses = []
    for _ in range(200):
        optimizer.zero_grad()
        loss = (weight - bottom).square().sum() / 2
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(0.16)
    return max(losses)


def test_outside_diverges_for_old_momentum_and_a_tiny_gradient() -> None:
    """The warning in the module's docstring."""
    assert worst("outside") == pytest.approx(533, abs=1)
    for convention in ("reference", "scaled-momentum", "fujitsu"):
        assert worst(convention) == pytest.approx(0.16)


@every_path
def test_a_norm_includes_elements_whose_squares_underflow(path: Path, way: str) -> None:
    """A million of 1e-20 beside one of 1e-18 are ten times as long as it."""
    path(way)
    weight = nn.Parameter(torch.full((1000, 1000), 1e-20))
    weight.data[0, 0] = 1e-18
    weight.grad = torch.ones_like(weight)
    before = weight.detach().clone()
    LARS([weight], lr=1.0, eta=0.5).step()
    length = math.hypot(1e-17, 1e-18)
    torch.testing.assert_close(before - weight, torch.full_like(weight, 0.5 * length / 1000))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_tiny_rate_times_ratio_loses_no_digits(dtype: torch.dtype) -> None:
    """torch's fused SGD takes 1 - dampening, which has no digits left for 1e-15."""
    weight = nn.Parameter(torch.ones(4, 4, dtype=dtype))
    grad = torch.full((4, 4), 1e6, dtype=dtype)
    optimizer = LARS([weight], lr=1e-6, eta=1e-3)
    for _ in range(2):
        weight.grad = grad
        optimizer.step()
    # Each step adds lr * eta * |w| / |g| * g = 1e-9 to the buffer, after 0.9 of what it was.
    expected = np.full((4, 4), 1.9e-9)
    assert_close(optimizer.state[weight]["momentum_buffer"], expected, 1e-6)


def test_the_norm_of_a_view_covers_only_the_view() -> None:
    around = torch.full((3, 700), 5.0)
    around[1] = 2.0
    assert fused.norm(around[1]) == pytest.approx(2 * math.sqrt(700), rel=1e-6)
