"""Which part of the workers a worker belongs to."""

from collections.abc import Sequence


def own_part(parts: Sequence[Sequence[int]], *, rank: int, world_size: int) -> list[int]:
    """Return the part that holds `rank`; raise ValueError if the parts are no division of all.

    Both libraries number the workers of a group in rising order whatever is asked for, so that is
    the only order that is taken.

    >>> own_part([[0, 2], [1, 3]], rank=3, world_size=4)
    [1, 3]
    """
    if sorted(member for part in parts for member in part) != list(range(world_size)):
        raise ValueError(
            f"every worker, 0 to {world_size - 1}, must be in exactly one part, got {parts}"
        )
    if any(list(part) != sorted(part) for part in parts):
        raise ValueError(f"the ranks in a part must rise, got {parts}")
    return next(list(part) for part in parts if rank in part)
