"""Links: two workers that send each other tensors, over a process group of their own.

A group of torch.distributed is for one thread at a time, and when one of its members dies all its
operations fail. Over groups of two, threads of one worker talk to different workers at once, and
the loss of one is seen at once, and by those alone who talk to it. The groups are Gloo's: what is
on a GPU goes through the memory of the host.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from largebatch.distributed.backend import Backend
from largebatch.distributed.torch_distributed import RunningTorch, lost_peers_named
from largebatch.errors import BackendError


class Link:
    """The way to one other worker. Each end is used by one thread at a time."""

    def __init__(self, group: dist.ProcessGroup, *, peer: int) -> None:
        self.peer = peer
        """The rank of the other worker."""

        self._group, self._own = group, dist.get_rank()

    def send(self, tensor: Tensor) -> None:
        """Send a tensor; return when it may be changed again. Raises PeerLostError."""
        sent = tensor.to("cpu").contiguous()  # sync: it leaves the device
        with lost_peers_named(self._own):
            dist.send(sent, dst=self.peer, group=self._group)

    def receive(self, into: Tensor) -> None:
        """Wait for a tensor of this type and size, and write it there. Raises PeerLostError."""
        received = into if into.device.type == "cpu" else torch.empty_like(into, device="cpu")
        with lost_peers_named(self._own):
            dist.recv(received, src=self.peer, group=self._group)
        if received is not into:
            into.copy_(received)


def open_links(backend: Backend, pairs: Sequence[tuple[int, int]]) -> dict[tuple[int, int], Link]:
    """Open a link for each of these pairs of ranks, and return those of this worker.

    Every worker calls this with the same pairs. torch.distributed connects them, which alone can
    send to one worker; raises BackendError for another backend.
    """
    if not pairs:
        return {}
    if not isinstance(backend, RunningTorch):
        raise BackendError(f"{backend.name} cannot send to one worker alone; use --backend torch")
    groups = backend.pair_groups(pairs)
    return {
        pair: Link(group, peer=pair[1] if backend.rank == pair[0] else pair[0])
        for pair, group in groups.items()
    }
