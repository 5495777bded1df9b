"""The problem of the crown test in plain PyTorch, with the formulas of papers or of a library.

Nothing of largebatch is used here, so that one mistake cannot be on both sides of a comparison.
"""

from collections.abc import Sequence
from typing import Any

import crown
import torch
import torch.nn.functional as F
from crown import EPS, ETA, GLOBAL_BATCH, MOMENTUM, PEAK, SMOOTHING, WEIGHT_DECAY, State
from plain_mixing import mixed_by_hand
from pytorch_optimizer import ScalableShampoo
from schedulefree import SGDScheduleFree
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.optimizer import ParamsT

from largebatch.optional import require_timm

require_timm()
from timm.optim.lamb import Lamb  # noqa: E402 -- timm needs torchvision's operators


def plain_pytorch(
    net: str,
    optimizer: str,
    *,
    chunk: int,
    sizes: Sequence[int] = (GLOBAL_BATCH,) * crown.STEPS,
    mixes: bool = False,
) -> State:
    """One process, the formulas of the papers, statistics over `chunk` samples.

    `sizes` are the global batches of the updates; they take the samples one after the other.
    """
    model = crown.net(net)
    images, labels = crown.data()
    shares = torch.ones(len(labels), dtype=torch.float64)
    partners = labels
    if mixes:
        images, shown = mixed_by_hand(images, labels, first=0, seed=0)
        shares = torch.tensor([label.share for label in shown], dtype=torch.float64)
        partners = torch.tensor([label.partners for label in shown])
    theirs = library_optimizer(optimizer, model)
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
            losses = F.cross_entropy(
                logits, labels[part], label_smoothing=SMOOTHING, reduction="none"
            )
            of_partners = F.cross_entropy(
                logits, partners[part], label_smoothing=SMOOTHING, reduction="none"
            )
            losses = shares[part] * losses + (1 - shares[part]) * of_partners
            (losses.sum() / size).backward()
            after.append({name: value.clone() for name, value in model.named_buffers()})
        start += size
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                buffer.copy_(torch.stack([found[name] for found in after]).double().mean(0))
        if theirs is not None:
            update(theirs, lr=crown.rate(step))
            continue
        with torch.no_grad():
            for name, weight in model.named_parameters():
                assert weight.grad is not None
                move(optimizer, weight, weight.grad, velocity[name], lr=crown.rate(step))
    return model.state_dict()


def library_optimizer(kind: str, model: nn.Sequential) -> Optimizer | None:
    """Build what a library has, by its own arguments; the rate comes with every update."""
    groups: ParamsT = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0},
    ]
    if kind == "nesterov":
        return SGD(groups, lr=1.0, momentum=MOMENTUM, nesterov=True)
    if kind == "shampoo":
        return ScalableShampoo(
            groups,
            betas=(MOMENTUM, 0.7),
            matrix_eps=1e-4,
            block_size=8,
            start_preconditioning_step=2,
            preconditioning_compute_steps=1,
            inverse_exponent_override=4,
        )
    if kind == "schedule-free":
        free: Optimizer = SGDScheduleFree(groups, momentum=MOMENTUM, r=0.75, weight_lr_power=1.5)
        free.train()  # type: ignore[attr-defined]
        return free
    if kind == "lamb":
        lamb: Optimizer = Lamb(groups, bias_correction=False, max_grad_norm=0.5)
        return lamb
    if kind == "adamw":
        return AdamW(groups, betas=(0.8, 0.9), eps=1e-6)
    return muon(kind, model) if kind.startswith("muon") else None


def muon(kind: str, model: nn.Sequential) -> Optimizer:
    """Build Muon for the second convolution, beside SGD or AdamW of torch."""
    matrix = model.get_parameter("3.weight")
    if kind == "muon with adamw":
        groups = without_matrix(model, share=1.0, head=1.0, bias_decay=0.0)
        adamw = AdamW(groups, betas=(0.9, 0.95), eps=1e-6)
        return Muon(matrix, adamw, factor=0.2 * 54**0.5, ns_steps=5, normalize=False)
    groups = without_matrix(model, share=0.5, head=0.25, bias_decay=0.1)
    sgd = SGD(groups, momentum=MOMENTUM, nesterov=True)
    return Muon(matrix, sgd, factor=1.0, ns_steps=3, normalize=True)


def without_matrix(
    model: nn.Sequential, *, share: float, head: float, bias_decay: float
) -> list[dict[str, Any]]:
    """Return all weights but the matrix: `share` and `head` are their rates over Muon's."""
    vectors = [p for p in model.parameters() if p.ndim <= 1]
    return [
        {"params": [model[0].weight], "share": share, "weight_decay": WEIGHT_DECAY},
        {"params": [model[-1].weight], "share": head, "weight_decay": WEIGHT_DECAY},
        {"params": vectors, "share": share, "weight_decay": bias_decay},
    ]


class Muon(Optimizer):
    """Keller Jordan's formulas for one convolution; `others` updates the rest.

    He adds 1e-7 to the norm of a matrix. timm and torch do so only where the norm is smaller.
    """

    def __init__(
        self, weight: Tensor, others: Optimizer, *, factor: float, ns_steps: int, normalize: bool
    ) -> None:
        super().__init__([weight], {"lr": 0.0})
        self.others, self.factor, self.ns_steps = others, factor, ns_steps
        self.normalize, self.buffer = normalize, torch.zeros_like(weight)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        lr, w = self.param_groups[0]["lr"], self.param_groups[0]["params"][0]
        self.buffer.mul_(MOMENTUM).add_(w.grad)
        x = w.grad.add(self.buffer, alpha=MOMENTUM).reshape(len(w), -1)
        x = x / x.norm()
        for _ in range(self.ns_steps):
            square = x @ x.T
            x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
        if self.normalize:
            w.mul_(len(w) ** 0.5 / w.norm())
        w.mul_(1 - lr * WEIGHT_DECAY).sub_(lr * self.factor * x.view_as(w))
        for group in self.others.param_groups:
            group["lr"] = lr * group["share"]
        self.others.step()


def update(optimizer: Optimizer, *, lr: float) -> None:
    """Make one update at a rate."""
    for group in optimizer.param_groups:
        group["lr"] = lr
    torch.manual_seed(0)  # Shampoo draws where it begins to look for the largest eigenvalue
    optimizer.step()


def move(optimizer: str, w: Tensor, g: Tensor, v: Tensor, *, lr: float) -> None:
    """One update of one tensor; vectors are neither decayed nor adapted."""
    adapt = w.ndim > 1
    wd = WEIGHT_DECAY if adapt else 0.0
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
    elif optimizer != "fujitsu":
        raise ValueError(f"no formula of {optimizer}")
    else:
        v.copy_(MOMENTUM * v + ratio * (lr / PEAK) * (PEAK * g + wd * PEAK * w))
        w -= v
