"""Services and learners in threads of one process: who waits for whom, and what ends all of them.

The links are queues in the place of Gloo's groups; tests of runs have those.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD

from largebatch.errors import PeerLostError, PeerSilentError
from largebatch.lab.protocols import service as services
from largebatch.lab.protocols.rule import MiniBatches, Rule
from largebatch.lab.protocols.server import ParameterServer
from largebatch.lab.protocols.service import (
    LostLearner,
    Pushed,
    RemoteServer,
    Service,
    Shard,
    learn,
)

FOR_EVER = 60.0
"""Seconds after which a test that hangs fails."""


class QueueLink:
    """One end of a link."""

    peer = 0

    def __init__(self, sent: SimpleQueue[Any], received: SimpleQueue[Any]) -> None:
        self._sent, self._received = sent, received

    def send(self, tensor: Tensor) -> None:
        self._sent.put(tensor.clone())

    def receive(self, into: Tensor) -> None:
        found = self._received.get(timeout=FOR_EVER)
        if found is None:
            self._received.put(None)
            raise PeerLostError("worker 0 lost contact with another worker")
        into.copy_(found)

    def lose(self) -> None:
        """Act as a process that was killed."""
        self._sent.put(None)


def ends() -> tuple[Any, Any]:
    """Return both ends of a link."""
    there: SimpleQueue[Any] = SimpleQueue()
    back: SimpleQueue[Any] = SimpleQueue()
    return QueueLink(there, back), QueueLink(back, there)


def serve(
    rule: Rule,
    updates: range,
    *,
    first: bool = True,
    optional: range = range(0),
    on_loss: Callable[[LostLearner], None] = lambda _: None,
    schedule: Callable[[int], float] = lambda _: 0.5,
) -> Service:
    weights = [torch.zeros(3, dtype=torch.float64, requires_grad=True)]
    server = ParameterServer(weights, SGD(weights), schedule, rule)
    batches = MiniBatches(rule, updates) if first else None
    return Service(server, batches, optional=optional, on_loss=on_loss)


@contextmanager
def learners(
    service: Service,
    compute: Callable[[int, int], float],
    asks: Callable[[], bool] = lambda: False,
) -> Iterator[tuple[list[Any], dict[int, Exception]]]:
    """Run all learners of a service; yield their links and what ended them with an error.

    `compute` gets the learner and its mini-batch and returns the loss; gradients are ones.
    """
    pairs = [ends() for _ in range(service.server.rule.learners)]
    errors: dict[int, Exception] = {}

    def work(learner: int) -> None:
        shard = Shard(RemoteServer(pairs[learner][0]), [0])
        weights = [torch.zeros(3, dtype=torch.float64)]
        try:
            learn(
                [shard],
                weights,
                lambda number: ([torch.ones_like(weights[0])], compute(learner, number)),
                asks=asks,
            )
        except Exception as error:
            errors[learner] = error
            pairs[learner][0].lose()

    threads = [threading.Thread(target=work, args=(n,), daemon=True) for n in range(len(pairs))]
    threads += [
        threading.Thread(target=service.serve, args=(n, pair[1]), daemon=True)
        for n, pair in enumerate(pairs)
    ]
    for thread in threads:
        thread.start()
    yield [pair[0] for pair in pairs], errors
    for thread in threads:
        thread.join(FOR_EVER)
        assert not thread.is_alive()


def test_a_slow_learner_keeps_no_other_one_waiting_where_nobody_has_to() -> None:
    """Learner 0 computes its only mini-batch until all others are done."""
    begun, others = threading.Event(), threading.Event()
    service = serve(Rule(learners=3, gradients=1, waits=False), range(30))

    def compute(learner: int, number: int) -> float:
        if learner == 0:
            begun.set()
            assert others.wait(FOR_EVER)
        assert begun.wait(FOR_EVER)
        if number == 29:
            others.set()
        return 0.0

    with learners(service, compute) as (_, errors):
        pass
    assert not errors
    assert service.server.clock == 30
    assert sorted(one.mini_batch for one in service.server.arrivals) == list(range(30))
    first = next(one for one in service.server.arrivals if one.learner == 0)
    assert first.clock_read == 0
    assert first.staleness == first.update >= 27  # the last ones may come beside it


def test_hardsync_waits_for_the_slowest_in_every_update() -> None:
    service = serve(Rule.hardsync(3), range(5))
    with learners(service, lambda *_: 0.0) as (_, errors):
        pass
    assert not errors
    assert [one.update for one in service.server.arrivals] == [n for n in range(5) for _ in "123"]
    assert {one.staleness for one in service.server.arrivals} == {0}
    torch.testing.assert_close(
        service.server.weights[0].detach(), torch.full((3,), -2.5, dtype=torch.float64)
    )


@pytest.mark.parametrize("waits", [True, False], ids=["hardsync", "softsync"])
def test_a_learner_that_is_lost_ends_all_others_and_none_hangs(*, waits: bool) -> None:
    service = serve(Rule(learners=3, gradients=3, waits=waits), range(1000))

    def compute(learner: int, number: int) -> float:
        if learner == 1 and len(service.server.arrivals) > 6:
            raise DeadError
        return 0.0

    with learners(service, compute) as (_, errors):
        pass
    assert isinstance(errors.pop(1), DeadError)
    assert {type(error) for error in errors.values()} == {PeerLostError}
    assert len(errors) == 2
    assert isinstance(service.failure, PeerLostError)
    assert service.server.clock < 1000


SOFTSYNC = Rule(learners=3, gradients=2, waits=False)


@pytest.mark.parametrize("dies_at", [4, 19], ids=["in the middle", "with the last mini-batch"])
def test_the_others_go_on_without_an_optional_learner_and_compute_what_it_had(
    dies_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where all others had nothing left to do: they wait until it is back or lost."""
    monkeypatch.setattr(services, "PATIENCE", 0.01)
    service = serve(SOFTSYNC, range(10), optional=range(3))
    dead = threading.Event()

    def compute(learner: int, number: int) -> float:
        if number == dies_at and not dead.is_set():
            dead.set()
            time.sleep(0.1)  # in which the others ask again, at the end
            raise DeadError
        return 0.0

    with learners(service, compute) as (_, errors):
        pass
    ((lost, error),) = errors.items()
    assert isinstance(error, DeadError)
    assert service.failure is None
    (loss,) = service.losses
    assert (loss.learner, loss.mini_batch, loss.silent) == (lost, dies_at, False)
    assert service.server.clock == 10
    assert sorted(one.mini_batch for one in service.server.arrivals) == list(range(20))


def test_a_gradient_that_only_one_of_two_servers_has_is_taken_once_by_both() -> None:
    """Learner 1 dies between two pushes; what it had is computed again, and pushed to both."""
    rule = Rule(learners=2, gradients=1, waits=False)
    first = serve(rule, range(4), optional=range(1, 2))
    second = serve(rule, range(4), first=False, optional=range(1, 2))
    weights = torch.zeros(3, dtype=torch.float64)

    def step(learner: int, *servers: Service) -> int | None:
        number = first.pull(learner, weights).mini_batch
        if number is not None:
            for server in servers:
                server.push(learner, Pushed(0, number, 0.0, stop=False), torch.ones_like(weights))
        return number

    assert [step(0, first, second), step(1, first, second), step(1, first)] == [0, 1, 2]
    here, there = ends()
    for service in (first, second):
        here.lose()
        service.serve(1, there)
    assert [loss.mini_batch for loss in first.losses] == [2]
    assert [loss.mini_batch for loss in second.losses] == [None]
    assert [step(0, first, second) for _ in range(3)] == [2, 3, None]
    assert [one.mini_batch for one in first.server.arrivals] == [0, 1, 2, 3]
    assert [one.mini_batch for one in second.server.arrivals] == [0, 1, 2, 3]
    assert [one.learner for one in first.server.arrivals] == [0, 1, 1, 0]
    assert [one.learner for one in second.server.arrivals] == [0, 1, 0, 0]


def test_a_silent_learner_is_lost_as_such_and_one_that_keeps_the_record_ends_all() -> None:
    noted: list[LostLearner] = []
    service = serve(SOFTSYNC, range(10), optional=range(1, 3), on_loss=noted.append)

    class SilentLink(QueueLink):
        def receive(self, into: Tensor) -> None:
            raise PeerSilentError("worker 2 lost contact with another worker (timed out)")

    link: Any = SilentLink(SimpleQueue(), SimpleQueue())
    service.serve(2, link)
    assert service.failure is None
    assert [(loss.learner, loss.silent) for loss in noted] == [(2, True)]
    service.serve(0, link)
    assert isinstance(service.failure, PeerSilentError)
    assert len(service.losses) == 1


class DeadError(Exception):
    """What ends a learner."""


def test_a_failing_server_ends_its_learners() -> None:
    def fail(update: int) -> float:
        if update == 5:
            raise OverflowError("no such update")
        return 0.1

    service = serve(Rule(learners=2, gradients=1, waits=False), range(1000), schedule=fail)
    with learners(service, lambda *_: 0.0) as (_, errors):
        pass
    assert {type(error) for error in errors.values()} == {PeerLostError}
    assert isinstance(service.failure, OverflowError)
    assert service.server.clock == 5


@pytest.mark.parametrize("reason", ["asked", "loss"])
@pytest.mark.parametrize("waits", [True, False], ids=["hardsync", "softsync"])
def test_learners_come_to_rest_after_a_whole_update_when_one_is_asked_to_stop(
    reason: str, *, waits: bool
) -> None:
    """And as soon as a loss is no number."""
    service = serve(Rule(learners=3, gradients=3, waits=waits), range(1000))

    def asks() -> bool:
        return reason == "asked" and service.server.clock >= 4

    def compute(learner: int, number: int) -> float:
        return float("nan") if reason == "loss" and service.server.clock >= 4 else 1.0

    with learners(service, compute, asks=asks) as (_, errors):
        pass
    assert not errors
    clock = service.server.clock
    assert 4 < clock < 1000
    assert len(service.server.arrivals) == 3 * clock
    assert sorted(one.mini_batch for one in service.server.arrivals) == list(range(3 * clock))
