"""Links: point-to-point sends between a learner and a server, in two processes or in one.

A group of torch.distributed is for one thread at a time, and all its operations fail when one
member dies. With a group for each pair of workers, threads of one worker talk to different workers
at the same time, and the loss of a worker is detected immediately, and only by its peers. The
groups use Gloo: GPU tensors are copied through the host's memory.
"""

from collections.abc import Sequence
from queue import SimpleQueue
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor

from largebatch.distributed.backend import Backend
from largebatch.distributed.torch_distributed import RunningTorch, lost_peers_named
from largebatch.errors import BackendError


class GroupLink:
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


class QueueLink:
    """One end of a connection between two threads of this process, whose rank is `peer`."""

    def __init__(
        self, sent: SimpleQueue[Tensor], received: SimpleQueue[Tensor], *, peer: int
    ) -> None:
        self.peer = peer
        self._sent, self._received = sent, received

    @classmethod
    def ends(cls, peer: int) -> tuple[Self, Self]:
        """Return both ends of a new connection."""
        there, back = SimpleQueue[Tensor](), SimpleQueue[Tensor]()
        return cls(there, back, peer=peer), cls(back, there, peer=peer)

    def send(self, tensor: Tensor) -> None:
        """Pass on a tensor, which must not change until the other end has received it."""
        self._sent.put(tensor)

    def receive(self, into: Tensor) -> None:
        """Wait for a tensor, and copy it into `into`."""
        into.copy_(self._received.get())


Link = GroupLink | QueueLink


def open_links(backend: Backend, pairs: Sequence[tuple[int, int]]) -> dict[tuple[int, int], Link]:
    """Open a link for each of these pairs of ranks, and return those of this worker.

    Every worker must call this with the same pairs. Raises BackendError unless the backend is
    torch.distributed, the only one with point-to-point sends.
    """
    if not pairs:
        return {}
    if not isinstance(backend, RunningTorch):
        raise BackendError(f"{backend.name} cannot send to one worker alone; use --backend torch")
    return {
        pair: GroupLink(group, peer=pair[1] if backend.rank == pair[0] else pair[0])
        for pair, group in backend.pair_groups(pairs).items()
    }
