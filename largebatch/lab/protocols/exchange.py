"""Makes some updates by a protocol, with every worker as a learner, a server or both.

Before and after, every worker has the same weights and momentum, after the same number of updates.
So a run can be evaluated, saved and resumed between them as usual.
"""

import copy
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from functools import cached_property, partial
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import DistError, PrefixStore  # type: ignore[attr-defined]  # torch's stubs
from torch.distributed.distributed_c10d import Store
from torch.optim import Optimizer

from largebatch.distributed.agreement import gather_values
from largebatch.distributed.backend import Backend
from largebatch.distributed.environment import DROPPED
from largebatch.distributed.torch_distributed import TorchDistributed, lost_peers_named
from largebatch.errors import PeerLostError
from largebatch.lab.protocols.links import Link, open_links
from largebatch.lab.protocols.rule import MiniBatches, Rule
from largebatch.lab.protocols.server import (
    MOMENTUM,
    Applied,
    Arrival,
    ParameterServer,
    divide,
)
from largebatch.lab.protocols.service import (
    Endpoint,
    Gradient,
    LocalServer,
    LostLearner,
    RemoteServer,
    Service,
    Shard,
    learn,
)
from largebatch.recipe.protocols import Protocol
from largebatch.schedules.functions import Schedule


class DroppedWorkers:
    """The notes of dropped workers in a store."""

    def __init__(self, store: Store) -> None:
        self._store = PrefixStore(DROPPED, store)
        self._rounds = count()

    def add(self, worker: int) -> None:
        """Record that the run continues without a worker, from the next `agree` on."""
        self._store.append("all", f"{worker} ")  # type: ignore[attr-defined]  # torch's stubs
        self._store.set(str(worker), "")

    def include(self, worker: int) -> bool:
        """Return True if a worker was dropped; False if the store is out of reach."""
        with suppress(DistError):
            return bool(self._store.check([str(worker)]))
        return False

    def agree(
        self, of: Collection[int], *, own: int, witnesses: Sequence[int], limit: timedelta
    ) -> set[int]:
        """Return which of these workers are dropped, the same set on every worker that calls this.

        The witnesses, who add workers, call it when they will add no more; all others wait for
        them. Every worker calls it equally often. Raises DistError after the limit.
        """
        number = next(self._rounds)
        ready = [f"{number} {witness}" for witness in witnesses]
        if own in witnesses:
            self._store.set(f"{number} {own}", "")
        self._store.wait(ready, limit)
        noted = self._store.get("all") if self._store.check(["all"]) else b""
        return {int(worker) for worker in noted.split()} & set(of)


_LATER = timedelta(minutes=1)
"""Additional wait for the servers, which themselves wait for a learner that is silent."""


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
    optional: Collection[int] = ()
    """Learners without which the run continues if they fail and the backend is TorchDistributed; no
    server is in their processes."""

    lost: set[int] = field(default_factory=set)
    """Learners lost so far; the ranks of the others are those of a backend without them."""

    losses: list[LostLearner] = field(default_factory=list)
    """Losses of learners as the first server saw them, or the only one that saw them."""

    @classmethod
    def open(cls, backend: Backend, protocol: Protocol) -> "Exchange":
        """Connect every learner to every server."""
        layout = Layout.of(protocol)
        return cls(backend, layout, open_links(backend, layout.pairs))

    @property
    def worker(self) -> int:
        """Number of this worker, which is its rank as long as none is lost."""
        begun = range(self.backend.world_size + len(self.lost))
        return [worker for worker in begun if worker not in self.lost][self.backend.rank]

    @property
    def is_learner(self) -> bool:
        """True if this worker computes gradients."""
        return self.worker < self.layout.learners

    @property
    def learners(self) -> int:
        """Number of learners that remain."""
        return self.layout.learners - len(self.lost)

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

        Raises PeerLostError if a required worker is lost, or if the others continue without this
        one.
        """
        optional = self.optional if self._dropped is not None else ()
        self.backend.barrier()  # which waits for one that is busy; links only for a mini-batch
        worker = self.worker
        parts = divide([weight.nbytes for weight in weights], len(self.layout.servers))
        services = {
            server: Service(
                ParameterServer(*_copied(weights, optimizer, part), schedule, rule, clock=clock),
                mini_batches if number == 0 else None,
                optional=optional,
                on_loss=self._note,
            )
            for number, (server, part) in enumerate(zip(self.layout.servers, parts, strict=True))
            if server == worker
        }
        with self._refused_if_lost(), self._serving(services):
            if self.is_learner:
                shards = [
                    Shard(self._endpoint(server, services), part)
                    for server, part in zip(self.layout.servers, parts, strict=True)
                ]
                learn(shards, weights, gradient, asks=asks)
        self._leave_the_lost()
        own = services.get(worker)
        part = dict(zip(self.layout.servers, parts, strict=True)).get(worker, [])
        self._share(weights, optimizer, part, own.server if own else None)
        return self._collect(own, mini_batches)

    def _endpoint(self, server: int, services: Mapping[int, Service]) -> Endpoint:
        if server in services:
            return LocalServer(services[server], self.worker)
        return RemoteServer(self.links[self.worker, server])

    @cached_property
    def _dropped(self) -> DroppedWorkers | None:
        """Notes of the learners that the others continue without; None if all are required."""
        if self.optional and isinstance(self.backend, TorchDistributed):
            return DroppedWorkers(self.backend.store)
        return None

    def _note(self, loss: LostLearner) -> None:
        assert self._dropped is not None
        with lost_peers_named(self.worker):
            self._dropped.add(loss.learner)

    @contextmanager
    def _refused_if_lost(self) -> Iterator[None]:
        try:
            yield
        except PeerLostError as error:
            if self._dropped is not None and self._dropped.include(self.worker):
                raise PeerLostError(_refusal(self.worker)) from error
            raise

    def _leave_the_lost(self) -> None:
        if self._dropped is None:
            return
        assert isinstance(self.backend, TorchDistributed)
        worker, left = self.worker, set(self.optional) - self.lost
        limit = self.backend.timeout + _LATER
        with lost_peers_named(worker):
            lost = self._dropped.agree(left, own=worker, witnesses=self.layout.servers, limit=limit)
        if worker in lost:
            raise PeerLostError(_refusal(worker))
        if lost:
            self.backend.leave_out(lost)
        self.lost.update(lost)

    @contextmanager
    def _serving(self, services: Mapping[int, Service]) -> Iterator[None]:
        """Serve the learners of other processes in threads until each of them has left."""
        threads = [
            threading.Thread(target=partial(service.serve, learner, link), daemon=True)
            for service in services.values()
            for (learner, server), link in self.links.items()
            if server == self.worker and learner not in self.lost
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
                "server": self.layout.servers.index(self.worker),
                "arrivals": own.server.arrivals,
                "losses": [asdict(loss) for loss in own.losses],
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
        for loss in (LostLearner(**one) for each in found for one in each["losses"]):
            if loss.learner not in {known.learner for known in self.losses}:
                self.losses.append(loss)
        return Record(first["end"], updates, arrivals)


def _refusal(worker: int) -> str:
    return (
        f"worker {worker}, a learner, did nothing for the whole of --timeout, and was given up; to "
        "have it back, stop the run and resume with --resume"
    )


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
