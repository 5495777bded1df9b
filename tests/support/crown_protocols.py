"""The problem of the crown test, solved by learners and parameter servers."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import crown
import torch
from crown import GLOBAL_BATCH, SMOOTHING, SPAN, State, rate

from largebatch.data.types import Batch
from largebatch.distributed.connection import connect
from largebatch.distributed.reducer import Reducer
from largebatch.distributed.serial import Serial
from largebatch.lab.protocols.exchange import Exchange, ExchangeRecord
from largebatch.lab.protocols.server import MiniBatches, UpdateRule
from largebatch.lab.protocols.stage import Gradients, average_statistics
from largebatch.models.batchnorm import Spans, with_span
from largebatch.training.loop import cross_entropy

LAYOUTS = {
    "a server beside each of 4 learners": (4, (0, 1, 2, 3)),
    "a server beside each of 2 learners": (2, (0, 1)),
    "2 learners, 1 server": (2, (2,)),
    "2 learners, 2 servers": (2, (2, 3)),
}
"""Number of learners and ranks of servers, on 4 workers, of which some do nothing."""

CASES = (("batchnorm", "sgd"), ("batchnorm", "reference"))
ALL_CASES = tuple(product(crown.NETS, ("sgd", *crown.CONVENTIONS, "nesterov")))
"""A net and an optimizer each."""


SOFTSYNC = UpdateRule(learners=4, gradients=1, waits=False, by_staleness=True)
"""On 4 learners; the rate of every gradient is divided by its staleness."""


@dataclass(frozen=True)
class Problem:
    """The net and data of the crown test on one worker."""

    exchange: Exchange
    net: str
    optimizer: str
    rule: UpdateRule

    def solve(self) -> tuple[State, ExchangeRecord]:
        """Train by the rule; return the state of the model and the record."""
        exchange, rule = self.exchange, self.rule
        images, labels = crown.data()
        size = GLOBAL_BATCH // rule.gradients
        updates = range(len(images) // GLOBAL_BATCH)
        model = with_span(crown.net(self.net), SPAN)
        alone = Serial(torch.device("cpu"))
        optimizer = crown.make_optimizer(self.optimizer, model, alone)
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]

        def batch(number: int) -> Batch:
            if not rule.waits and number < rule.learners:
                exchange.backend.barrier()  # all have read the first weights before one pushes
            part = slice(number * size, (number + 1) * size)
            return Batch(images[part], labels[part])

        with Reducer(model.named_parameters(), alone) as reducer:
            gradients = Gradients(
                model=model,
                weights=weights,
                batch=batch,
                criterion=cross_entropy(smoothing=SMOOTHING, off_target="all"),
                reducer=reducer,
                spans=Spans(model, alone),
                learners=rule.learners,
                seed=0,
            )
            record = exchange.run(
                weights,
                optimizer,
                rate,
                rule,
                MiniBatches(rule, updates),
                clock=0,
                gradient=gradients.of,
            )
            average_statistics(model, exchange.backend, learners=rule.learners)
        return dict(model.state_dict()), record


def solve(cases: Sequence[tuple[str, str]]) -> dict[str, tuple[State, ExchangeRecord]]:
    """Solve every case by hardsync in every layout, and others in one; on each of 4 workers."""
    backend = connect("torch", timeout=60)
    exchanges = {
        name: Exchange(backend, learners=learners, servers=servers)
        for name, (learners, servers) in LAYOUTS.items()
    }
    found: dict[str, tuple[State, ExchangeRecord]] = {}
    for name, exchange in exchanges.items():
        rule = UpdateRule.hardsync(exchange.learners)
        for net, optimizer in cases:
            problem = Problem(exchange, net, optimizer, rule)
            found[f"{name}, {net}, {optimizer}"] = problem.solve()
    four = exchanges["a server beside each of 4 learners"]
    found["softsync"] = Problem(four, "plain", "sgd", SOFTSYNC).solve()
    backend.close()
    return found
