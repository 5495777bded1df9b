"""Learners and parameter servers of a run: the links between them, and their work over these.

Every worker is a learner, a server or both. Before and after some updates every worker has the same
weights and momentum, after the same number of updates, so a run can be evaluated, saved and resumed
between them as usual.

A thread of a server's process serves each learner, so that a slow or stopped learner does not
delay the others. A lock makes their operations on the server atomic; its order is the order of
arrival.

A group of torch.distributed is for one thread at a time, and all its operations fail when one
member dies. With a group for each pair of workers, threads of one worker talk to different workers
at the same time, and the loss of a worker is detected immediately, and only by its peers. The
groups use Gloo: GPU tensors are copied through the host's memory.
"""

import copy
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from queue import SimpleQueue
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from largebatch.distributed.agreement import gather_values
from largebatch.distributed.backend import Backend
from largebatch.distributed.torch_distributed import RunningTorch, lost_peers_named
from largebatch.errors import BackendError, PeerLostError
from largebatch.lab.protocols.server import (
    MOMENTUM,
    Arrival,
    MiniBatches,
    ParameterServer,
    UpdateRule,
    divide,
)
from largebatch.schedules.functions import Schedule


class GroupLink:
    """A connection to one other worker. Each end must be used by one thread at a time."""

    def __init__(self, group: dist.ProcessGroup, *, peer: int) -> None:
        self.peer = peer
        """Rank of the other worker."""

        self._group = group
        self._own = dist.get_rank()

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
        there = SimpleQueue[Tensor]()
        back = SimpleQueue[Tensor]()
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


_PULL, _PUSH, _LEAVE = 0.0, 1.0, 2.0
_NONE, _LOST = -1.0, -2.0
"""Codes in the protocol: no mini-batch (sent in its place); update cannot be completed (in place of
a clock)."""


class Service:
    """A server of this process, for all learners; `mini_batches` only of the first server."""

    def __init__(self, server: ParameterServer, mini_batches: MiniBatches | None) -> None:
        self.server = server
        self.updates: list[tuple[int, float, float]] = []
        """Numbers, learning rates, and seconds since the previous update, of the updates made."""

        self.failure: Exception | None = None
        self._mini_batches = mini_batches
        self._sizes = [weight.numel() for weight in server.weights]
        self._changed = threading.Condition()
        self._begun = time.perf_counter()

    @contextmanager
    def serving(self, links: Mapping[int, Link]) -> Iterator[None]:
        """Serve these learners in threads until each of them has left."""
        threads = [
            threading.Thread(target=self.serve, args=pair, daemon=True) for pair in links.items()
        ]
        for thread in threads:
            thread.start()
        try:
            yield
        except PeerLostError as error:
            raise self.failure or error from None
        for thread in threads:
            # Without an error all learners leave by themselves, after their last gradient.
            thread.join()
        self._require_whole()

    def serve(self, learner: int, link: Link) -> None:
        """Answer a learner until it leaves or fails."""
        try:
            self._answer(learner, link)
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        """End all learners, so that none waits for an update that is never made."""
        with self._changed:
            self.failure = self.failure or error
            self._changed.notify_all()

    def _answer(self, learner: int, link: Link) -> None:
        # One message of fixed size for all requests. Float64 holds counters up to 2^53 exactly.
        asked = torch.empty(5, dtype=torch.float64)
        # One buffer for each learner, which is sent outside of the lock while others change the
        # weights.
        weights = self.server.weights[0].new_empty(sum(self._sizes))
        while True:
            link.receive(asked)
            kind, clock, mini_batch, loss, stop = asked.tolist()
            if kind == _LEAVE:
                return
            gradient = torch.empty_like(weights)
            if kind == _PUSH:
                link.receive(gradient)
            try:
                with self._changed:
                    self._require_whole()
                    if kind == _PUSH:
                        # No further mini-batch begins an update, but those that are begun end: all
                        # learners come to rest after the same one.
                        if self._mini_batches and (stop or not math.isfinite(loss)):
                            self._mini_batches.stop_early()
                        self._push(learner, int(clock), gradient, int(mini_batch), loss)
                        answer = [0.0, _NONE]
                    else:
                        answer = self._pull(learner, weights)
            except Exception as error:
                self._fail(error)
                # The learner waits for an answer, and would wait for the full timeout without one.
                link.send(torch.tensor([_LOST, _NONE], dtype=torch.float64))
                raise
            link.send(torch.tensor(answer, dtype=torch.float64))
            if kind == _PULL:
                link.send(weights)

    def _pull(self, learner: int, into: Tensor) -> list[float]:
        number = None if self._mini_batches is None else self._mini_batches.next(learner)
        clock, weights = self.server.pull()
        torch.cat([weight.flatten() for weight in weights], out=into)
        return [float(clock), _NONE if number is None else float(number)]

    def _push(
        self, learner: int, clock: int, gradient: Tensor, mini_batch: int, loss: float
    ) -> None:
        parts = [
            part.view_as(weight)
            for part, weight in zip(gradient.split(self._sizes), self.server.weights, strict=True)
        ]
        update = self.server.clock
        lr = self.server.push(learner, clock, parts, mini_batch=mini_batch, loss=loss)
        if lr is not None:
            seconds = time.perf_counter() - self._begun
            self._begun += seconds
            self.updates.append((update, lr, seconds))
            self._changed.notify_all()
        elif self.server.rule.waits:
            # Releases the lock, so that the other gradients of the update can arrive.
            self._changed.wait_for(lambda: self.server.clock > update or self.failure is not None)
            if self.server.clock <= update:
                self._require_whole()

    def _require_whole(self) -> None:
        if self.failure is not None:
            raise self.failure


class Shard:
    """One server over a link, and its part of a learner's weights, by their numbers.

    `ask` and `push` send, `finish_*` waits for the answer.
    """

    def __init__(self, link: Link, weights: Sequence[Tensor], numbers: Sequence[int]) -> None:
        self._link = link
        self._numbers = numbers
        self._weights = [weights[number] for number in numbers]
        self._sizes = [weight.numel() for weight in self._weights]
        self._flat = weights[0].new_empty(sum(self._sizes))
        self._clock = 0.0

    @torch.no_grad()
    def finish_pull(self) -> int | None:
        """Copy the server's weights to the learner's; return the number of the next mini-batch.

        It is None if none is left, and from all servers but the first.
        """
        self._clock, number = self.answer()
        self._link.receive(self._flat)
        for part, weight in zip(self._flat.split(self._sizes), self._weights, strict=True):
            weight.copy_(part.view_as(weight))
        return None if number == _NONE else int(number)

    def push(self, gradient: Sequence[Tensor], *, mini_batch: int, loss: float, stop: bool) -> None:
        """Send the server's part of a gradient; `stop` is True to stop or to save."""
        self.ask(_PUSH, self._clock, mini_batch, loss, stop)
        self._link.send(torch.cat([gradient[number].flatten() for number in self._numbers]))

    def ask(
        self, kind: float, clock: float = 0, mini_batch: float = 0, loss: float = 0, stop: float = 0
    ) -> None:
        """Request the weights, announce a gradient, or end the server's thread for this learner."""
        self._link.send(torch.tensor([kind, clock, mini_batch, loss, stop], dtype=torch.float64))

    def answer(self) -> list[float]:
        """Wait until a gradient was received or, if learners wait by the rule, for its update."""
        answer = torch.empty(2, dtype=torch.float64)
        self._link.receive(answer)
        if answer[0] == _LOST:
            raise PeerLostError(
                f"worker {self._link.peer}, a parameter server, lost contact with a learner"
            )
        numbers: list[float] = answer.tolist()
        return numbers


Gradient = Callable[[int], tuple[Sequence[Tensor], float]]
"""Maps a mini-batch to its mean gradient, one tensor for each weight, and its mean loss."""


def learn(
    shards: Sequence[Shard], gradient: Gradient, *, asks: Callable[[], bool] = lambda: False
) -> None:
    """Run a learner until the first server has no mini-batch left.

    `asks` returns True if this worker is asked to stop. Raises PeerLostError if a server, or a
    learner that an update waits for, is lost.
    """
    first, *others = shards
    while True:
        first.ask(_PULL)
        # The first server hands out mini-batches, so the others are asked after it: a learner that
        # has none left pulls nothing.
        number = first.finish_pull()
        if number is None:
            break
        # All requests before the first wait, so that the servers work at the same time.
        for shard in others:
            shard.ask(_PULL)
        for shard in others:
            shard.finish_pull()
        tensors, loss = gradient(number)
        stop = asks()
        for shard in shards:
            shard.push(tensors, mini_batch=number, loss=loss, stop=stop)
        for shard in shards:
            shard.answer()
    for shard in shards:
        shard.ask(_LEAVE)


class ExchangeRecord(NamedTuple):
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
        self.backend = backend
        self.learners = learners
        self._servers = servers
        pairs = [
            (learner, server)
            for learner in range(learners)
            for server in servers
            if learner != server
        ]
        self._links = open_links(backend, pairs)

    def run(  # noqa: PLR0913 -- what is updated, how, how often, and from what
        self,
        weights: Sequence[Tensor],
        optimizer: Optimizer,
        schedule: Schedule,
        rule: UpdateRule,
        mini_batches: MiniBatches,
        *,
        clock: int,
        gradient: Gradient,
        asks: Callable[[], bool] = lambda: False,
    ) -> ExchangeRecord:
        """Train on the mini-batches; change `weights` and the momentum of `optimizer` in place.

        `optimizer` holds these weights and perhaps others. `clock` is the number of the first
        update, which is passed to `schedule`. All workers call this with equal arguments; the
        servers work on copies.

        Raises PeerLostError if a worker is lost.
        """
        self.backend.barrier()  # which waits for one that is busy; links only for a mini-batch
        rank = self.backend.rank
        # Computed alike on every worker, so it need not be sent.
        parts = divide([weight.nbytes for weight in weights], len(self._servers))
        service = None
        numbers = list[int]()
        if rank in self._servers:
            place = self._servers.index(rank)
            numbers = parts[place]
            # A server must not change the weights that its own process learns with.
            memo: dict[int, Any] = {}  # of copies, by the identity of what they copy
            copied = copy.deepcopy(optimizer, memo)
            copied.zero_grad()
            held = [memo[id(weights[number])] for number in numbers]
            server = ParameterServer(held, copied, schedule, rule, clock=clock)
            service = Service(server, mini_batches if place == 0 else None)
        learner, near = QueueLink.ends(rank)
        # A worker that is both has no group with itself: its two threads talk over queues.
        served = {pair[0]: link for pair, link in self._links.items() if pair[1] == rank}
        if rank < self.learners:
            served[rank] = near
        with service.serving(served) if service else nullcontext():
            if rank < self.learners:
                shards = [
                    Shard(self._links.get((rank, server), learner), weights, part)
                    for server, part in zip(self._servers, parts, strict=True)
                ]
                learn(shards, gradient, asks=asks)
        self._share(weights, optimizer, numbers, service)
        return self._collect(service)

    @torch.no_grad()
    def _share(
        self,
        weights: Sequence[Tensor],
        optimizer: Optimizer,
        numbers: Sequence[int],
        service: Service | None,
    ) -> None:
        """Copy the weights and momentum of all servers to every worker.

        One all-reduce; it is exact, because each number is zero on all workers but its server.
        """
        held = [torch.zeros_like(weight) for weight in weights]
        momentum = [torch.zeros_like(weight) for weight in weights]
        # Momentum is absent before the first update. Zeros would not be the same for an optimizer
        # that sets it to the first gradient.
        flags = weights[0].new_zeros(len(weights))
        if service is not None:
            for number, values in zip(numbers, service.server.weights, strict=True):
                held[number].copy_(values)
                buffer = service.server.optimizer.state.get(values, {}).get(MOMENTUM)
                if buffer is not None:
                    momentum[number].copy_(buffer)
                    flags[number] = 1
        flat = torch.cat([*(tensor.flatten() for tensor in (*held, *momentum)), flags])
        self.backend.all_reduce(flat).wait()
        sizes = [weight.numel() for weight in weights]
        *values, has_momentum = flat.split([*sizes, *sizes, len(weights)])
        flags_of_weights = has_momentum.tolist()  # sync: between updates, when all have ended
        for number, has in enumerate(flags_of_weights):
            weight = weights[number]
            weight.copy_(values[number].view_as(weight))
            if has:
                buffer = values[len(weights) + number].view_as(weight)
                optimizer.state[weight][MOMENTUM] = torch.empty_like(weight).copy_(buffer)

    def _collect(self, service: Service | None) -> ExchangeRecord:
        values = None
        if service is not None:
            values = {"arrivals": service.server.arrivals, "updates": service.updates}
        gathered = gather_values(values, self.backend, self.backend.device)
        records = [record for record in gathered if record is not None]
        arrivals = [[Arrival(*fields) for fields in record["arrivals"]] for record in records]
        return ExchangeRecord([tuple(fields) for fields in records[0]["updates"]], arrivals)
