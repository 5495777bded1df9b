"""Replays against a plain program that keeps every version of the weights, in float64."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from on_forked_workers import on_forked_workers
from replaying import SETTINGS, UPDATES, build, loss_of, replayed, run_for_real, schedule
from torch import Tensor
from torch.optim import SGD

from largebatch.lab.protocols.exchange import ExchangeRecord
from largebatch.lab.protocols.server import Arrival, UpdateRule, divide
from largebatch.lab.protocols.simulator import Lognormal, SimulatedCluster, SimulatedLink, simulate

MOMENTUM, DECAY = SETTINGS["momentum"], SETTINGS["weight_decay"]


def record(rule: UpdateRule, *, updates: int) -> list[Arrival]:
    """Return the arrivals of a simulation."""
    cluster = SimulatedCluster(
        learners=rule.learners,
        compute=Lognormal(kind="lognormal", median=0.7, sigma=0.8),
        link=SimulatedLink(bandwidth=50.0, latency=0.05),
        model_bytes=30.0,
    )
    return simulate(rule, cluster, servers=1, updates=updates, seed=7).arrivals[0]


class Plain:
    """The same by PyTorch's SGD alone: all versions of all weights are kept, none is counted.

    Weight decay is a part of the loss, so that a gradient which counts less has less of it.
    """

    def __init__(self, rule: UpdateRule, records: Sequence[Sequence[Arrival]]) -> None:
        self.rule, self.records = rule, records
        self.model = build()
        start = [weight.detach() for weight in self.model.parameters()]
        self.numbers = divide([weight.nbytes for weight in start], len(records))
        self.own = [[start[n].clone() for n in part] for part in self.numbers]
        self.optimizers = [SGD(weights, lr=1.0, momentum=MOMENTUM) for weights in self.own]
        self.versions = [[[w.clone() for w in weights]] for weights in self.own]

    def update_until(self, server: int, clock: int) -> None:
        """Make the updates of a server, and those of the others that it needs."""
        while len(self.versions[server]) <= clock:
            self._update(server)

    def weights(self, clocks: Sequence[int]) -> list[Tensor]:
        """Return all weights after a number of updates of each server."""
        found: list[Tensor] = [torch.empty(0)] * sum(map(len, self.numbers))
        for server, clock in enumerate(clocks):
            self.update_until(server, clock)
            for n, values in zip(self.numbers[server], self.versions[server][clock], strict=True):
                found[n] = values
        return found

    def _update(self, server: int) -> None:
        made = len(self.versions[server]) - 1
        total = [torch.zeros_like(weight) for weight in self.own[server]]
        for arrival in (one for one in self.records[server] if one.update == made):
            late = max(1, made - arrival.clock_read) if self.rule.by_staleness else 1
            found = self._gradient(arrival.mini_batch)
            for place, n in enumerate(self.numbers[server]):
                decayed = found[n] + DECAY * self.own[server][place]
                total[place] += decayed / late / self.rule.gradients
        self.optimizers[server].param_groups[0]["lr"] = schedule(made)
        for weight, one in zip(self.own[server], total, strict=True):
            weight.grad = one
        self.optimizers[server].step()
        self.versions[server].append([weight.clone() for weight in self.own[server]])

    def _gradient(self, number: int) -> Sequence[Tensor]:
        read = self.weights(
            [next(a.clock_read for a in one if a.mini_batch == number) for one in self.records]
        )
        for weight, values in zip(self.model.parameters(), read, strict=True):
            weight.data.copy_(values)
        return torch.autograd.grad(loss_of(self.model, number), list(self.model.parameters()))


def assert_same(ours: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for one, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


RULES = [
    pytest.param(UpdateRule(learners=6, gradients=1, waits=False), id="asynchronous"),
    pytest.param(
        UpdateRule(learners=6, gradients=2, waits=False, by_staleness=True), id="3-softsync"
    ),
    pytest.param(UpdateRule.hardsync(6), id="hardsync"),
]


@pytest.mark.parametrize("rule", RULES)
def test_a_replay_has_the_weights_of_a_plain_program_after_every_update(rule: UpdateRule) -> None:
    arrivals = record(rule, updates=30)
    expected = Plain(rule, [arrivals])
    after, calls = replayed(rule, arrivals)
    assert len(after) == 30
    assert calls == len(arrivals)
    for update, weights in enumerate(after):
        assert_same(weights, expected.weights([update + 1]))


FREE = UpdateRule(learners=3, gradients=1, waits=False)
AWARE = UpdateRule(learners=4, gradients=2, waits=False, by_staleness=True)
RUNS = {
    "asynchronous, 2 servers": ((2, 3), replace(FREE, learners=2), "sgd"),
    "2-softsync, decentralised": ((0, 1, 2, 3), AWARE, "sgd"),
    "asynchronous, 1 server, LARS": ((3,), FREE, "lars"),
}


@pytest.fixture(scope="module")
def real_runs() -> dict[str, tuple[list[Tensor], ExchangeRecord]]:
    """Runs of 4 processes, one after the other."""
    found = on_forked_workers(run_for_real, list(RUNS.values()), workers=4)
    return dict(zip(RUNS, found, strict=True))


@pytest.mark.parametrize("case", RUNS)
def test_a_run_has_the_weights_that_follow_from_its_record(
    real_runs: dict[str, tuple[list[Tensor], ExchangeRecord]], case: str
) -> None:
    """By the plain program, which follows several servers, and by a replay of one."""
    (weights, record), (servers, rule, optimizer) = real_runs[case], RUNS[case]
    records = record.arrivals
    assert {one[-1].update + 1 for one in records} == {UPDATES}
    assert any(arrival.staleness for one in records for arrival in one)  # else any order would do
    if optimizer == "sgd":
        assert_same(weights, Plain(rule, records).weights([UPDATES] * len(servers)))
    if len(servers) == 1:
        assert_same(weights, replayed(rule, records[0], optimizer=optimizer)[0][-1])
