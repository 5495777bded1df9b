"""Computes the weights of a run from the order in which its gradients arrived, in one process.

A learner's weights are those of its server at the clock that it read. So a replay of thousands of
learners needs no copies of their weights: it stores only the versions from which later gradients
are computed, about as many as the staleness.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from largebatch.lab.protocols.server import Applied, Arrivals, ParameterServer

Gradient = Callable[[int, int], tuple[Sequence[Tensor], float]]
"""Maps a learner and a mini-batch to its mean gradient at the current weights, one tensor for each,
and its mean loss. The next call may overwrite the tensors."""


def replay(
    server: ParameterServer, arrivals: Arrivals, weights: Sequence[Tensor], gradient: Gradient
) -> Iterator[Applied]:
    """Make the updates of a record of one server, in its order; yield each.

    Before each call of `gradient`, `weights` are set to the ones that the learner read. The
    server's optimizer must not hold them.

    Raises ValueError for a record that no run can write: a gradient is in the wrong update, was
    computed from weights that did not exist yet, or comes twice.
    """
    rows = list(zip(*(column.tolist() for column in arrivals), strict=True))
    if len({mini_batch for _, mini_batch, _, _ in rows}) < len(rows):
        raise ValueError("a mini-batch comes twice in the record")
    left = Counter(clock_read for _, _, clock_read, _ in rows)  # gradients of each version
    versions: dict[int, list[Tensor]] = {}
    for number, (learner, mini_batch, clock_read, update) in enumerate(rows, start=1):
        clock, held = server.pull()
        if clock != update:
            raise ValueError(
                f"mini-batch {mini_batch} is recorded in update {update}; by the rule it is in "
                f"{clock}"
            )
        if clock_read > clock:
            raise ValueError(f"mini-batch {mini_batch} was computed from weights that came later")
        with torch.no_grad():
            read = held if clock_read == clock else versions[clock_read]
            for weight, values in zip(weights, read, strict=True):
                weight.copy_(values)
        left[clock_read] -= 1
        if not left[clock_read]:
            versions.pop(clock_read, None)
        tensors, loss = gradient(learner, mini_batch)
        if number % server.rule.gradients == 0 and left[clock]:  # this completes an update
            versions[clock] = [weight.clone() for weight in held]
        own = [tensor.detach().clone() for tensor in tensors]
        applied = server.push(learner, clock_read, own, mini_batch=mini_batch, loss=loss)
        if applied is not None:
            yield applied
