import math
from typing import Any

import pytest
import torch
from torch import nn

from largebatch.optim.lars import LARS
from largebatch.recipe.choices import Convention

CONVENTIONS: list[Convention] = ["reference", "scaled-momentum", "outside", "fujitsu"]
every_convention = pytest.mark.parametrize("convention", CONVENTIONS)


@every_convention
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_without_decay_the_first_step_has_length_lr_eta_weight(
    convention: Convention, scale: float
) -> None:
    """The scale of the gradient cancels."""
    weight = nn.Parameter(torch.full((3, 4), 2.0))
    weight.grad = scale * torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    before = weight.detach().clone()
    LARS([weight], lr=0.5, eta=0.01, convention=convention).step()
    moved = (weight.detach() - before).norm() / before.norm()
    assert moved.item() == pytest.approx(0.5 * 0.01, rel=1e-5)


@every_convention
def test_a_group_that_is_not_adapted_follows_momentum_sgd(convention: Convention) -> None:
    """Here a wrong gradient scale would show; constant rate, so that all conventions agree."""
    ours, theirs = (nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.float64)) for _ in "ab")
    group = {"params": [ours], "adapt": False, "weight_decay": 0.1}
    optimizer = LARS([group], lr=0.3, momentum=0.8, convention=convention)
    reference = torch.optim.SGD([theirs], lr=0.3, momentum=0.8, weight_decay=0.1)
    for step in range(4):
        ours.grad = torch.tensor([0.5, step], dtype=torch.float64)
        theirs.grad = ours.grad.clone()
        optimizer.step()
        reference.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=0)


@every_convention
@pytest.mark.parametrize(
    ("weight", "grad"),
    [
        pytest.param([0.0, 0.0], [1.0, 1.0], id="zero weight"),
        pytest.param([1.0, 1.0], [0.0, 0.0], id="zero gradient"),
    ],
)
def test_a_zero_norm_makes_the_ratio_one(
    convention: Convention, weight: list[float], grad: list[float]
) -> None:
    parameter = nn.Parameter(torch.tensor([weight]))
    parameter.grad = torch.tensor([grad])
    expected = parameter.detach() - 0.5 * (parameter.grad + 0.1 * parameter.detach())
    LARS([parameter], lr=0.5, weight_decay=0.1, convention=convention).step()
    torch.testing.assert_close(parameter.detach(), expected)


def test_a_new_rate_takes_effect_immediately_only_outside_the_momentum() -> None:
    def second_step(convention: Convention) -> float:
        weight = nn.Parameter(torch.ones(1, 4))
        optimizer = LARS([weight], lr=1.0, eta=0.01, momentum=0.9, convention=convention)
        for lr in (1.0, 0.0):
            before = weight.detach().clone()
            optimizer.param_groups[0]["lr"] = lr
            weight.grad = torch.ones(1, 4)
            optimizer.step()
        return float((before - weight.detach()).norm())

    assert second_step("scaled-momentum") == 0
    assert second_step("outside") == 0
    assert second_step("reference") == pytest.approx(0.9 * 0.01 * 2, rel=1e-5)
    assert second_step("fujitsu") == pytest.approx(0.9 * 0.01 * 2, rel=1e-5)


def test_fujitsus_decay_is_scaled_by_the_peak_rate() -> None:
    weight = nn.Parameter(torch.ones(1, 4, dtype=torch.float64))
    weight.grad = torch.full((1, 4), 3.0, dtype=torch.float64)
    optimizer = LARS([weight], lr=13.0, weight_decay=0.1, eta=0.5, convention="fujitsu")
    optimizer.param_groups[0]["lr"] = 6.5
    optimizer.step()
    ratio = 0.5 * 2 / (6 + 0.1 * 13 * 2)
    assert weight[0, 0].item() == pytest.approx(1 - ratio * 0.5 * (13 * 3 + 0.1 * 13), rel=1e-12)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"convention": "nesterov"}, "convention.*nesterov"),
        ({"kernels": "triton"}, "kernels.*auto, torch, apex"),
        ({"momentum": 1.0}, "momentum.* 1.0"),
        ({"momentum": math.nan}, "momentum.* nan"),
        ({"eta": 0.0}, "eta.* 0.0"),
        *(({"eta": bad}, f"eta.* {bad}") for bad in (math.nan, math.inf)),
        *(
            ({key: bad}, f"^{key} .* {bad}")
            for key in ("lr", "weight_decay", "eps")
            for bad in (-0.1, math.nan, math.inf)
        ),
        *(
            ({key: bad}, f"^{key} .* {bad}")
            for key in ("clip_ratio", "clip_gradient")
            for bad in (0.0, -1.0, math.nan, math.inf)
        ),
        ({"lr": torch.tensor(math.inf)}, "^lr .* inf"),
    ],
)
def test_a_wrong_hyper_parameter_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LARS([nn.Parameter(torch.ones(1))], **options)
