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
from largebatch.lab.protocols.server import Arrival, divide


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


class Replay:
    """Servers in one process, in plain PyTorch, that make the updates of a record again."""

    def __init__(self, record: Record) -> None:
        parameters = begin()
        matrices = [n for n, weight in enumerate(parameters) if weight.ndim > 1]
        vectors = [n for n, weight in enumerate(parameters) if weight.ndim == 1]
        order = [*matrices, *vectors]  # of the optimizer's groups
        sizes = [parameters[n].nbytes for n in order]
        parts = divide(sizes, len(record.arrivals))
        self.shards = [[order[place] for place in part] for part in parts]
        self.reads = [
            {one.mini_batch: one.clock_read for one in arrivals} for arrivals in record.arrivals
        ]
        self.history = [[begin()] for _ in self.shards]
        """The weights of each server by its clock; those of other servers are unused."""

        self.velocity = [torch.zeros_like(weight) for weight in parameters]

    def can(self, one: Arrival) -> bool:
        """Return True if all servers have the weights that it was computed from."""
        each = zip(self.reads, self.history, strict=True)
        return all(reads[one.mini_batch] < len(history) for reads, history in each)

    def seen(self, mini_batch: int) -> list[Tensor]:
        """Return the weights that were read for a mini-batch, server by server."""
        found = begin()
        for shard, reads, history in zip(self.shards, self.reads, self.history, strict=True):
            for n in shard:
                found[n] = history[reads[mini_batch]][n]
        return found

    def make(self, server: int, one: Arrival) -> None:
        """Make the update of one gradient."""
        grads = gradient(self.seen(one.mini_batch), one.mini_batch, size=GLOBAL_BATCH)
        after = [weight.clone() for weight in self.history[server][-1]]
        for n in self.shards[server]:
            late, lr = max(1, one.staleness), crown.rate(one.update)
            move(after[n], grads[n] / late, self.velocity[n], lr=lr, decay=WEIGHT_DECAY / late)
        self.history[server].append(after)


def test_the_record_of_an_asynchronous_run_gives_its_weights_again(
    solved: dict[str, tuple[State, Record]],
) -> None:
    """Each gradient from what every server's weights were when they were read for it."""
    ours, record = solved["softsync"]
    replay, pending = Replay(record), [list(arrivals) for arrivals in record.arrivals]
    while any(pending):
        able = [server for server, left in enumerate(pending) if left and replay.can(left[0])]
        assert able, "a gradient was computed from weights that there had not been"
        replay.make(able[0], pending[able[0]].pop(0))
    final = begin()
    for shard, history in zip(replay.shards, replay.history, strict=True):
        for n in shard:
            final[n] = history[-1][n]
    torch.testing.assert_close(list(ours.values()), final, rtol=1e-10, atol=1e-10)
    for arrivals in record.arrivals:
        first = {one.learner: one for one in reversed(arrivals)}  # a quick one may be back before
        assert [first[learner].clock_read for learner in range(4)] == [0] * 4
        assert max(one.staleness for one in first.values()) >= 3
        assert all(one.staleness == one.update - one.clock_read for one in arrivals)
    assert all(sorted(reads) == list(range(STEPS)) for reads in replay.reads)


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
