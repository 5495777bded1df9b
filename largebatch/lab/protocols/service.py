"""A parameter server for learners: of its own process by calls, of others over links.

A thread serves each learner, so that a slow or stopped learner does not delay the others. A lock
makes their operations on the server atomic; its order is the order of arrival.
"""

import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from largebatch.errors import PeerLostError
from largebatch.lab.protocols.links import Link
from largebatch.lab.protocols.rule import MiniBatches
from largebatch.lab.protocols.server import Applied, ParameterServer

_PULL, _PUSH, _LEAVE = 0.0, 1.0, 2.0
_NONE, _LOST = -1.0, -2.0
"""Codes in the protocol: no mini-batch (sent in its place); update cannot be completed (in place of
a clock)."""


class Pulled(NamedTuple):
    """The answer of one server to a pull, without the weights."""

    clock: int
    """Number of updates in the weights."""

    mini_batch: int | None
    """Number of the next mini-batch; None if none is left, and from all servers but the first."""


class Pushed(NamedTuple):
    """The values that a learner sends with the gradient."""

    clock: int
    """Clock of the weights that the gradient was computed from."""

    mini_batch: int
    loss: float
    stop: bool
    """True if this learner is asked to stop or to save."""


class Service:
    """A server of this process, for all learners; `mini_batches` only of the first server."""

    def __init__(self, server: ParameterServer, mini_batches: MiniBatches | None) -> None:
        self.server = server
        self.updates: list[tuple[Applied, float]] = []
        """Updates made, each with the seconds since the previous one."""

        self._mini_batches = mini_batches
        self._sizes = [weight.numel() for weight in server.weights]
        self._changed = threading.Condition()
        self.failure: Exception | None = None
        self._pending: dict[int, int] = {}
        self._begun = time.perf_counter()

    def pull(self, learner: int, into: Tensor) -> Pulled:
        """Copy the weights after the last update into a flat tensor."""
        with self._changed:
            self._require_whole()
            batches = self._mini_batches
            found = None if batches is None else batches.next(learner)
            clock, weights = self.server.pull()
            torch.cat([weight.flatten() for weight in weights], out=into)
        return Pulled(clock, found)

    def push(self, learner: int, pushed: Pushed, gradient: Tensor) -> None:
        """Add the gradient, which must not change any more, and make the update it completes."""
        parts = [
            part.view_as(weight)
            for part, weight in zip(gradient.split(self._sizes), self.server.weights, strict=True)
        ]
        with self._changed:
            self._require_whole()
            if self._mini_batches and (pushed.stop or not math.isfinite(pushed.loss)):
                self._mini_batches.stop_early()
            self._pending[learner] = self.server.clock
            applied = self.server.push(
                learner, pushed.clock, parts, mini_batch=pushed.mini_batch, loss=pushed.loss
            )
            if applied is not None:
                seconds = time.perf_counter() - self._begun
                self._begun += seconds
                self.updates.append((applied, seconds))
                self._changed.notify_all()

    def wait(self, learner: int) -> None:
        """Wait for the update if the rule requires it; raise PeerLostError if it cannot be made."""
        if not self.server.rule.waits:
            return
        with self._changed:
            update = self._pending[learner]
            self._changed.wait_for(lambda: self.server.clock > update or self.failure is not None)
            if self.server.clock <= update:
                self._require_whole()

    def serve(self, learner: int, link: Link) -> None:
        """Answer a learner of another process until it leaves or fails."""
        try:
            self._answer(learner, link)
        except Exception as error:  # it ends all that wait, in whatever thread
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """End all learners with the error, so that none waits for an update that is never made."""
        with self._changed:
            self.failure = self.failure or error
            self._changed.notify_all()

    def _require_whole(self) -> None:
        if self.failure is not None:
            raise self.failure

    def _answer(self, learner: int, link: Link) -> None:
        asked = torch.empty(5, dtype=torch.float64)
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
                if kind == _PUSH:
                    pushed = Pushed(int(clock), int(mini_batch), loss, bool(stop))
                    self.push(learner, pushed, gradient)
                    self.wait(learner)
                    answer = [0.0, _NONE]
                else:
                    found = self.pull(learner, weights)
                    number = _NONE if found.mini_batch is None else float(found.mini_batch)
                    answer = [float(found.clock), number]
            except Exception as error:
                self.fail(error)
                link.send(torch.tensor([_LOST, _NONE], dtype=torch.float64))
                raise
            link.send(torch.tensor(answer, dtype=torch.float64))
            if kind == _PULL:
                link.send(weights)


class LocalServer:
    """A server of this process as a learner uses it; the methods are those of RemoteServer."""

    def __init__(self, service: Service, learner: int) -> None:
        self._service, self._learner = service, learner

    def begin_pull(self) -> None:
        """Do nothing: the weights are here."""

    def finish_pull(self, into: Tensor) -> Pulled:
        """Copy the weights."""
        return self._service.pull(self._learner, into)

    def begin_push(self, pushed: Pushed, gradient: Tensor) -> None:
        """Pass a gradient to the server."""
        self._service.push(self._learner, pushed, gradient)

    def finish_push(self) -> None:
        """Wait for the update if the rule requires it."""
        self._service.wait(self._learner)

    def leave(self) -> None:
        """Do nothing: no thread serves this learner."""


class RemoteServer:
    """A server of another process as a learner uses it, over a link.

    `begin_*` sends, `finish_*` waits for the answer.
    """

    def __init__(self, link: Link) -> None:
        self._link = link

    def begin_pull(self) -> None:
        """Request the weights."""
        self._ask([_PULL, 0, 0, 0, 0])

    def finish_pull(self, into: Tensor) -> Pulled:
        """Write the weights of the server's tensors, one after the other, into a flat tensor."""
        clock, number = self._answer()
        self._link.receive(into)
        return Pulled(int(clock), None if number == _NONE else int(number))

    def begin_push(self, pushed: Pushed, gradient: Tensor) -> None:
        """Send a gradient, in the layout of the weights."""
        self._ask([_PUSH, *map(float, pushed)])
        self._link.send(gradient)

    def finish_push(self) -> None:
        """Wait until it was received or, if learners wait by the rule, for its update."""
        self._answer()

    def leave(self) -> None:
        """Announce that this learner sends nothing more; the server's thread for it ends."""
        self._ask([_LEAVE, 0, 0, 0, 0])

    def _ask(self, numbers: Sequence[float]) -> None:
        self._link.send(torch.tensor(numbers, dtype=torch.float64))

    def _answer(self) -> list[float]:
        answer = torch.empty(2, dtype=torch.float64)
        self._link.receive(answer)
        if answer[0] == _LOST:
            raise PeerLostError(
                f"worker {self._link.peer}, a parameter server, lost contact with a learner"
            )
        numbers: list[float] = answer.tolist()
        return numbers


Endpoint = LocalServer | RemoteServer


Gradient = Callable[[int], tuple[Sequence[Tensor], float]]
"""Maps a mini-batch to its mean gradient, one tensor for each weight, and its mean loss."""


class Shard(NamedTuple):
    """One server, and the numbers of its weights."""

    server: Endpoint
    numbers: Sequence[int]


def learn(
    shards: Sequence[Shard],
    weights: Sequence[Tensor],
    gradient: Gradient,
    *,
    asks: Callable[[], bool] = lambda: False,
) -> None:
    """Run a learner until the first server has no mini-batch left.

    `weights` hold the values read last; `asks` returns True if this worker is asked to stop. Raises
    PeerLostError if a server, or a learner that an update waits for, is lost.
    """
    flat = [
        weights[shard.numbers[0]].new_empty(sum(weights[n].numel() for n in shard.numbers))
        for shard in shards
    ]
    while True:
        clocks, number = _pull(shards, flat)
        if number is None:
            break
        for shard, values in zip(shards, flat, strict=True):
            _unpack(values, [weights[n] for n in shard.numbers])
        found, loss = gradient(number)
        stop = asks()
        for shard, clock in zip(shards, clocks, strict=True):
            packed = torch.cat([found[n].flatten() for n in shard.numbers])
            shard.server.begin_push(Pushed(clock, number, loss, stop), packed)
        for shard in shards:
            shard.server.finish_push()
    for shard in shards:
        shard.server.leave()


def _pull(shards: Sequence[Shard], flat: Sequence[Tensor]) -> tuple[list[int], int | None]:
    """Read from all servers, first from the one that hands out mini-batches."""
    shards[0].server.begin_pull()
    first = shards[0].server.finish_pull(flat[0])
    clocks = [first.clock]
    if first.mini_batch is None:
        return clocks, None
    for shard in shards[1:]:
        shard.server.begin_pull()
    for shard, values in zip(shards[1:], flat[1:], strict=True):
        clocks.append(shard.server.finish_pull(values).clock)
    return clocks, first.mini_batch


@torch.no_grad()
def _unpack(values: Tensor, weights: Sequence[Tensor]) -> None:
    for part, weight in zip(values.split([w.numel() for w in weights]), weights, strict=True):
        weight.copy_(part.view_as(weight))
