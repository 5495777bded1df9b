"""Makes some updates by a protocol, with every worker as a learner, a server or both.

Before and after, every worker has the same weights and momentum, after the same number of updates.
So a run can be evaluated, saved and resumed between them as usual.
"""

import copy
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from largebatch.distributed.agreement import gather_values
from largebatch.distributed.backend import Backend
from largebatch.errors import PeerLostError
from largebatch.lab.protocols.links import Link, QueueLink, open_links
from largebatch.lab.protocols.rule import MiniBatches, Rule
from largebatch.lab.protocols.server import MOMENTUM, Arrival, ParameterServer, divide
from largebatch.lab.protocols.service import Gradient, Service, Shard, learn
from largebatch.schedules.functions import Schedule


class Record(NamedTuple):
    """The record of some updates, the same on every worker."""

    updates: list[tuple[int, float, float]]
    """Number, learning rate and seconds of the updates of the first server; fewer than requested if
    a learner was asked to stop."""

    arrivals: list[list[Arrival]]
    """Gradients by server, in order of arrival."""


class Exchange:
    """The learners and servers of a run, and the links between them.

    Learners are the first workers; `servers` are the ascending ranks of the servers.
    """

    def __init__(self, backend: Backend, *, learners: int, servers: Sequence[int]) -> None:
        self.backend, self.learners, self._servers = backend, learners, servers
        rank = backend.rank
        pairs = [(learner, server) for learner in range(learners) for server in servers]
        others = [(learner, server) for learner, server in pairs if learner != server]
        self._links = open_links(backend, others)
        self._place = servers.index(rank) if rank in servers else None
        """Number of this worker's server."""

    def run(  # noqa: PLR0913 -- what is updated, how, how often, and from what
        self,
        weights: Sequence[Tensor],
        optimizer: Optimizer,
        schedule: Schedule,
        rule: Rule,
        mini_batches: MiniBatches,
        *,
        clock: int,
        gradient: Gradient,
        asks: Callable[[], bool] = lambda: False,
    ) -> Record:
        """Train on the mini-batches; change `weights` and the momentum of `optimizer` in place.

        `optimizer` holds these weights and perhaps others. `clock` is the number of the first
        update, which is passed to `schedule`. All workers call this with equal arguments; the
        servers work on copies.

        Raises PeerLostError if a worker is lost.
        """
        self.backend.barrier()  # which waits for one that is busy; links only for a mini-batch
        rank, place = self.backend.rank, self._place
        parts = divide([weight.nbytes for weight in weights], len(self._servers))
        own, numbers = None, list[int]()
        if place is not None:
            numbers = parts[place]
            server = ParameterServer(
                *_copied(weights, optimizer, numbers), schedule, rule, clock=clock
            )
            own = Service(server, mini_batches if place == 0 else None)
        learner, near = QueueLink.ends(rank)
        served = {pair[0]: link for pair, link in self._links.items() if pair[1] == rank}
        if rank < self.learners:
            served[rank] = near
        with _serving(own, served):
            if rank < self.learners:
                shards = [
                    Shard(self._links.get((rank, server), learner), weights, part)
                    for server, part in zip(self._servers, parts, strict=True)
                ]
                learn(shards, gradient, asks=asks)
        self._share(weights, optimizer, numbers, own)
        return self._collect(own)

    @torch.no_grad()
    def _share(
        self,
        weights: Sequence[Tensor],
        optimizer: Optimizer,
        numbers: Sequence[int],
        own: Service | None,
    ) -> None:
        """Copy the weights and momentum of all servers to every worker.

        One all-reduce; it is exact, because each number is zero on all workers but its server.
        """
        held = [torch.zeros_like(weight) for weight in weights]
        momentum = [torch.zeros_like(weight) for weight in weights]
        flags = weights[0].new_zeros(len(weights))
        if own is not None:
            for number, values in zip(numbers, own.server.weights, strict=True):
                held[number].copy_(values)
                kept = own.server.optimizer.state.get(values, {}).get(MOMENTUM)
                if kept is not None:
                    momentum[number].copy_(kept)
                    flags[number] = 1
        flat = torch.cat([*(each.flatten() for each in (*held, *momentum)), flags])
        self.backend.all_reduce(flat).wait()
        sizes = [weight.numel() for weight in weights]
        *values, found = flat.split([*sizes, *sizes, len(weights)])
        for number, has in enumerate(found.tolist()):  # sync: between updates, when all have ended
            weight = weights[number]
            weight.copy_(values[number].view_as(weight))
            if has:
                kept = values[len(weights) + number].view_as(weight)
                optimizer.state[weight][MOMENTUM] = torch.empty_like(weight).copy_(kept)

    def _collect(self, own: Service | None) -> Record:
        values = None
        if own is not None:
            values = {"arrivals": own.server.arrivals, "updates": own.updates}
        gathered = gather_values(values, self.backend, self.backend.device)
        found = [each for each in gathered if each is not None]
        arrivals = [[Arrival(*one) for one in each["arrivals"]] for each in found]
        return Record([tuple(one) for one in found[0]["updates"]], arrivals)


@contextmanager
def _serving(service: Service | None, links: Mapping[int, Link]) -> Iterator[None]:
    """Serve these learners in threads until each of them has left."""
    if service is None:
        yield
        return
    threads = [
        threading.Thread(target=service.serve, args=pair, daemon=True) for pair in links.items()
    ]
    for thread in threads:
        thread.start()
    try:
        yield
    except PeerLostError as error:
        raise service.failure or error from None
    for thread in threads:
        thread.join()
    if service.failure is not None:
        raise service.failure


def _copied(
    weights: Sequence[Tensor], optimizer: Optimizer, part: Sequence[int]
) -> tuple[list[Tensor], Optimizer]:
    memo: dict[int, Any] = {}
    copied = copy.deepcopy(optimizer, memo)
    copied.zero_grad()
    return [memo[id(weights[number])] for number in part], copied
