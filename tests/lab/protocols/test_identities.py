"""Protocols that are other names for known algorithms give their weights, in float64.

The references are plain PyTorch written by hand, as of the crown test.
"""

from itertools import product

import crown_protocols
import pytest
import torch
from crown import GLOBAL_BATCH, SPAN, STEPS, State
from crown_protocols import ALL_CASES, CASES, LAYOUTS
from on_forked_workers import on_forked_workers
from plain import plain_pytorch

from largebatch.lab.protocols.exchange import ExchangeRecord


@pytest.fixture(scope="module")
def solved() -> dict[str, tuple[State, ExchangeRecord]]:
    """What every test without a mark looks at, solved in one start of the workers."""
    return on_forked_workers(crown_protocols.solve, CASES, workers=4)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_hardsync_gives_the_weights_of_plain_pytorch_wherever_the_servers_are(
    solved: dict[str, tuple[State, ExchangeRecord]], layout: str
) -> None:
    """And the running statistics of BatchNorm."""
    for net, optimizer in CASES:
        check(*solved[f"{layout}, {net}, {optimizer}"], layout, net, optimizer)


@pytest.mark.long
def test_hardsync_gives_them_with_every_form_of_lars_too() -> None:
    solved = on_forked_workers(crown_protocols.solve, ALL_CASES, workers=4)
    for layout, (net, optimizer) in product(LAYOUTS, ALL_CASES):
        check(*solved[f"{layout}, {net}, {optimizer}"], layout, net, optimizer)


def check(ours: State, record: ExchangeRecord, layout: str, net: str, optimizer: str) -> None:
    sizes = (GLOBAL_BATCH,) * STEPS
    expected = plain_pytorch(net, optimizer, chunk=SPAN, sizes=sizes)
    torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-10)
    assert len(record.updates) == STEPS
    learners, servers = LAYOUTS[layout]
    assert len(record.arrivals) == len(servers)
    for arrivals in record.arrivals:
        assert {one.staleness for one in arrivals} == {0}
        assert sorted(one.mini_batch for one in arrivals) == list(range(STEPS * learners))
        assert all(one.mini_batch % learners == one.learner for one in arrivals)
