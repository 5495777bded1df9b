"""The problem of the crown test by hand: plain PyTorch and the formulas of the papers.

Nothing of largebatch takes part, so that a mistake of ours cannot be on both sides of a comparison.
"""

from collections.abc import Sequence

import crown
import torch
import torch.nn.functional as F
from crown import EPS, ETA, GLOBAL_BATCH, MOMENTUM, PEAK, SMOOTHING, State
from torch import Tensor


def plain_pytorch(
    net: str, optimizer: str, *, chunk: int, sizes: Sequence[int] = (GLOBAL_BATCH,) * crown.STEPS
) -> State:
    """One process, the formulas of the papers, statistics over `chunk` samples.

    `sizes` are the global batches of the updates; they take the samples one after the other.
    """
    model = crown.net(net)
    images, labels = crown.data()
    velocity = {name: torch.zeros_like(weight) for name, weight in model.named_parameters()}
    start = 0
    for step, size in enumerate(sizes):
        model.zero_grad()
        before = {name: value.clone() for name, value in model.named_buffers()}
        after = []
        for first in range(start, start + size, chunk):
            with torch.no_grad():
                for name, buffer in model.named_buffers():
                    buffer.copy_(before[name])
            part = slice(first, first + chunk)
            logits = model(images[part])
            loss = F.cross_entropy(logits, labels[part], label_smoothing=SMOOTHING, reduction="sum")
            (loss / size).backward()
            after.append({name: value.clone() for name, value in model.named_buffers()})
        start += size
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                buffer.copy_(torch.stack([found[name] for found in after]).double().mean(0))
            for name, weight in model.named_parameters():
                assert weight.grad is not None
                move(optimizer, weight, weight.grad, velocity[name], lr=crown.rate(step))
    return model.state_dict()


def move(optimizer: str, w: Tensor, g: Tensor, v: Tensor, *, lr: float) -> None:
    """One update of one tensor; vectors are neither decayed nor adapted."""
    adapt = w.ndim > 1
    wd = crown.WEIGHT_DECAY if adapt else 0.0
    decay = wd * PEAK if optimizer == "fujitsu" else wd
    ratio = ETA * w.norm() / (g.norm() + decay * w.norm() + EPS) if adapt else 1.0
    if optimizer == "sgd":
        v.copy_(MOMENTUM * v + (g + wd * w))
        w -= lr * v
    elif optimizer == "reference":
        v.copy_(MOMENTUM * v + lr * ratio * (g + wd * w))
        w -= v
    elif optimizer == "scaled-momentum":
        v.copy_(MOMENTUM * v + ratio * (g + wd * w))
        w -= lr * v
    elif optimizer == "outside":
        v.copy_(MOMENTUM * v + (g + wd * w))
        w -= lr * ratio * v
    else:
        v.copy_(MOMENTUM * v + ratio * (lr / PEAK) * (PEAK * g + wd * PEAK * w))
        w -= v
