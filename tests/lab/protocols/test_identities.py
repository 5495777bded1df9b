"""Protocols that are other names for known algorithms give their weights, in float64.

The references are plain PyTorch written by hand, as of the crown test.
"""

from collections.abc import Sequence
from itertools import product

import crown
import crown_protocols
import pytest
import torch
import torch.nn.functional as F
from crown import GLOBAL_BATCH, MOMENTUM, SMOOTHING, SPAN, STEPS, WEIGHT_DECAY, State
from crown_protocols import ALL_CASES, CASES, LAYOUTS
from on_forked_workers import on_forked_workers
from plain import plain_pytorch
from torch import Tensor

from largebatch.lab.protocols.exchange import Record


@pytest.fixture(scope="module")
def solved() -> dict[str, tuple[State, Record]]:
    """What every test without a mark looks at, solved in one start of the workers."""
    return on_forked_workers(crown_protocols.solve, CASES, workers=4)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_hardsync_gives_the_weights_of_plain_pytorch_wherever_the_servers_are(
    solved: dict[str, tuple[State, Record]], layout: str
) -> None:
    """And the running statistics of BatchNorm."""
    for net, optimizer in CASES:
        check(*solved[f"{layout}, {net}, {optimizer}"], layout, net, optimizer)


@pytest.mark.long
def test_hardsync_gives_them_with_every_form_of_lars_too() -> None:
    solved = on_forked_workers(crown_protocols.solve, ALL_CASES, workers=4)
    for layout, (net, optimizer) in product(LAYOUTS, ALL_CASES):
        check(*solved[f"{layout}, {net}, {optimizer}"], layout, net, optimizer)


def check(ours: State, record: Record, layout: str, net: str, optimizer: str) -> None:
    sizes = (GLOBAL_BATCH,) * STEPS
    expected = plain_pytorch(net, optimizer, chunk=SPAN, sizes=sizes)
    torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-10)
    assert record.end == STEPS
    learners, servers = LAYOUTS[layout].learners, LAYOUTS[layout].servers
    assert len(record.arrivals) == len(servers)
    for arrivals in record.arrivals:
        assert {one.staleness for one in arrivals} == {0}
        assert sorted(one.mini_batch for one in arrivals) == list(range(STEPS * learners))
        assert all(one.mini_batch % learners == one.learner for one in arrivals)


def gradient(weights: Sequence[Tensor], mini_batch: int, *, size: int) -> list[Tensor]:
    """Return that of plain PyTorch for the weights of the plain net, in the order of the model."""
    model = crown.net("plain")
    images, labels = crown.data()
    part = slice(mini_batch * size, (mini_batch + 1) * size)
    with torch.no_grad():
        for weight, value in zip(model.parameters(), weights, strict=True):
            weight.copy_(value)
    F.cross_entropy(model(images[part]), labels[part], label_smoothing=SMOOTHING).backward()
    return [weight.grad for weight in model.parameters() if weight.grad is not None]


def begin() -> list[Tensor]:
    return [weight.detach().clone() for weight in crown.net("plain").parameters()]


def move(
    weight: Tensor, grad: Tensor, velocity: Tensor, *, lr: float, decay: float = WEIGHT_DECAY
) -> None:
    """Momentum SGD in place; vectors are not decayed."""
    velocity.mul_(MOMENTUM).add_(grad + (decay * weight if weight.ndim > 1 else 0))
    weight.sub_(lr * velocity)


def test_local_steps_with_an_outer_optimizer_are_diloco(
    solved: dict[str, tuple[State, Record]],
) -> None:
    """Douillard et al. 2023 (arXiv:2311.08105), algorithm 1, with inner momentum SGD."""
    ours, record = solved["local steps"]
    center = begin()
    outer = [torch.zeros_like(weight) for weight in center]
    inner = [[torch.zeros_like(weight) for weight in center] for _ in range(2)]
    for round_ in ((0, 1), (2, 3), (4,)):
        changes = [torch.zeros_like(weight) for weight in center]
        for learner in range(2):
            own = [weight.clone() for weight in center]
            for step in round_:
                grads = gradient(own, 2 * step + learner, size=GLOBAL_BATCH // 2)
                for weight, grad, speed in zip(own, grads, inner[learner], strict=True):
                    move(weight, grad, speed, lr=crown.rate(step))
            for change, weight, moved in zip(changes, center, own, strict=True):
                change.add_((weight - moved) / 2)
        for weight, change, speed in zip(center, changes, outer, strict=True):
            speed.mul_(0.9).add_(change)
            weight.sub_(0.7 * (change + 0.9 * speed))
    torch.testing.assert_close(list(ours.values()), center, rtol=1e-10, atol=1e-10)
    assert record.end == STEPS
    assert [one.mini_batch for one in record.arrivals[0] if one.learner == 1] == [1, 5, 9]
