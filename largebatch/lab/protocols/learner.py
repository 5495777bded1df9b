"""A learner: pull weights, compute the gradient of a mini-batch, push it, until none is left.

The code is the same in every layout and does not depend on where the servers are.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from largebatch.lab.protocols.service import Endpoint, Pulled, Pushed

Gradient = Callable[[int], tuple[Sequence[Tensor], float]]
"""Maps a mini-batch to its mean gradient, one tensor for each weight, and its mean loss."""


class Shard(NamedTuple):
    """One server, and the numbers of its weights."""

    server: Endpoint
    numbers: Sequence[int]


def learn(
    shards: Sequence[Shard],
    weights: Sequence[Tensor],
    gradient: Gradient,
    *,
    asks: Callable[[], bool] = lambda: False,
) -> None:
    """Run a learner until the first server has no mini-batch left.

    `weights` hold the values read last; `asks` returns True if this worker is asked to stop. Raises
    PeerLostError if a server, or a learner that an update waits for, is lost.
    """
    flat = [
        weights[shard.numbers[0]].new_empty(sum(weights[n].numel() for n in shard.numbers))
        for shard in shards
    ]
    while True:
        clocks, (_, number, later) = _pull(shards, flat)
        if later:
            continue
        if number is None:
            break
        for shard, values in zip(shards, flat, strict=True):
            _unpack(values, [weights[n] for n in shard.numbers])
        found, loss = gradient(number)
        stop = asks()
        for shard, clock in zip(shards, clocks, strict=True):
            packed = torch.cat([found[n].flatten() for n in shard.numbers])
            shard.server.begin_push(Pushed(clock, number, loss, stop), packed)
        for shard in shards:
            shard.server.finish_push()
    for shard in shards:
        shard.server.leave()


def _pull(shards: Sequence[Shard], flat: Sequence[Tensor]) -> tuple[list[int], Pulled]:
    """Read from all servers, first from the one that hands out mini-batches.

    The others are read even if there is none yet, because they take silence for a loss.
    """
    clocks: list[int] = []
    shards[0].server.begin_pull()
    first = shards[0].server.finish_pull(flat[0])
    if first.mini_batch is None and not first.later:
        return clocks, first
    for shard in shards[1:]:
        shard.server.begin_pull()
    for shard, values in zip(shards[1:], flat[1:], strict=True):
        clocks.append(shard.server.finish_pull(values).clock)
    return [first.clock, *clocks], first


@torch.no_grad()
def _unpack(values: Tensor, weights: Sequence[Tensor]) -> None:
    for part, weight in zip(values.split([w.numel() for w in weights]), weights, strict=True):
        weight.copy_(part.view_as(weight))
