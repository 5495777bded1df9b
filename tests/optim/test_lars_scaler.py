"""LARS under a GradScaler: on a device it unscales and skips without a wait of the host."""

import copy
import itertools
from typing import Any

import accelerator
import pytest
import torch
from accelerator import COUNTS
from lars_formula import gradients, parameters
from on_forked_workers import on_forked_workers
from torch import Tensor, nn
from torch.amp import GradScaler

from largebatch.optim.lars import LARS
from largebatch.recipe.choices import Convention

POISON = {0: float("nan"), 2: float("inf"), 3: float("-inf")}
"""Value in one gradient, by step; the first step initialises the momentum."""

STEPS = 5
SETTINGS: list[dict[str, Any]] = [
    {"adapt": True, "unscale": False},
    {"adapt": False, "unscale": True, "momentum": 0.0},
    {"adapt": True, "unscale": True, "clip_ratio": 0.019, "clip_gradient": 0.7},
    {"adapt": True, "unscale": False, "momentum": 0.0, "clip_gradient": 0.7},
]
"""`adapt` is of half of the weights; the other half has the opposite."""


class Waiting(LARS):
    """LARS for which GradScaler unscales, and reads whether to skip."""

    _step_supports_amp_scaling = False


def bits(optimizer: LARS) -> list[bytes]:
    """Return every weight, master and momentum; missing ones are zero."""
    found = []
    for group in optimizer.param_groups:
        for weight in group["params"]:
            state = optimizer.state.get(weight, {})
            buffer = state.get("momentum_buffer", torch.zeros(weight.shape))
            found += [weight, state.get("master", weight.float()), buffer]
    return [tensor.detach().cpu().double().numpy().tobytes() for tensor in found]


def negative_zeros(dtype: torch.dtype) -> list[nn.Parameter]:
    """Return the parameters, of which that of zeros has the sign that a sum with 0 loses."""
    weights = parameters(dtype)
    weights[10].data.neg_()
    return weights


def steps(
    kind: type[LARS],
    dtype: torch.dtype,
    *,
    adapt: bool,
    unscale: bool,
    **settings: Any,  # noqa: ANN401 -- those of LARS
) -> list[list[Tensor]]:
    """Step with a scaler on the device; return the weights after each.

    Raises AssertionError where a step that is skipped changes a bit, or another changes none.
    """
    weights = [nn.Parameter(weight.detach().to("sim")) for weight in negative_zeros(dtype)]
    parts = (weights[::2], adapt), (weights[1::2], not adapt)
    groups = [{"params": part, "adapt": adapted} for part, adapted in parts]
    optimizer = kind(groups, 0.3, weight_decay=0.05, eta=0.02, **settings)
    scaler = GradScaler("sim", init_scale=2.0**10)
    found = []
    for step in range(STEPS):
        scale = scaler.scale(torch.ones((), device="sim"))
        grads = gradients(negative_zeros(dtype), step)
        assert grads[0] is not None
        grads[0][-1, -1] = POISON.get(step, 1.0)
        for weight, grad in zip(weights, grads, strict=True):
            weight.grad = None if grad is None else (grad.to("sim") * scale).to(dtype)
        before = bits(optimizer)
        if unscale:
            scaler.unscale_(optimizer)
        COUNTS.clear()
        scaler.step(optimizer)
        assert (COUNTS.totals()["syncs"] > 0) == (kind is Waiting)
        scaler.update()
        assert (bits(optimizer) == before) == (step in POISON)
        found.append([weight.detach().cpu().double() for weight in weights])
    return found


def apart(convention: Convention, dtype: torch.dtype) -> float:
    """Return the largest difference between LARS and its twin that waits, over all settings."""
    accelerator.simulate()
    worst = 0.0
    for settings in SETTINGS:
        each = {**settings, "convention": convention}
        ours, twin = (steps(kind, dtype, **each) for kind in (LARS, Waiting))
        for one, other in zip(itertools.chain(*ours), itertools.chain(*twin), strict=True):
            if one.numel():
                worst = max(worst, float((one - other).abs().max() / other.abs().max().clamp(1)))
    return worst


@pytest.mark.parametrize(
    ("convention", "dtype"),
    [
        ("reference", torch.bfloat16),
        ("fujitsu", torch.float32),
        *(
            pytest.param(convention, torch.bfloat16, marks=pytest.mark.long)
            for convention in ("scaled-momentum", "outside")
        ),
    ],
)
def test_a_step_equals_one_that_waits_and_a_skipped_one_changes_no_bit(
    convention: Convention, dtype: torch.dtype
) -> None:
    assert on_forked_workers(apart, convention, dtype, workers=1) < 1e-6


def masters() -> list[float]:
    """Return the masters of a weight of float16 after two steps, of which the first is skipped."""
    accelerator.simulate()
    weight = nn.Parameter(torch.ones(2, dtype=torch.float16, device="sim"))
    optimizer = LARS([{"params": [weight], "adapt": False}], 2.0**10, momentum=0.0)
    scaler = GradScaler("sim", init_scale=4.0)
    for grads in ([float("inf"), 0.0], [2.0**-24, 2.0**-10]):
        scaler.scale(torch.ones((), device="sim"))
        weight.grad = torch.tensor(grads, dtype=torch.float16).to("sim")
        scaler.step(optimizer)
        scaler.update()
    copied = copy.copy(optimizer)  # what a scaler lends is given back
    assert not {"grad_scale", "found_inf"} & {*vars(optimizer), *vars(copied)}
    found: list[float] = optimizer.state[weight]["master"].tolist()
    return found


def test_gradients_of_float16_are_unscaled_in_float32() -> None:
    """Half of its smallest number, 2^-24, is 0 in float16."""
    assert on_forked_workers(masters, workers=1) == [1 - 2.0**-15, 0.5]
