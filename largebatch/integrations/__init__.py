"""Averaged weights polished before an evaluation, and audits, in the loops of other libraries.

`lightning`, `transformers`, `accelerate` and `timm` are a library's hooks; here is what they share.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

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
    pairs = ((module.parameters(), module.buffers()) for module in (model, averaged.module))
    # In place, as optimizers, hooks and graphs hold these tensors.
    for tensor, other in zip(*map(chain.from_iterable, pairs), strict=True):
        content = tensor.clone()
        tensor.copy_(other)
        other.copy_(content)
