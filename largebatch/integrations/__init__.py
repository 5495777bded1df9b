"""Averaged weights polished before an evaluation, and audits, in the loops of other libraries.

A module for each library: `lightning`, `transformers`, `accelerate` and `timm`.
"""

from itertools import chain

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel


@torch.no_grad()
def exchange(model: nn.Module, averaged: AveragedModel) -> None:
    """Exchange the weights and buffers of a model and of its averaged copy, in place."""
    pairs = ((it.parameters(), it.buffers()) for it in (model, averaged.module))
    for one, other in zip(*map(chain.from_iterable, pairs), strict=True):
        content = one.clone()
        one.copy_(other)
        other.copy_(content)
