"""Copies of batches to the device: from pinned memory, on a separate stream.

A copy from pageable memory blocks the host until the device's queue is empty, and a copy in the
model's stream waits for the model. On a separate stream it overlaps with computation. This is the
only module of `data/` that uses streams and pinned memory.
"""

import torch
from torch import Tensor

from largebatch import accelerator


class Transfer:
    """Copies tensors to one device; on a CPU it returns them."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = accelerator.stream(device)

    @property
    def is_remote(self) -> bool:
        """True if the device has its own memory."""
        return accelerator.is_remote(self.device)

    def room(self, *shape: int) -> Tensor:
        """Return an empty uint8 tensor whose copy does not block the host (pinned memory)."""
        return torch.empty(shape, dtype=torch.uint8, pin_memory=self._stream is not None)

    def send(self, *tensors: Tensor) -> list[Tensor]:
        """Return the tensors on the device, for use in its current stream."""
        if self._stream is None:
            return [tensor.to(self.device) for tensor in tensors]
        current = torch.accelerator.current_stream(self.device)
        with accelerator.on(self._stream):
            pinned = (tensor.pin_memory() for tensor in tensors)  # no copy if already pinned
            sent = [tensor.to(self.device, non_blocking=True) for tensor in pinned]
        current.wait_stream(self._stream)
        for tensor in sent:
            tensor.record_stream(current)  # else its memory could be reused too early
        return sent
