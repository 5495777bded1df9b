"""Which workers are wrong, from passes that several of them computed over the same samples.

Two passes over the same samples that differ are a conflict: one of their workers is wrong, and a
worker whose own two passes differ is. The verdict is the smallest set of workers that explains all
conflicts. A worker that is wrong once in a pass of another's is in conflict with that one and with
the third, who agree, so it cannot accuse anyone. Where two sets of one size explain all, such as
either of two workers, nobody is accused alone.

Workers of a group that shares BatchNorm spans exchange statistics, so an error of one is in the
later operations of all. Only the workers whose passes differ first are in conflict then.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Generic, NamedTuple, TypeVar

P = TypeVar("P")

MOST_WRONG = 3
"""Largest number of wrong workers that is looked for; more are a fault of something they share."""

_MOST_IN_CONFLICT = 32
"""Most workers in conflicts, as those of 3 wrong workers; more have another cause."""


class Pass(NamedTuple, Generic[P]):
    """A pass that a worker computed over the samples of some worker."""

    worker: int
    record: P


FirstDifference = Callable[[P, P], int | None]
"""Number of the first place where two records differ; None if they are equal."""

Passes = Mapping[int, Sequence[Pass[P]]]
"""All passes over the same samples, by the worker that trains on these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Workers that explain all conflicts."""

    workers: tuple[int, ...]
    is_certain: bool
    """True if all of these are wrong; false if one of several sets of them is."""

    place: int
    """Number of the first place where a suspect's record differs from others'."""


def verdict(
    passes: Passes[P], first_difference: FirstDifference[P], *, workers: int, group: int = 1
) -> Verdict | None:
    """Return the wrong workers; None if more differ than a few wrong ones explain.

    Each `group` of consecutive workers shares its spans and computes passes together; `passes` then
    has all or none of a group's.

    >>> def differ(a: str, b: str) -> int | None:
    ...     return None if a == b else 0
    >>> right = [Pass(0, "x"), Pass(1, "x"), Pass(2, "x")]
    >>> wrong = [Pass(1, "x"), Pass(2, "y"), Pass(3, "x")]
    >>> verdict({0: right, 1: wrong}, differ, workers=4)
    Verdict(workers=(2,), is_certain=True, place=0)
    """
    places: dict[frozenset[int], int] = {}
    for pair, place in _conflicts(passes, first_difference, group):
        places[pair] = min(place, places.get(pair, place))
    most = min(MOST_WRONG, max(1, (workers - 1) // 2))
    covers = _smallest_covers(set(places), most=most)
    if not covers:
        return None
    suspects = {worker for cover in covers for worker in cover}
    place = min(place for pair, place in places.items() if pair & suspects)
    return Verdict(workers=tuple(sorted(suspects)), is_certain=len(covers) == 1, place=place)


def _conflicts(
    passes: Passes[P], first_difference: FirstDifference[P], group: int
) -> Iterator[tuple[frozenset[int], int]]:
    """Yield the workers of each conflict, one or two, and the place where they differ first."""
    by_group: dict[int, list[int]] = {}
    for owner in sorted(passes):
        by_group.setdefault(owner // group, []).append(owner)
    for owners in by_group.values():
        # The passes of all members of a group come in the same order.
        numbers = range(min(len(passes[owner]) for owner in owners))
        for a, b in combinations(numbers, 2):
            places: dict[frozenset[int], int] = {}
            for owner in owners:
                one = passes[owner][a]
                other = passes[owner][b]
                place = first_difference(one.record, other.record)
                if place is not None:
                    places[frozenset({one.worker, other.worker})] = place
            first = min(places.values(), default=0)
            yield from ((pair, place) for pair, place in places.items() if place == first)


def _smallest_covers(conflicts: set[frozenset[int]], *, most: int) -> list[set[int]]:
    """Return the smallest sets of at most `most` workers that have one of every conflict."""
    workers = sorted({worker for pair in conflicts for worker in pair})
    if len(workers) > _MOST_IN_CONFLICT:
        return []
    for size in range(1, most + 1):
        sets = map(set, combinations(workers, size))
        covers = [chosen for chosen in sets if all(chosen & pair for pair in conflicts)]
        if covers:
            return covers
    return []
