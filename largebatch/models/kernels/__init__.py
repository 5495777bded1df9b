"""Kernels for BatchNorm spans on a GPU; elsewhere PyTorch's are used.

`take` decides for each batch: the kernels read 16 or 32 bits in channels-last memory, and are used
on a device where they were proven (`proof`, `trials`).
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from largebatch import proof

_LOG = logging.getLogger(__name__)

_TYPES = (torch.float16, torch.bfloat16, torch.float32)

_MOST = 65_535  # spans, and blocks of at least 16 channels, that CUDA launches together


def batchnorm() -> ModuleType:
    """Import the kernels; raises ImportError without Triton."""
    from largebatch.models.kernels import batchnorm_launches

    return batchnorm_launches


def take(images: Tensor, other: Tensor | None = None, *, span: int = 1) -> bool:
    """Return True if the kernels normalise spans of N x C x ... images, and add `other`, if any.

    A type or a memory format that they do not take is logged once.
    """
    if not proof.has_kernels(proof.BATCHNORM, images.device) or not images.numel():
        return False
    if images.dtype not in _TYPES or not _is_in_rows(images):
        # Where they are refused anyway, such as by the recipe, no type would change that.
        if not torch.compiler.is_compiling() and not _is_refused(images.device):
            _log_refused(images.dtype, images.dtype in _TYPES)
        return False
    if max(-(-len(images) // span), -(-images.shape[1] // 16)) > _MOST:
        return False
    if other is not None and not (
        other.dtype == images.dtype and other.shape == images.shape and _is_in_rows(other)
    ):
        return False
    return works(images.device)


@cache
def _log_refused(dtype: torch.dtype, is_type_known: bool) -> None:  # noqa: FBT001 -- a cache's key
    found = "not channels_last" if is_type_known else str(dtype)
    _LOG.warning("BatchNorm: images are %s; PyTorch's kernels are used for them", found)


def _is_refused(device: torch.device) -> bool:
    return proof.DECISIONS.get((proof.BATCHNORM, device)) is not None


def works(device: torch.device) -> bool:
    """Return True if the kernels are used on a device, as `proof` has decided.

    In a graph of torch.compile they are used on devices where that was decided before.
    """
    return proof.has_kernels(proof.BATCHNORM, device) and proof.uses(proof.BATCHNORM, device)


def _is_in_rows(images: Tensor) -> bool:
    """Return True if images are in memory as rows x channels, as in channels_last."""
    return images.movedim(1, -1).is_contiguous()


class Use(NamedTuple):
    """One use of the kernels by a layer: what decides which code runs."""

    shape: tuple[int, ...]
    dtype: str
    span: int
    eps: float
    adds: bool
    relu: bool
    affine: bool
    counts: bool
    """True if the moments are added up for the running statistics."""

    shares: bool
    """True if workers share a span."""


_USES: ContextVar[Counter[Use] | None] = ContextVar("_USES", default=None)


@contextmanager
def noted_uses() -> Iterator[Counter[Use]]:
    """Collect the uses of the kernels in this block, with their numbers."""
    uses: Counter[Use] = Counter()
    token = _USES.set(uses)
    try:
        yield uses
    finally:
        _USES.reset(token)


def note_use(use: Callable[[], Use]) -> None:
    """Note a use, if they are collected."""
    uses = _USES.get()
    if uses is not None:
        uses[use()] += 1
