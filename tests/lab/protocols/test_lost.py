"""A learner or a server is killed in the middle: nothing hangs, and the run can resume."""

import os
import signal
import sys
from pathlib import Path

import pytest
import torch
from on_forked_workers import SERVER, environment_of
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch's stubs
from torch.optim import SGD

from largebatch.distributed.connection import connect
from largebatch.errors import PeerLostError
from largebatch.lab.protocols.exchange import Exchange
from largebatch.lab.protocols.server import MiniBatches, Rule

WORKERS = 3
LIMIT = 120.0
"""Seconds after which workers that hang fail a test."""

ASYNCHRONOUS = Rule(learners=2, gradients=1, waits=False)
HARDSYNC = Rule.hardsync(2)
RECORDER, LEARNER, SERVER_RANK = 0, 1, 2


def train(
    environment: dict[str, str], folder: Path, rule: Rule, victim: int, fault: signal.Signals
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
    rule: Rule,
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
