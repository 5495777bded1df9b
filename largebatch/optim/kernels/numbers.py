"""Numbers of the host on a device, where a graph reads those that were sent before its replay."""

from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from largebatch import accelerator


class Numbers:
    """Numbers of an optimizer in one tensor on a device, whose memory stays the same."""

    def __init__(self, device: torch.device, dtype: torch.dtype = torch.float64) -> None:
        self._device, self._dtype = device, dtype
        self._sent: Sequence[object] = ()
        self._tensor = torch.empty(0, dtype=dtype, device=device)

    def use(self, numbers: Sequence[float] | Sequence[Sequence[float]]) -> Tensor:
        """Return these numbers on the device; in a graph, those sent before its replay."""
        if numbers != self._sent and not accelerator.is_recording():
            source = pinned(numbers, self._device, self._dtype)
            if source.shape != self._tensor.shape:
                self._tensor = torch.empty(source.shape, dtype=self._dtype, device=self._device)
            self._tensor.copy_(source, non_blocking=True)
            self._sent = numbers
        return self._tensor


def fixed_in_graphs(
    groups: Sequence[dict[str, Any]],
    state: Mapping[Tensor, dict[str, Any]],
    *,
    but: Collection[str],
) -> object:
    """Return what a graph keeps: settings of groups but these, and addresses of their tensors."""
    weights = [weight for group in groups for weight in group["params"]]
    tensors = [*weights, *chain.from_iterable(each.values() for each in state.values())]
    settings = [
        {key: value for key, value in group.items() if key not in {"params", *but}}
        for group in groups
    ]
    return settings, [it.data_ptr() for it in tensors if isinstance(it, Tensor)]


def pinned(numbers: Sequence[object], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return numbers in memory from which a copy to a device does not wait for it."""
    return torch.tensor(numbers, dtype=dtype, device="cpu", pin_memory=device.type != "cpu")
