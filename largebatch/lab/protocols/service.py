"""A parameter server for learners: of its own process by calls, of others over links.

A thread serves each learner, so that a slow or stopped learner does not delay the others. A lock
makes their operations on the server atomic; its order is the order of arrival.
"""

import math
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from largebatch.errors import PeerLostError, PeerSilentError
from largebatch.lab.protocols.links import Link
from largebatch.lab.protocols.rule import MiniBatches
from largebatch.lab.protocols.server import Applied, ParameterServer

PATIENCE = 1.0
"""Seconds after which a learner without a mini-batch gets an answer and repeats its request."""

_PULL, _PUSH, _LEAVE = 0.0, 1.0, 2.0
_NONE, _LOST, _LATER = -1.0, -2.0, -3.0
"""Codes in the protocol: no mini-batch (sent in its place); update cannot be completed (in place of
a clock); perhaps a mini-batch later (in its place)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LostLearner:
    """A learner that failed and without which the run continues."""

    learner: int
    update: int
    """Number of updates made until then, by the server that noted the loss."""

    mini_batch: int | None
    """Number of its last mini-batch, which was handed out again. None if it had none, and from all
    servers but the first."""

    silent: bool
    """True if it did nothing for the whole of --timeout; else its process was gone."""


class Pulled(NamedTuple):
    """The answer of one server to a pull, without the weights."""

    clock: int
    """Number of updates in the weights."""

    mini_batch: int | None
    """Number of the next mini-batch; None if none is left, and from all servers but the first."""

    later: bool = False
    """True if another learner's mini-batch may come back, so that the learner should ask again."""


class Pushed(NamedTuple):
    """The values that a learner sends with the gradient."""

    clock: int
    """Clock of the weights that the gradient was computed from."""

    mini_batch: int
    loss: float
    stop: bool
    """True if this learner is asked to stop or to save."""


class Service:
    """A server of this process, for all learners.

    Each of the `optional` learners may be lost: the others continue, its mini-batch is handed out
    again, and `on_loss` is called from the thread that served it. This server ignores a gradient
    that it already has, because only another server may have missed it.
    """

    def __init__(
        self,
        server: ParameterServer,
        mini_batches: MiniBatches | None,
        *,
        optional: Collection[int] = (),
        on_loss: Callable[[LostLearner], None] = lambda _: None,
    ) -> None:
        self.server = server
        self.losses: list[LostLearner] = []
        self.updates: list[tuple[Applied, float]] = []
        """Updates made, each with the seconds since the previous one."""

        self._mini_batches = mini_batches
        """Mini-batches that the first server hands out."""

        self._optional, self._on_loss = optional, on_loss
        self._taken: set[int] = set()
        self._sizes = [weight.numel() for weight in server.weights]
        self._changed = threading.Condition()
        self.failure: Exception | None = None
        self._pending: dict[int, int] = {}
        self._begun = time.perf_counter()

    def pull(self, learner: int, into: Tensor) -> Pulled:
        """Copy the weights after the last update into a flat tensor."""
        with self._changed:
            found, later = self._next(learner)
            clock, weights = self.server.pull()
            torch.cat([weight.flatten() for weight in weights], out=into)
        return Pulled(clock, found, later)

    def _next(self, learner: int) -> tuple[int | None, bool]:
        """Return the next mini-batch of a learner, and True if there is none but may be one later.

        Waits up to PATIENCE while other learners may be lost and leave theirs.
        """
        self._require_whole()
        batches = self._mini_batches
        if batches is None:
            return None, False
        found = batches.next(learner)
        if found is not None or not self._optional:
            return found, False
        self._changed.notify_all()  # this one has pushed all that it was given
        known = len(self.losses)
        self._changed.wait_for(
            lambda: len(self.losses) > known or self.failure or not batches.under_way, PATIENCE
        )
        self._require_whole()
        found = batches.next(learner)
        return found, found is None and batches.under_way

    def push(self, learner: int, pushed: Pushed, gradient: Tensor) -> None:
        """Add the gradient, which must not change any more, and make the update it completes."""
        parts = [
            part.view_as(weight)
            for part, weight in zip(gradient.split(self._sizes), self.server.weights, strict=True)
        ]
        with self._changed:
            self._require_whole()
            if self._optional:
                if pushed.mini_batch in self._taken:
                    return
                self._taken.add(pushed.mini_batch)
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
            if learner in self._optional and isinstance(error, PeerLostError) and not self.failure:
                self._continue_without(learner, silent=isinstance(error, PeerSilentError))
            else:
                self.fail(error)

    def _continue_without(self, learner: int, *, silent: bool) -> None:
        with self._changed:
            back = self._mini_batches.take_back(learner) if self._mini_batches else None
            loss = LostLearner(
                learner=learner, update=self.server.clock, mini_batch=back, silent=silent
            )
            self.losses.append(loss)
            self._changed.notify_all()
        try:
            self._on_loss(loss)
        except PeerLostError as error:  # none that can be reached knows of it
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
                    answer = [float(found.clock), _LATER if found.later else number]
            except Exception as error:
                self.fail(error)  # before the learner can be lost, which would be no failure
                link.send(torch.tensor([_LOST, _NONE], dtype=torch.float64))
                raise
            link.send(torch.tensor(answer, dtype=torch.float64))
            if kind == _PULL and answer[1] != _LATER:
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
        """Write the weights of the server's tensors, one after the other, into a flat tensor.

        The tensor may stay unchanged if there is nothing to compute yet.
        """
        clock, number = self._answer()
        if number == _LATER:
            return Pulled(int(clock), None, later=True)
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
        clocks, (_, number, later) = _pull(shards, flat)
        if later:
            continue
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


def _pull(shards: Sequence[Shard], flat: Sequence[Tensor]) -> tuple[list[int], Pulled]:
    """Read from all servers, first from the one that hands out mini-batches.

    The others are read even if there is none yet, because they take silence for a loss.
    """
    clocks: list[int] = []
    shards[0].server.begin_pull()
    first = shards[0].server.finish_pull(flat[0])
    if first.mini_batch is None and not first.later:
        return clocks, first
    for shard in shards[1:]:
        shard.server.begin_pull()
    for shard, values in zip(shards[1:], flat[1:], strict=True):
        clocks.append(shard.server.finish_pull(values).clock)
    return [first.clock, *clocks], first


@torch.no_grad()
def _unpack(values: Tensor, weights: Sequence[Tensor]) -> None:
    for part, weight in zip(values.split([w.numel() for w in weights]), weights, strict=True):
        weight.copy_(part.view_as(weight))
