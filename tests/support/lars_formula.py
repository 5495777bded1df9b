"""The LARS formula, written out in float64 NumPy, and parameters to try it on."""

import math
import sys
from collections.abc import Callable
from typing import Any

import fake_apex
import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor, nn

from largebatch import proof
from largebatch.optim.kernels import apex, batched, fused, table
from largebatch.optim.lars import LARS
from largebatch.recipe.choices import Convention

Array = npt.NDArray[np.float64]
Path = Callable[[str], None]

CONVENTIONS: list[Convention] = ["reference", "scaled-momentum", "outside", "fujitsu"]
RATES = [0.3, 1.7, 0.0, 0.5, 1e-3]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6}


@pytest.fixture(name="path")
def choose_path(monkeypatch: pytest.MonkeyPatch) -> Path:
    """Send CPU tensors down one of the ways."""
    own = fused.update
    monkeypatch.setitem(sys.modules, "amp_C", fake_apex)

    def choose(way: str) -> None:
        if way == "table":
            pytest.importorskip("triton", reason="Triton, whose interpreter runs the kernels")
            if torch.cuda.is_available():
                pytest.skip("Triton's interpreter needs a process without a GPU")
            monkeypatch.setitem(proof.KERNEL_DEVICES, proof.OPTIMIZER, {"cpu"})
            monkeypatch.setitem(proof.DECISIONS, (proof.OPTIMIZER, torch.device("cpu")), None)
            monkeypatch.setattr(table, "CHUNK", 1024)  # several programs for some tensors
            return
        monkeypatch.setitem(proof.KERNEL_DEVICES, proof.OPTIMIZER, set())
        update = {"fused": own, "batched": batched.update, "apex": apex.update}[way]
        monkeypatch.setattr(fused, "update", update)

    return choose


class Formula:
    """LARS on one float64 array, from the table of conventions in the module's docstring."""

    def __init__(self, weight: Tensor, group: dict[str, Any]) -> None:
        self.w: Array = weight.detach().double().numpy().copy()
        self.b: Array = np.zeros_like(self.w)
        self.group = group

    def step(self, g: Array, lr: float) -> None:
        group = self.group
        w = self.w
        m = group["momentum"]
        wd = group["weight_decay"]
        convention = group["convention"]
        d = g + wd * w
        if (limit := group.get("clip_gradient")) is not None:
            d = np.minimum(np.maximum(d, -limit), limit)
        ratio = self.ratio(g, wd * group["base_lr"] if convention == "fujitsu" else wd)
        if convention in {"reference", "fujitsu"}:
            self.b = m * self.b + lr * ratio * d
            self.w = w - self.b
        elif convention == "scaled-momentum":
            self.b = m * self.b + ratio * d
            self.w = w - lr * self.b
        else:
            self.b = m * self.b + d
            self.w = w - lr * ratio * self.b

    def ratio(self, g: Array, decay: float) -> float:
        length_w = math.sqrt((self.w**2).sum())
        length_g = math.sqrt((g**2).sum())
        if not self.group["adapt"]:
            return 1.0
        ratio = 1.0
        if length_w > 0 and length_g > 0:
            ratio = self.group["eta"] * length_w
            ratio /= length_g + decay * length_w + self.group["eps"]
        limit = self.group.get("clip_ratio")
        return ratio if limit is None else min(ratio, limit)


def parameters(dtype: torch.dtype) -> list[nn.Parameter]:
    """Return one of every kind that could be treated wrongly."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=dtype, generator=generator)

    return [
        nn.Parameter(random(40, 30)),  # longer than one row, and not a multiple of it
        nn.Parameter(random(8, 4, 3, 3).to(memory_format=torch.channels_last)),
        nn.Parameter(random(8, 4, 3, 3).to(memory_format=torch.channels_last)),
        nn.Parameter(random(6, 5, 1, 1).to(memory_format=torch.channels_last)),
        nn.Parameter(random(3, 5).t()),
        nn.Parameter(random(8, 6)[::2, 1:4]),  # with gaps
        nn.Parameter(random(2048)),
        nn.Parameter(random(3)),
        nn.Parameter(random()),
        nn.Parameter(random(0, 4)),
        nn.Parameter(torch.zeros(4, 4, dtype=dtype)),
        nn.Parameter(random(4, 4)),  # gradient always zero
        nn.Parameter(random(4, 4)),  # gradient from the third step on
        nn.Parameter(random(4, 4)),  # never a gradient
    ]


def gradients(weights: list[nn.Parameter], step: int) -> list[Tensor | None]:
    generator = torch.Generator().manual_seed(100 + step)
    grads: list[Tensor | None] = []
    for weight in weights:
        grad = torch.randn(weight.shape, dtype=weight.dtype, generator=generator)
        grads.append(grad)
    assert grads[1] is not None
    grads[1] = grads[1].to(memory_format=torch.channels_last)  # grads[2] stays in the usual order
    grads[-3] = torch.zeros(4, 4, dtype=weights[0].dtype)
    if step < 2:
        grads[-2] = None
    grads[-1] = None
    return grads


def assert_close(ours: Tensor, expected: Array, tolerance: float) -> None:
    """Compare with the largest element in size: rounding of a sum is relative to its terms."""
    if expected.size:
        error = np.abs(ours.detach().double().numpy() - expected).max()
        assert error <= tolerance * max(np.abs(expected).max(), 1e-300)


def take_steps(
    optimizer: LARS, weights: list[nn.Parameter], formulas: list[Formula], steps: range
) -> None:
    for step in steps:
        for group in optimizer.param_groups:
            group["lr"] = RATES[step]
        grads = gradients(weights, step)
        for weight, grad, formula in zip(weights, grads, formulas, strict=True):
            weight.grad = None if grad is None else grad.to(weight.device)
            if grad is not None:
                formula.step(grad.double().numpy(), RATES[step])
        before = [None if grad is None else grad.clone() for grad in grads]
        optimizer.step()
        for weight, grad in zip(weights, before, strict=True):
            if grad is not None and weight.grad is not None:
                assert weight.grad.cpu().equal(grad), "a gradient was changed"
