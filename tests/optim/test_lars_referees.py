"""LARS compared with other code: timm's, and MLPerf's formula transcribed to NumPy.

80 steps of a real schedule on a real small network; LeNet-5 on images of random noise has
tensors of many sizes and gradients that change from step to step.
"""

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import nn

from largebatch.models import build, param_groups
from largebatch.optim.lars import LARS
from largebatch.optional import require_torchvision
from largebatch.schedules.functions import Schedule, polynomial, warmup

STEPS, MOMENTUM, DECAY, ETA = 80, 0.9, 5e-3, 1e-2
RATE: Schedule = warmup(polynomial(peak=2.0, steps=60, power=2.0, end=1e-3), steps=20)


def net() -> nn.Module:
    torch.manual_seed(0)
    return build("lenet5", num_classes=10).double()


def backward(model: nn.Module, step: int) -> None:
    """Compute the gradient of one small batch, the same for all optimizers at this step."""
    generator = torch.Generator().manual_seed(step)
    images = torch.randn(4, 3, 16, 16, dtype=torch.float64, generator=generator)
    labels = torch.randint(10, (4,), generator=generator)
    model.zero_grad()
    F.cross_entropy(model(images), labels).backward()


def test_scaled_momentum_matches_timms_lars() -> None:
    """timm turns into plain SGD where weight_decay is 0, so every tensor is decayed here."""
    require_torchvision()
    from timm.optim.lars import Lars

    ours, theirs = net(), net()
    everything = [{"params": list(ours.parameters())}]
    mine = LARS(
        everything, momentum=MOMENTUM, weight_decay=DECAY, eta=ETA, convention="scaled-momentum"
    )
    timms = Lars(
        theirs.parameters(), momentum=MOMENTUM, weight_decay=DECAY, trust_coeff=ETA, eps=0.0
    )
    for step in range(STEPS):
        for model, optimizer in ((ours, mine), (theirs, timms)):
            optimizer.param_groups[0]["lr"] = RATE(step)
            backward(model, step)
            optimizer.step()
    for here, there in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(here, there, rtol=1e-10, atol=1e-12)


def test_reference_matches_mlperfs_formula_in_numpy() -> None:
    """RULES: ratio = eta |w| / (|g| + decay |w|); v = m v + lr ratio (g + decay w); w = w - v.

    BatchNorm and biases take v = m v + lr g.
    """
    model = net()
    optimizer = LARS(
        param_groups(model, weight_decay=DECAY), momentum=MOMENTUM, eta=ETA, convention="reference"
    )
    weights = {name: weight.detach().numpy().copy() for name, weight in model.named_parameters()}
    velocity = {name: np.zeros_like(weight) for name, weight in weights.items()}
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = RATE(step)
        backward(model, step)
        for name, weight in model.named_parameters():
            assert weight.grad is not None
            grad = weight.grad.numpy()
            velocity[name] = MOMENTUM * velocity[name] + RATE(step) * scaled(weights[name], grad)
            weights[name] = weights[name] - velocity[name]
        optimizer.step()
    for name, weight in model.named_parameters():
        np.testing.assert_allclose(weight.detach().numpy(), weights[name], rtol=1e-9, atol=1e-12)


def scaled(w: npt.NDArray[np.float64], g: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    if w.ndim == 1:
        return g
    norm_w, norm_g = np.sqrt((w * w).sum()), np.sqrt((g * g).sum())
    ratio = ETA * norm_w / (norm_g + DECAY * norm_w) if norm_w > 0 and norm_g > 0 else 1.0
    direction: npt.NDArray[np.float64] = ratio * (g + DECAY * w)
    return direction
