"""Averaged weights polished before an evaluation, and audits, in the loops of other libraries.

`lightning`, `transformers`, `accelerate` and `timm` are a library's hooks; here is what they share.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, count
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from largebatch.audit import Findings, audit
from largebatch.polish import polish


@contextmanager
def polished(model: nn.Module, averaged: AveragedModel, batches: Iterable[Any]) -> Iterator[None]:
    """Hold the polished average in the model in this block, to evaluate or save it.

    `batches` are clean training images, of which every worker may pass all or its own share.

    >>> model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    >>> averaged = AveragedModel(model)  # updated after every update of the model
    >>> with polished(model, averaged, [torch.randn(8, 3, 9, 9)]):
    ...     weights = model.state_dict()
    """
    exchange(model, averaged)
    try:
        polish(model, batches)
        yield
    finally:
        exchange(model, averaged)


@torch.no_grad()
def exchange(model: nn.Module, averaged: AveragedModel) -> None:
    """Exchange the weights and buffers of a model and of its averaged copy, in place."""
    pairs = ((it.parameters(), it.buffers()) for it in (model, averaged.module))
    for one, other in zip(*map(chain.from_iterable, pairs), strict=True):
        content = one.clone()
        one.copy_(other)
        other.copy_(content)


def audit_updates(  # noqa: PLR0913 -- those of `audit`
    model: nn.Module,
    loader: Any,
    loss_fn: Callable[[Any, Any], Tensor],
    optimizer: Optimizer,
    backward: Callable[[Any], object],
    clip: Callable[[], object],
    *,
    micros: int,
) -> Findings:
    """Audit updates of `micros` calls of `backward(batch)` and one of `clip`, and undo them."""
    calls = count(1)

    def step(batch: Any) -> None:
        backward(batch)
        if next(calls) % micros == 0:
            clip()
            optimizer.step()
            optimizer.zero_grad()

    owner = loader if hasattr(loader, "set_epoch") else getattr(loader, "sampler", None)
    set_epoch = getattr(owner, "set_epoch", None)
    return audit(model, loader, loss_fn, optimizer, step, set_epoch=set_epoch)
