"""Replays against a plain program that keeps every version of the weights, in float64."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD

from largebatch.training.protocols.arrivals import Arrivals
from largebatch.training.protocols.cluster import Cluster, Link
from largebatch.training.protocols.compute_times import Exponential
from largebatch.training.protocols.replay import Part, replay
from largebatch.training.protocols.rule import Rule
from largebatch.training.protocols.server import Arrival, ParameterServer, divide
from largebatch.training.protocols.simulator import simulate

SETTINGS = {"momentum": 0.9, "weight_decay": 1e-3}


def schedule(update: int) -> float:
    return 0.2 / (1 + 0.01 * update)


def build() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def mini_batch(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    inputs = torch.randn(8, 4, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(3, (8,), generator=generator)


def loss_of(model: nn.Module, number: int) -> Tensor:
    inputs, labels = mini_batch(number)
    return F.cross_entropy(model(inputs), labels)


def record(rule: Rule, *, servers: int | None, updates: int = 40) -> tuple[Arrivals, ...]:
    """Return the arrivals of a simulation in which servers see different orders."""
    cluster = Cluster(
        learners=rule.learners,
        compute=Exponential(kind="exponential", mean=1.0),
        link=Link(bandwidth=50.0, latency=0.05),
        model_bytes=30.0,
    )
    return simulate(rule, cluster, servers=servers, updates=updates, seed=7).arrivals


def replayed(
    rule: Rule, records: Sequence[Arrivals], *, after: list[list[Tensor]] | None = None
) -> tuple[list[Tensor], list[int], list[float], int]:
    """Return the final weights, the number of updates by server, all losses and gradients.

    `after` receives the weights of the first server after each of its updates.
    """
    model, calls = build(), 0
    weights = list(model.parameters())
    parts, losses = [], []
    for numbers, arrivals in zip(
        divide([w.nbytes for w in weights], len(records)), records, strict=True
    ):
        own = [weights[number].detach().clone().requires_grad_() for number in numbers]
        server = ParameterServer(own, SGD(own, lr=1.0, **SETTINGS), schedule, rule)
        parts.append(Part(server, numbers, arrivals))

    def gradient(_: int, number: int) -> tuple[Sequence[Tensor], float]:
        nonlocal calls
        calls += 1
        loss = loss_of(model, number)
        return torch.autograd.grad(loss, weights), loss.item()

    made = [0] * len(parts)
    for server_number, applied in replay(parts, weights, gradient):
        assert applied.update == made[server_number]
        made[server_number] += 1
        if server_number == 0:
            if after is not None:
                after.append([weight.detach().clone() for weight in parts[0].server.weights])
            losses += [arrival.loss for arrival in applied.arrivals]
    final = [weight.detach() for weight in weights]
    for part in parts:
        for number, values in zip(part.numbers, part.server.weights, strict=True):
            final[number] = values.detach()
    return final, made, losses, calls


class Plain:
    """The same by PyTorch's SGD alone: all versions of all weights are kept, none is counted."""

    def __init__(self, rule: Rule, records: Sequence[Arrivals]) -> None:
        self.rule, self.records = rule, records
        self.model = build()
        start = [weight.detach() for weight in self.model.parameters()]
        self.numbers = divide([weight.nbytes for weight in start], len(records))
        self.own = [[start[n].clone() for n in part] for part in self.numbers]
        self.optimizers = [SGD(weights, lr=1.0, **SETTINGS) for weights in self.own]
        self.versions = [[[w.clone() for w in weights]] for weights in self.own]

    def update_until(self, server: int, clock: int) -> None:
        """Let a server make its updates, and the others those that it needs."""
        while len(self.versions[server]) <= clock:
            self._update(server)

    def weights(self, clocks: Sequence[int]) -> list[Tensor]:
        """Return all weights as they were after so many updates of each server."""
        found: list[Tensor] = [torch.empty(0)] * sum(map(len, self.numbers))
        for server, clock in enumerate(clocks):
            self.update_until(server, clock)
            for n, values in zip(self.numbers[server], self.versions[server][clock], strict=True):
                found[n] = values
        return found

    def _update(self, server: int) -> None:
        arrivals, made = self.records[server], len(self.versions[server]) - 1
        total = [torch.zeros_like(weight) for weight in self.own[server]]
        for row in np.flatnonzero(arrivals.update == made):
            tau = made - int(arrivals.clock_read[row])
            late = max(1, tau) if self.rule.by_staleness else 1
            found = self._gradient(int(arrivals.mini_batch[row]))
            for place, n in enumerate(self.numbers[server]):
                total[place] += found[n] / late / self.rule.gradients
        self.optimizers[server].param_groups[0]["lr"] = schedule(made)
        for weight, one in zip(self.own[server], total, strict=True):
            weight.grad = one
        self.optimizers[server].step()
        self.versions[server].append([weight.clone() for weight in self.own[server]])

    def _gradient(self, number: int) -> Sequence[Tensor]:
        rows = [int(np.flatnonzero(one.mini_batch == number)[0]) for one in self.records]
        clocks = [int(one.clock_read[row]) for one, row in zip(self.records, rows, strict=True)]
        read = self.weights(clocks)
        for weight, values in zip(self.model.parameters(), read, strict=True):
            weight.data.copy_(values)
        return torch.autograd.grad(loss_of(self.model, number), list(self.model.parameters()))


def assert_same(ours: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for one, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


RULES = [
    pytest.param(Rule(learners=6, gradients=1, waits=False), id="asynchronous"),
    pytest.param(Rule(learners=6, gradients=2, waits=False, by_staleness=True), id="3-softsync"),
    pytest.param(Rule.hardsync(6), id="hardsync"),
]


@pytest.mark.parametrize("rule", RULES)
def test_a_replay_has_the_weights_of_a_plain_program_after_every_update(rule: Rule) -> None:
    arrivals = record(rule, servers=1, updates=30)[0]
    expected = Plain(rule, [arrivals])
    after = []
    calls = replayed(rule, [arrivals], after=after)[3]
    assert len(after) == 30
    assert calls == len(arrivals)
    for update, weights in enumerate(after):
        assert_same(weights, expected.weights([update + 1]))


def test_hardsync_has_the_same_weights_over_any_number_of_servers() -> None:
    rule = Rule.hardsync(3)
    weights = [replayed(rule, record(rule, servers=servers))[0] for servers in (1, 2, 4)]
    for other in weights[1:]:
        assert_same(other, weights[0])


def test_servers_that_saw_different_orders_are_followed_each_in_its_own() -> None:
    rule = Rule(learners=4, gradients=2, waits=False, by_staleness=True)
    records = record(rule, servers=None)
    assert any((one.mini_batch != records[0].mini_batch).any() for one in records)
    weights, made, losses, calls = replayed(rule, records)
    assert made == [40] * 4
    assert calls == len(losses) == 80
    assert_same(weights, Plain(rule, records).weights([40] * 4))


def test_what_a_server_recorded_comes_back_from_a_replay() -> None:
    rule = Rule(learners=4, gradients=2, waits=False)
    arrivals = record(rule, servers=1, updates=20)[0]
    rows = [
        Arrival(update, learner, clock, update - clock, number, 0.0)
        for learner, number, clock, update in zip(
            arrivals.learner.tolist(),
            arrivals.mini_batch.tolist(),
            arrivals.clock_read.tolist(),
            arrivals.update.tolist(),
            strict=True,
        )
    ]
    again = Arrivals.of(rows)
    assert (again.staleness == arrivals.staleness).all()
    assert (again.learner == arrivals.learner).all()
    assert_same(replayed(rule, [again])[0], replayed(rule, [arrivals])[0])


def test_records_that_no_run_can_leave_are_refused() -> None:
    rule = Rule(learners=4, gradients=2, waits=False)
    arrivals = record(rule, servers=1, updates=5)[0]
    with pytest.raises(ValueError, match=r"mini-batch \d+ is recorded in update 1; .* it is in 0"):
        replayed(rule, [replace(arrivals, update=arrivals.update + 1)])
    with pytest.raises(ValueError, match="was computed from weights that came later"):
        replayed(rule, [replace(arrivals, clock_read=arrivals.clock_read + 6)])
    with pytest.raises(ValueError, match="gradients of different mini-batches"):
        replayed(rule, [arrivals, replace(arrivals, mini_batch=arrivals.mini_batch + 1)])
    with pytest.raises(ValueError, match="a mini-batch comes twice"):
        replayed(rule, [replace(arrivals, mini_batch=arrivals.mini_batch // 2)])
