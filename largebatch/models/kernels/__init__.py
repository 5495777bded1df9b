"""Kernels for BatchNorm spans on a GPU; elsewhere PyTorch's are used.

`take` decides for each batch: the kernels read 16 or 32 bits in channels-last memory. On each
device they are tried once, because Triton may be missing or may not support it: where they fail, or
differ from PyTorch, a warning is logged and PyTorch's kernels are used.
"""

import logging
from functools import cache
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from largebatch import accelerator
from largebatch.models.batchnorm_functional import normalise

_LOG = logging.getLogger(__name__)

_TYPES = (torch.float16, torch.bfloat16, torch.float32)

_MOST = 65_535  # spans, and blocks of at least 16 channels, that CUDA launches together

DEVICES = {accelerator.TRITON}
"""Types of devices with these kernels."""

_WORK: dict[torch.device, bool] = {}
"""Result of the trial on each device."""


def batchnorm() -> ModuleType:
    """Import the kernels; raises ImportError without Triton."""
    from largebatch.models.kernels import fused

    return fused


def take(images: Tensor, other: Tensor | None = None, *, span: int = 1) -> bool:
    """Return True if the kernels normalise spans of N x C x ... images, and add `other`, if any.

    A type or a memory format that they do not take is logged once.
    """
    if images.device.type not in DEVICES or not images.numel():
        return False
    if images.dtype not in _TYPES or not _is_in_rows(images):
        if not torch.compiler.is_compiling():
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


def works(device: torch.device) -> bool:
    """Return True if the kernels can be used on a device; they are tried once on each.

    In a graph of torch.compile they are used on devices where they were tried before.
    """
    if device.type not in DEVICES:
        return False
    if device not in _WORK:
        if torch.compiler.is_compiling():
            return False
        _WORK[device] = accelerator.try_kernels("BatchNorm", lambda: _trial(device))
    return _WORK[device]


def _is_in_rows(images: Tensor) -> bool:
    """Return True if images are in memory as rows x channels, as in channels_last."""
    return images.movedim(1, -1).is_contiguous()


def _trial(device: torch.device) -> float:
    """Return the error of a result and a gradient relative to PyTorch's, in bfloat16."""
    times = 2500 if device.type == accelerator.TRITON else 1  # parts of several steps on a GPU
    values = torch.linspace(-3, 3, 6 * 4 * 40).sin().repeat(times).view(6, -1, 40).movedim(-1, 1)
    affine = torch.linspace(0.5, 1.5, 80).view(2, 40).to(device)
    found = []
    for dtype in (torch.bfloat16, torch.float64):
        images = values.to(device, dtype).requires_grad_()
        weight, bias = affine.to(torch.promote_types(dtype, torch.float32))
        with torch.enable_grad():
            if dtype == torch.bfloat16:
                settings = {"eps": 1e-5, "span": 4, "relu": True}
                out = batchnorm().normalise(images, images.detach(), weight, bias, **settings)[0]
            else:
                out = normalise(images, weight, bias, eps=1e-5, span=4)
                out = F.relu(out + images.detach())
            (grad,) = torch.autograd.grad(out.square().sum(), images)
        found.append(torch.stack([out.detach(), grad]).double())
    ours, reference = found
    return float((ours - reference).norm() / reference.norm())  # sync: once per device
