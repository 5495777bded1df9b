"""Services and learners in threads: who waits for whom, and what ends all, and also processes.

The links are queues, as between a learner and a server of one process; tests of runs have Gloo's.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from on_forked_workers import SERVER, environment_of
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch's stubs
from torch.optim import SGD

from largebatch.distributed.connection import connect
from largebatch.errors import PeerLostError
from largebatch.lab.protocols.exchange import Exchange, QueueLink, Service, Shard, learn
from largebatch.lab.protocols.server import MiniBatches, ParameterServer, UpdateRule

FOR_EVER = 60.0
"""Seconds after which a test that hangs fails."""


class Fragile(QueueLink):
    """One end of a link that may be lost."""

    def receive(self, into: Tensor) -> None:
        try:
            super().receive(into)
        except TypeError:  # None was sent
            raise PeerLostError("worker 0 lost contact with another worker") from None

    def lose(self) -> None:
        """Act as a process that was killed."""
        self._sent.put(None)  # type: ignore[arg-type]


def serve(
    rule: UpdateRule, updates: range, *, schedule: Callable[[int], float] = lambda _: 0.5
) -> Service:
    weights = [torch.zeros(3, dtype=torch.float64, requires_grad=True)]
    server = ParameterServer(weights, SGD(weights), schedule, rule)
    return Service(server, MiniBatches(rule, updates))


@contextmanager
def learners(
    service: Service,
    compute: Callable[[int, int], float],
    asks: Callable[[], bool] = lambda: False,
) -> Iterator[tuple[list[Any], dict[int, Exception]]]:
    """Run all learners of a service; yield their links and what ended them with an error.

    `compute` gets the learner and its mini-batch and returns the loss; gradients are ones.
    """
    pairs = [Fragile.ends(0) for _ in range(service.server.rule.learners)]
    errors: dict[int, Exception] = {}

    def work(learner: int) -> None:
        weights = [torch.zeros(3, dtype=torch.float64)]
        shard = Shard(pairs[learner][0], weights, [0])
        try:
            learn(
                [shard],
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
    service = serve(UpdateRule(learners=3, gradients=1, waits=False), range(30))

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
    service = serve(UpdateRule.hardsync(3), range(5))
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
    service = serve(UpdateRule(learners=3, gradients=3, waits=waits), range(1000))

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


class DeadError(Exception):
    """What ends a learner."""


def test_a_failing_server_ends_its_learners() -> None:
    def fail(update: int) -> float:
        if update == 5:
            raise OverflowError("no such update")
        return 0.1

    service = serve(UpdateRule(learners=2, gradients=1, waits=False), range(1000), schedule=fail)
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
    service = serve(UpdateRule(learners=3, gradients=3, waits=waits), range(1000))

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


WORKERS = 3
LIMIT = 120.0
"""Seconds after which workers that hang fail a test."""

ASYNCHRONOUS = UpdateRule(learners=2, gradients=1, waits=False)
HARDSYNC = UpdateRule.hardsync(2)
RECORDER, LEARNER, SERVER_RANK = 0, 1, 2


def train(
    environment: dict[str, str], folder: Path, rule: UpdateRule, victim: int, fault: signal.Signals
) -> None:
    """Run one worker of endless training, in which one gets a signal; record what ended it."""
    os.environ.update(environment)
    rank = int(environment["RANK"])
    backend = connect("torch", timeout=10)
    exchange = Exchange(backend, learners=rule.learners, servers=[SERVER_RANK])
    weights = [torch.nn.Parameter(torch.zeros(4))]

    def fail_after(update: int) -> None:
        if rank == victim and update > 50:
            os.kill(os.getpid(), fault)

    def gradient(number: int) -> tuple[list[torch.Tensor], float]:
        fail_after(number)
        return [torch.ones(4)], 0.0

    def schedule(update: int) -> float:
        fail_after(update)
        return 0.1

    try:
        exchange.run(
            weights,
            SGD(weights),
            schedule,
            rule,
            MiniBatches(rule, range(10**9)),
            clock=0,
            gradient=gradient,
        )
    except PeerLostError as error:
        (folder / str(rank)).write_text(str(error))
    os._exit(0)


LONG = pytest.mark.long
KILLED, STOPPED = signal.SIGKILL, signal.SIGSTOP


@pytest.mark.parametrize(
    ("rule", "victim", "fault"),
    [
        pytest.param(ASYNCHRONOUS, LEARNER, KILLED, id="a learner, asynchronous"),
        pytest.param(HARDSYNC, SERVER_RANK, KILLED, id="the server, hardsync"),
        pytest.param(HARDSYNC, LEARNER, KILLED, id="a learner, hardsync", marks=LONG),
        pytest.param(ASYNCHRONOUS, SERVER_RANK, KILLED, id="the server, asynchronous", marks=LONG),
        pytest.param(HARDSYNC, LEARNER, STOPPED, id="a learner stopped, hardsync", marks=LONG),
        pytest.param(HARDSYNC, SERVER_RANK, STOPPED, id="the server stopped", marks=LONG),
    ],
)
def test_all_others_end_when_one_is_killed_or_stopped(
    rule: UpdateRule,
    victim: int,
    fault: signal.Signals,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # for the fork server
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes = [
        SERVER.Process(
            target=train,
            args=(environment_of(rank, WORKERS, store.port), tmp_path, rule, victim, fault),
        )
        for rank in range(WORKERS)
    ]
    for process in processes:
        process.start()
    others = set(range(WORKERS)) - {victim}
    try:
        for rank in others:
            processes[rank].join(LIMIT)
            assert not processes[rank].is_alive()
    finally:
        for process in processes:
            process.kill()
    ended = {int(path.name): path.read_text() for path in tmp_path.iterdir()}
    assert ended.keys() == others
    assert all("lost contact with" in text for text in ended.values())
