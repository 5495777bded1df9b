"""The ratios that LARS reports are those of the formula, and those that it has used."""

from typing import Any

import numpy as np
import pytest
import torch
from lars_formula import (
    CONVENTIONS,
    RATES,
    TOLERANCE,
    Formula,
    Path,
    choose_path,
    gradients,
    parameters,
)

from largebatch.optim.lars import LARS
from largebatch.recipe.choices import Convention

__all__ = ["choose_path"]


@pytest.mark.parametrize("convention", CONVENTIONS)
@pytest.mark.parametrize(
    ("way", "options"),
    [
        ("fused", {}),
        ("fused", {"clip_ratio": 0.02, "clip_gradient": 0.5}),
        ("batched", {}),
        ("batched", {"clip_ratio": 0.02, "clip_gradient": 0.5}),
        ("apex", {"clip_ratio": 0.02}),
        ("table", {"clip_ratio": 0.02, "clip_gradient": 0.5}),
    ],
    ids=str,
)
def test_the_trust_ratios_are_those_of_the_formula(
    convention: Convention, way: str, options: dict[str, Any], path: Path
) -> None:
    path(way)
    weights = parameters(torch.float32)
    optimizer = LARS(
        weights, 2.0, eta=0.02, weight_decay=0.1, eps=1e-3, convention=convention, **options
    )
    group = optimizer.param_groups[0]
    assert optimizer.trust_ratios() == {}
    formulas = [Formula(weight, group) for weight in weights]
    decay = group["weight_decay"] * (group["base_lr"] if convention == "fujitsu" else 1)
    for step, rate in enumerate(RATES[:3]):
        group["lr"] = rate
        expected = {}
        for weight, grad, formula in zip(weights, gradients(weights, step), formulas, strict=True):
            weight.grad = grad
            if grad is not None and grad.numel():
                formula.w = weight.detach().double().numpy().copy()
                expected[weight] = formula.ratio(grad.double().numpy(), decay)
        optimizer.step()
        found = optimizer.trust_ratios()
        assert found.keys() == expected.keys()
        ratios = np.array([ratio.item() for ratio in found.values()])
        limits = [expected[weight] for weight in found]  # type: ignore[index]  # they are parameters
        np.testing.assert_allclose(ratios, limits, rtol=TOLERANCE[torch.float32])
        assert len(set(limits)) > 1
