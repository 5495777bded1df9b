"""A parameter server and its learners, which exchange messages over links.

A thread of the server's process serves each learner, so that a slow or stopped learner does not
delay the others. A lock makes their operations on the server atomic; its order is the order of
arrival.
"""

import math
import threading
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from largebatch.errors import PeerLostError
from largebatch.lab.protocols.links import Link
from largebatch.lab.protocols.rule import MiniBatches
from largebatch.lab.protocols.server import ParameterServer

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
                with self._changed:
                    self._require_whole()
                    if kind == _PUSH:
                        if self._mini_batches and (stop or not math.isfinite(loss)):
                            self._mini_batches.stop_early()
                        self._push(learner, int(clock), gradient, int(mini_batch), loss)
                        answer = [0.0, _NONE]
                    else:
                        answer = self._pull(learner, weights)
            except Exception as error:
                self._fail(error)
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
        """Add the gradient, and wait for its update if the rule requires it."""
        parts = [
            part.view_as(weight)
            for part, weight in zip(gradient.split(self._sizes), self.server.weights, strict=True)
        ]
        update = self.server.clock
        applied = self.server.push(learner, clock, parts, mini_batch=mini_batch, loss=loss)
        if applied is not None:
            seconds = time.perf_counter() - self._begun
            self._begun += seconds
            self.updates.append((applied.update, applied.lr, seconds))
            self._changed.notify_all()
        elif self.server.rule.waits:
            self._changed.wait_for(lambda: self.server.clock > update or self.failure is not None)
            if self.server.clock <= update:
                self._require_whole()

    def _require_whole(self) -> None:
        if self.failure is not None:
            raise self.failure


class Shard:
    """One server over a link, and its part of a learner's weights, by their numbers.

    `begin_*` sends, `finish_*` waits for the answer.
    """

    def __init__(self, link: Link, weights: Sequence[Tensor], numbers: Sequence[int]) -> None:
        self._link, self._numbers = link, numbers
        self._weights = [weights[number] for number in numbers]
        self._sizes = [weight.numel() for weight in self._weights]
        self._flat = weights[0].new_empty(sum(self._sizes))
        self._clock = 0.0

    def begin_pull(self) -> None:
        """Request the weights."""
        self._ask(_PULL)

    @torch.no_grad()
    def finish_pull(self) -> int | None:
        """Copy the server's weights to the learner's; return the number of the next mini-batch.

        It is None if none is left, and from all servers but the first.
        """
        self._clock, number = self._answer()
        self._link.receive(self._flat)
        for part, weight in zip(self._flat.split(self._sizes), self._weights, strict=True):
            weight.copy_(part.view_as(weight))
        return None if number == _NONE else int(number)

    def begin_push(
        self, gradient: Sequence[Tensor], *, mini_batch: int, loss: float, stop: bool
    ) -> None:
        """Send the server's part of a gradient; `stop` is True to stop or to save."""
        self._ask(_PUSH, self._clock, mini_batch, loss, stop)
        self._link.send(torch.cat([gradient[number].flatten() for number in self._numbers]))

    def finish_push(self) -> None:
        """Wait until it was received or, if learners wait by the rule, for its update."""
        self._answer()

    def leave(self) -> None:
        """Announce that this learner sends nothing more; the server's thread for it ends."""
        self._ask(_LEAVE)

    def _ask(
        self, kind: float, clock: float = 0, mini_batch: float = 0, loss: float = 0, stop: float = 0
    ) -> None:
        self._link.send(torch.tensor([kind, clock, mini_batch, loss, stop], dtype=torch.float64))

    def _answer(self) -> list[float]:
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
        first.begin_pull()
        number = first.finish_pull()
        if number is None:
            break
        for shard in others:
            shard.begin_pull()
        for shard in others:
            shard.finish_pull()
        found, loss = gradient(number)
        stop = asks()
        for shard in shards:
            shard.begin_push(found, mini_batch=number, loss=loss, stop=stop)
        for shard in shards:
            shard.finish_push()
    for shard in shards:
        shard.leave()
