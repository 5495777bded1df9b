"""Makes some updates by a protocol, with every worker as a learner, a server or both.

Before and after, every worker has the same weights and momentum, after the same number of updates.
So a run can be evaluated, saved and resumed between them as usual.
"""

import copy
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from largebatch.distributed.agreement import gather_values
from largebatch.distributed.backend import Backend
from largebatch.lab.protocols.links import Link, open_links
from largebatch.lab.protocols.rule import MiniBatches, Rule
from largebatch.lab.protocols.server import MOMENTUM, Applied, Arrival, ParameterServer, divide
from largebatch.lab.protocols.service import (
    Endpoint,
    Gradient,
    LocalServer,
    RemoteServer,
    Service,
    Shard,
    learn,
)
from largebatch.recipe.protocols import Protocol
from largebatch.schedules.functions import Schedule


class Layout(NamedTuple):
    """The roles of the workers; learners come first."""

    learners: int
    servers: tuple[int, ...]
    """Ranks of the servers."""

    @classmethod
    def of(cls, protocol: Protocol) -> "Layout":
        """Return the layout of a protocol."""
        first = protocol.learners if protocol.dedicated else 0
        return cls(protocol.learners, tuple(range(first, first + protocol.num_servers)))

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """Pairs of a learner and the rank of a server in another process."""
        return [
            (learner, server)
            for learner in range(self.learners)
            for server in self.servers
            if learner != server
        ]


class Record(NamedTuple):
    """The record of some updates, the same on every worker."""

    end: int
    """Number of updates made in all; fewer than requested if a learner was asked to stop."""

    updates: list[tuple[Applied, float]]
    """Updates of the first server, each with its seconds."""

    arrivals: list[list[Arrival]]
    """Gradients by server, in order of arrival."""


@dataclass(frozen=True)
class Exchange:
    """The learners and servers of a run, and the links between them."""

    backend: Backend
    layout: Layout
    links: Mapping[tuple[int, int], Link] = field(repr=False)

    @classmethod
    def open(cls, backend: Backend, protocol: Protocol) -> "Exchange":
        """Connect every learner to every server."""
        layout = Layout.of(protocol)
        return cls(backend, layout, open_links(backend, layout.pairs))

    @property
    def is_learner(self) -> bool:
        """True if this worker computes gradients."""
        return self.backend.rank < self.layout.learners

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
        worker = self.backend.rank
        parts = divide([weight.nbytes for weight in weights], len(self.layout.servers))
        services = {
            server: Service(
                ParameterServer(*_copied(weights, optimizer, part), schedule, rule, clock=clock),
                mini_batches if number == 0 else None,
            )
            for number, (server, part) in enumerate(zip(self.layout.servers, parts, strict=True))
            if server == worker
        }
        with self._serving(services):
            if self.is_learner:
                shards = [
                    Shard(self._endpoint(server, services), part)
                    for server, part in zip(self.layout.servers, parts, strict=True)
                ]
                learn(shards, weights, gradient, asks=asks)
        own = services.get(worker)
        part = dict(zip(self.layout.servers, parts, strict=True)).get(worker, [])
        self._share(weights, optimizer, part, own.server if own else None)
        return self._collect(own, mini_batches)

    def _endpoint(self, server: int, services: Mapping[int, Service]) -> Endpoint:
        if server in services:
            return LocalServer(services[server], self.backend.rank)
        return RemoteServer(self.links[self.backend.rank, server])

    @contextmanager
    def _serving(self, services: Mapping[int, Service]) -> Iterator[None]:
        """Serve the learners of other processes in threads until each of them has left."""
        threads = [
            threading.Thread(target=partial(service.serve, learner, link), daemon=True)
            for service in services.values()
            for (learner, server), link in self.links.items()
            if server == self.backend.rank
        ]
        for thread in threads:
            thread.start()
        yield
        for thread in threads:
            thread.join()
        for service in services.values():
            if service.failure is not None:
                raise service.failure

    @torch.no_grad()
    def _share(
        self,
        weights: Sequence[Tensor],
        optimizer: Optimizer,
        part: Sequence[int],
        server: ParameterServer | None,
    ) -> None:
        """Copy the weights and momentum of all servers to every worker.

        One all-reduce; it is exact, because each number is zero on all workers but its server.
        """
        held = [torch.zeros_like(weight) for weight in weights]
        momentum = [torch.zeros_like(weight) for weight in weights]
        flags = weights[0].new_zeros(len(weights))
        for number, own in zip(part, server.weights if server else (), strict=True):
            held[number].copy_(own)
            assert server is not None
            kept = server.optimizer.state.get(own, {}).get(MOMENTUM)
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

    def _collect(self, own: Service | None, mini_batches: MiniBatches) -> Record:
        own_values: dict[str, Any] = {}
        if own is not None:
            own_values = {
                "server": self.layout.servers.index(self.backend.rank),
                "arrivals": own.server.arrivals,
                "updates": [(one.update, one.lr, seconds) for one, seconds in own.updates],
                "end": mini_batches.end,
            }
        found = sorted(
            (each for each in gather_values(own_values, self.backend, self.backend.device) if each),
            key=lambda one: one["server"],
        )
        arrivals = [[Arrival(*one) for one in each["arrivals"]] for each in found]
        first, by_update = found[0], dict[int, list[Arrival]]()
        for arrival in arrivals[0]:
            by_update.setdefault(arrival.update, []).append(arrival)
        updates = [
            (Applied(update, lr, tuple(by_update[update])), seconds)
            for update, lr, seconds in first["updates"]
        ]
        return Record(first["end"], updates, arrivals)


def _copied(
    weights: Sequence[Tensor], optimizer: Optimizer, part: Sequence[int]
) -> tuple[list[Tensor], Optimizer]:
    memo: dict[int, Any] = {}
    copied = copy.deepcopy(optimizer, memo)
    own = [memo[id(weights[number])] for number in part]
    for group in copied.param_groups:
        for weight in group["params"]:
            weight.grad = None
    return own, copied
