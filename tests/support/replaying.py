"""A small problem in float64, solved by real learners and servers, and replayed from a record."""

import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Optimizer

from largebatch.distributed.backend import Backend
from largebatch.distributed.connection import connect
from largebatch.lab.protocols.exchange import Exchange, ExchangeRecord
from largebatch.lab.protocols.server import (
    Arrival,
    MiniBatches,
    ParameterServer,
    UpdateRule,
    replay,
)
from largebatch.optim.lars import LARS

SETTINGS: dict[str, Any] = {"momentum": 0.9, "weight_decay": 1e-3}
OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {"sgd": SGD, "lars": LARS}
UPDATES = 30


def schedule(update: int) -> float:
    """Fall slowly."""
    return 0.2 / (1 + 0.01 * update)


def build() -> nn.Module:
    """Build the same network each time."""
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def loss_of(model: nn.Module, number: int) -> Tensor:
    """Return the mean loss over a mini-batch."""
    generator = torch.Generator().manual_seed(number)
    inputs = torch.randn(8, 4, generator=generator, dtype=torch.float64)
    return F.cross_entropy(model(inputs), torch.randint(3, (8,), generator=generator))


def replayed(
    rule: UpdateRule, record: Sequence[Arrival], *, optimizer: str = "sgd"
) -> tuple[list[list[Tensor]], int]:
    """Return the weights after each update, and the number of gradients computed."""
    model, calls = build(), 0
    weights = list(model.parameters())
    own = [weight.detach().clone().requires_grad_() for weight in weights]
    server = ParameterServer(own, OPTIMIZERS[optimizer](own, lr=1.0, **SETTINGS), schedule, rule)

    def gradient(_: int, number: int) -> tuple[Sequence[Tensor], float]:
        nonlocal calls
        calls += 1
        loss = loss_of(model, number)
        return torch.autograd.grad(loss, weights), loss.item()

    after: list[list[Tensor]] = []
    for taken in replay(server, record, weights, gradient):
        assert {one.update for one in taken} == {len(after)}
        after.append([weight.detach().clone() for weight in own])
    return after, calls


def run_for_real(
    cases: Sequence[tuple[Sequence[int], UpdateRule, str]],
) -> list[tuple[list[Tensor], ExchangeRecord]]:
    """Solve each case by learners that take random times; on every worker."""
    backend = connect("torch", timeout=60)
    found = [_solve(backend, *case) for case in cases]
    backend.close()
    return found


def _solve(
    backend: Backend, servers: Sequence[int], rule: UpdateRule, optimizer: str
) -> tuple[list[Tensor], ExchangeRecord]:
    model, draws = build(), random.Random(backend.rank)
    weights = list(model.parameters())

    def gradient(number: int) -> tuple[Sequence[Tensor], float]:
        time.sleep(draws.expovariate(1 / 0.002))
        loss = loss_of(model, number)
        return torch.autograd.grad(loss, weights), loss.item()

    exchange = Exchange(backend, learners=rule.learners, servers=servers)
    record = exchange.run(
        weights,
        OPTIMIZERS[optimizer](weights, lr=1.0, **SETTINGS),
        schedule,
        rule,
        MiniBatches(rule, range(UPDATES)),
        clock=0,
        gradient=gradient,
    )
    return [weight.detach() for weight in weights], record
