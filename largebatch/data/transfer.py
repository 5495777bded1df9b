"""Copies of batches to the device: from pinned memory, on a stream of their own.

A copy from other memory holds the host until the device has done what was asked of it before, and
one in the stream of the model waits for the model. On a stream of its own it is made while the
device computes. Only here, of all of `data/`, are there streams and pinned memory.
"""

import torch
from torch import Tensor

from largebatch import accelerator


class Transfer:
    """Copies tensors to one device; on a CPU they are there already."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = accelerator.stream(device)

    @property
    def is_remote(self) -> bool:
        """True if the device has memory of its own."""
        return accelerator.is_remote(self.device)

    def room(self, *shape: int) -> Tensor:
        """Return memory for bytes, from which a copy does not hold the host."""
        return torch.empty(shape, dtype=torch.uint8, pin_memory=self._stream is not None)

    def send(self, *tensors: Tensor) -> list[Tensor]:
        """Return the tensors on the device, for what is asked of its current stream from now on."""
        if self._stream is None:
            return [tensor.to(self.device) for tensor in tensors]
        current = torch.accelerator.current_stream(self.device)
        with accelerator.on(self._stream):
            pinned = (tensor.pin_memory() for tensor in tensors)  # as it is if it was pinned
            sent = [tensor.to(self.device, non_blocking=True) for tensor in pinned]
        current.wait_stream(self._stream)
        for tensor in sent:
            tensor.record_stream(current)  # else its memory could be used again too early
        return sent
