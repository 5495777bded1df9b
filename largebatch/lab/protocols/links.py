"""Links: point-to-point sends between two workers, over a process group of the two.

A group of torch.distributed is for one thread at a time, and all its operations fail when one
member dies. With groups of two, threads of one worker talk to different workers at the same time,
and the loss of a worker is detected immediately, and only by its peers. The groups use Gloo:
GPU tensors are copied through the host's memory.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from largebatch.distributed.backend import Backend
from largebatch.distributed.torch_distributed import RunningTorch, lost_peers_named
from largebatch.errors import BackendError


class Link:
    """A connection to one other worker. Each end must be used by one thread at a time."""

    def __init__(self, group: dist.ProcessGroup, *, peer: int) -> None:
        self.peer = peer
        """Rank of the other worker."""

        self._group, self._own = group, dist.get_rank()

    def send(self, tensor: Tensor) -> None:
        """Send a tensor; it may be changed after the return. Raises PeerLostError."""
        sent = tensor.to("cpu").contiguous()  # sync: a copy to the host
        with lost_peers_named(self._own):
            dist.send(sent, dst=self.peer, group=self._group)

    def receive(self, into: Tensor) -> None:
        """Wait for a tensor of the type and size of `into`, and copy it there.

        Raises PeerLostError.
        """
        received = into if into.device.type == "cpu" else torch.empty_like(into, device="cpu")
        with lost_peers_named(self._own):
            dist.recv(received, src=self.peer, group=self._group)
        if received is not into:
            into.copy_(received)


def open_links(backend: Backend, pairs: Sequence[tuple[int, int]]) -> dict[tuple[int, int], Link]:
    """Open a link for each of these pairs of ranks, and return those of this worker.

    Every worker must call this with the same pairs. Raises BackendError unless the backend is
    torch.distributed, the only one with point-to-point sends.
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
