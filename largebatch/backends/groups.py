"""Which gradients are sent together: static groups, known before the first step.

A grouping takes the sizes of the gradients in bytes, in the order of the model, and returns runs of
their numbers, the one to send first in front. It counts from the last layer, whose gradients are
ready first. Small groups start early and cost a latency each; large ones use the wire well and
start late.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import count, repeat

Grouping = Callable[[Sequence[int]], list[range]]


def cubic(sizes: Sequence[int]) -> list[range]:
    """Put 3 (k+1)^3 - 3 k^3 tensors in group k (Fujitsu's MLPerf v0.6 entry).

    >>> [len(group) for group in cubic([4] * 161)]
    [3, 21, 57, 80]
    >>> cubic([4] * 5)
    [range(2, 5), range(0, 2)]
    """
    return _cut(len(sizes), (3 * (k + 1) ** 3 - 3 * k**3 for k in count()))


def quadratic(sizes: Sequence[int]) -> list[range]:
    """Put 3 (k+1)^2 - 3 k^2 tensors in group k.

    >>> [len(group) for group in quadratic([4] * 161)]
    [3, 9, 15, 21, 27, 33, 39, 14]
    """
    return _cut(len(sizes), (3 * (k + 1) ** 2 - 3 * k**2 for k in count()))


def constant(tensors: int) -> Grouping:
    """Put the same number of tensors in each group.

    >>> constant(2)([4] * 5)
    [range(3, 5), range(1, 3), range(0, 1)]
    """
    if tensors < 1:
        raise ValueError(f"a group needs at least 1 tensor, got {tensors}")
    return lambda sizes: _cut(len(sizes), repeat(tensors))


def by_bytes(limit: float) -> Grouping:
    """Close a group as soon as it has `limit` bytes.

    >>> by_bytes(10)([1, 20, 4, 8, 2])
    [range(3, 5), range(1, 3), range(0, 1)]
    """
    if limit <= 0:
        raise ValueError(f"a group needs at least 1 byte, got {limit}")

    def group(sizes: Sequence[int]) -> list[range]:
        counts, number = [], 0
        filled = 0
        for size in reversed(sizes):
            number, filled = number + 1, filled + size
            if filled >= limit:
                counts.append(number)
                number = filled = 0
        return _cut(len(sizes), [*counts, number])

    return group


def _cut(num_tensors: int, counts: Iterable[int]) -> list[range]:
    """Cut runs of `counts` tensors off the end; the last run is what remains."""
    groups, end = [], num_tensors
    for taken in counts:
        if end == 0:
            break
        groups.append(range(max(0, end - taken), end))
        end = groups[-1].start
    return groups
