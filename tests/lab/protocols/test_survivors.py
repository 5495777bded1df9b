"""A learner is killed or suspended in the middle, and the others continue."""

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import astuple
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from on_forked_workers import SERVER, environment_of
from replaying import OPTIMIZERS, SETTINGS, UPDATES, build, loss_of, replayed, schedule
from short_runs import DIGITS, log, weights
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch's stubs

from largebatch import load_recipe, run
from largebatch.distributed.connection import connect
from largebatch.errors import PeerLostError
from largebatch.lab.protocols.exchange import Exchange, Layout
from largebatch.lab.protocols.gradients import Gradients
from largebatch.lab.protocols.links import open_links
from largebatch.lab.protocols.rule import MiniBatches, Rule
from largebatch.lab.protocols.server import Arrival, Arrivals

LEARNERS, VICTIM = 3, 1
LONG = pytest.mark.long
KILLED, STOPPED = signal.SIGKILL, signal.SIGSTOP
LIMIT = 120.0
"""Seconds after which workers that hang fail a test."""

AWARE = Rule(learners=LEARNERS, gradients=1, waits=False, by_staleness=True)


class Fault:
    """What happens to the victim when it computes its first gradient; the others wait for that."""

    def __init__(self, folder: Path, number: signal.Signals) -> None:
        self._path, self._number = folder / "fault", number
        self._worker = int(os.environ["RANK"])

    def strike(self) -> None:
        """Fail as the victim, or wait until it has failed."""
        if self._worker == VICTIM and not self._path.exists():
            self._path.touch()
            os.kill(os.getpid(), self._number)
        while not self._path.exists():
            time.sleep(0.01)


def solve(folder: Path, number: signal.Signals) -> None:
    """Run one worker of a small problem in float64; worker 0 writes the weights and the record."""
    fault, backend = Fault(folder, number), connect("torch", timeout=10)
    layout = Layout(LEARNERS, (LEARNERS, LEARNERS + 1))
    links, optional = open_links(backend, layout.pairs), range(1, LEARNERS)
    exchange = Exchange(backend, layout, links, optional)
    model = build()
    weights = list(model.parameters())

    def gradient(mini_batch: int) -> tuple[Any, float]:
        fault.strike()
        loss = loss_of(model, mini_batch)
        return torch.autograd.grad(loss, weights), loss.item()

    optimizer = OPTIMIZERS["sgd"](weights, lr=1.0, **SETTINGS)
    records = []
    for part in (range(UPDATES // 2), range(UPDATES // 2, UPDATES)):  # the second one without it
        found = exchange.run(
            weights,
            optimizer,
            schedule,
            AWARE,
            MiniBatches(AWARE, part),
            clock=part.start,
            gradient=gradient,
        )
        records.append([[tuple(one) for one in arrivals] for arrivals in found.arrivals])
    if backend.rank == 0:
        final = [weight.detach() for weight in weights]
        torch.save((final, [astuple(loss) for loss in exchange.losses], records), folder / "found")
    backend.close()


def train(folder: Path, number: signal.Signals, protocol: str) -> None:
    """Run one worker with an evaluation, clean updates and statistics."""
    fault, of = Fault(folder, number), Gradients.of

    def struck(gradients: Gradients, mini_batch: int) -> tuple[list[Tensor], float]:
        fault.strike()
        return of(gradients, mini_batch)

    recipe = load_recipe(
        DIGITS,
        [
            f"protocol={protocol}",
            *("duration={steps: 12}", "schedule.warmup={steps: 2}", "evaluation.every_epochs=0.25"),
            *("batch={global_batch: 48, bn_span: 16}", "execution.compare_every=1"),
            *("data.image_size=16", "execution.cache=memory"),
            "model.arguments={layers: [1, 1, 1, 1], channels: [8, 8, 16, 16]}",
            "polish={clean: {steps: 4}, statistics: {samples: 480}}",
        ],
    )
    with mock.patch.object(Gradients, "of", struck):
        run(recipe, out=folder / "run", timeout=5, report=False)


def be_worker(
    environment: dict[str, str], folder: Path, work: Callable[..., None], args: tuple[Any, ...]
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    try:
        work(folder, *args)
    except PeerLostError as error:
        (folder / f"lost {environment['RANK']}").write_text(str(error))
        os._exit(3)


@contextmanager
def workers(
    folder: Path, work: Callable[..., None], *args: object, number: int
) -> Iterator[list[BaseProcess]]:
    """Start workers, wait until all but the victim have ended well, and yield them."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes: list[BaseProcess] = [
        SERVER.Process(
            target=be_worker, args=(environment_of(rank, number, store.port), folder, work, args)
        )
        for rank in range(number)
    ]
    try:
        with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)):  # for the server
            for process in processes:
                process.start()
        for rank, process in enumerate(processes):
            if rank != VICTIM:
                process.join(LIMIT)
                assert process.exitcode == 0
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.join()


def test_weights_without_a_lost_learner_are_those_that_the_record_gives(tmp_path: Path) -> None:
    """Asynchronous on two servers, in float64."""
    with workers(tmp_path, solve, KILLED, number=LEARNERS + 2):
        pass
    final, lost, parts = torch.load(tmp_path / "found")
    records = [
        Arrivals.of(Arrival(*one) for part in parts for one in part[server]) for server in (0, 1)
    ]
    for record in records:
        assert sorted(record.mini_batch.tolist()) == list(range(UPDATES))
        assert set(record.learner.tolist()) == {0, 2}
    ours, made, _ = replayed(AWARE, records)
    assert made == [UPDATES, UPDATES]
    for own, expected in zip(ours, final, strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-10, atol=1e-10)
    ((learner, _, mini_batch, silent),) = lost
    assert (learner, silent) == (VICTIM, False)
    assert mini_batch < LEARNERS


SOFTSYNC = "{kind: softsync, learners: 3, n: 1, modulation: n, servers: {centralised: 1}}"
ASYNCHRONOUS = "{kind: asynchronous, learners: 3, modulation: staleness, servers: {centralised: 2}}"


@pytest.mark.parametrize(
    ("protocol", "gradients", "number"),
    [
        pytest.param(SOFTSYNC, 3, KILLED, id="softsync, killed"),
        pytest.param(SOFTSYNC, 3, STOPPED, id="softsync, suspended", marks=LONG),
        pytest.param(ASYNCHRONOUS, 1, KILLED, id="asynchronous, killed", marks=LONG),
        pytest.param(ASYNCHRONOUS, 1, STOPPED, id="asynchronous, suspended", marks=LONG),
    ],
)
def test_a_run_ends_without_a_lost_learner_and_with_all_samples(
    protocol: str, gradients: int, number: signal.Signals, tmp_path: Path
) -> None:
    """A suspended one that wakes up is refused, whatever it has computed."""
    servers = 2 if protocol == ASYNCHRONOUS else 1
    with workers(tmp_path, train, number, protocol, number=LEARNERS + servers) as processes:
        if number == STOPPED:
            assert processes[VICTIM].is_alive()
            os.kill(processes[VICTIM].pid or 0, signal.SIGCONT)
            processes[VICTIM].join(LIMIT)
            assert processes[VICTIM].exitcode == 3
            text = (tmp_path / f"lost {VICTIM}").read_text()
            assert "worker 1, a learner, did nothing for the whole of --timeout" in text
    found = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (found["status"], found["steps"], found["samples"]) == ("finished", 12, 12 * 48)
    counts = found["extra"]["protocol"]
    (lost,) = counts["lost"]
    assert (lost["learner"], lost["silent"]) == (VICTIM, number == STOPPED)
    assert lost["mini_batch"] < LEARNERS
    assert counts["gradients"][VICTIM] == 0
    assert sum(counts["gradients"]) == 12 * gradients
    lines = (tmp_path / "run" / "arrivals.jsonl").read_text().splitlines()
    arrivals = [json.loads(line) for line in lines]
    assert {one["server"] for one in arrivals} == set(range(servers))
    for server in range(servers):
        taken = [one["mini_batch"] for one in arrivals if one["server"] == server]
        assert sorted(taken) == list(range(12 * gradients))
    counted = weights(tmp_path / "run")["bn1.num_batches_tracked"].item()
    assert counted == pytest.approx(12 * gradients / 2, abs=2)  # the mean over those that are left
    evaluations = log(tmp_path / "run", "evaluation")
    assert {one["stage"] for one in evaluations} == {"train", "clean", "statistics"}
    assert {one["samples"] for one in evaluations} == {360}
    (note,) = [one["text"] for one in log(tmp_path / "run", "note") if "learner" in one["text"]]
    assert "the others continue" in note
    assert f"its last mini-batch, {lost['mini_batch']}, was handed out again" in note
