"""The updates of a rest beside those of the whole run, and the state in which the rest begins."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from largebatch.audit.resume.record import Batch, Run, Trace, Update
from largebatch.audit.rules.resume import Field

Values = Mapping[str, Trace] | Mapping[str, Trace | float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """A whole run, its first part and the rest, which makes the updates after `stop`."""

    whole: Run
    first: Run
    rest: Run

    is_prefix: bool
    """True if the first part made the first updates of the whole, bit for bit."""

    @property
    def stop(self) -> int:
        """Number of updates before the stop."""
        return len(self.first[0].updates)

    @property
    def number(self) -> int:
        """Number of updates of the rest."""
        return len(self.rest[0].updates)

    @property
    def has_as_many_workers(self) -> bool:
        """True if the rest has as many workers as the whole."""
        return len(self.rest) == len(self.whole)

    @property
    def ranks(self) -> range:
        """Workers whose records are compared one by one: all, or worker 0 of other numbers."""
        return range(len(self.whole) if self.has_as_many_workers else 1)

    @property
    def is_exact(self) -> bool:
        """True if equal bits can be expected: as many workers, and passes over equal batches."""
        return self.has_as_many_workers and all(
            _sizes(resumed.batches) == _sizes(reference.batches)
            for rank in self.ranks
            for resumed, reference in self.pairs(rank)
        )

    def pairs(self, rank: int) -> list[tuple[Update, Update]]:
        """Return each update of a worker's rest, with that of the whole."""
        following = self.whole[rank].updates[self.stop :]
        return list(zip(self.rest[rank].updates, following, strict=False))

    def ends(self, rank: int) -> tuple[Update, Update] | None:
        """Return the states after the last update; None if one of them was not seen."""
        resumed = self.rest[rank].end
        reference = self.whole[rank].end
        return None if resumed is None or reference is None else (resumed, reference)

    def starts(self, rank: int) -> Iterator[tuple[Update, Update]]:
        """Yield the state before the first update of each optimizer, and what it must be.

        That is the state of the whole, or, if the first part is not its beginning, the state in
        which the first part ended.
        """
        seen: set[int] = set()
        for number, (resumed, reference) in enumerate(self.pairs(rank)):
            if resumed.optimizer in seen:
                continue
            seen.add(resumed.optimizer)
            end = self.first[rank].end if rank < len(self.first) else None
            if not self.is_prefix and end is not None:
                # Its other optimizers have moved the weights by then.
                if number == 0:
                    yield resumed, end
            else:
                yield resumed, reference


def _sizes(batches: Iterable[Batch]) -> list[int]:
    return [len(batch.indices or batch.samples or batch.labels) for batch in batches]


def is_equal(left: Trace | float, right: Trace | float) -> bool:
    """Compare two values; a number is equal to a tensor that holds it."""
    if isinstance(left, Trace) and isinstance(right, Trace):
        return left.digest == right.digest
    if isinstance(left, Trace) or isinstance(right, Trace):
        return abs(size_of(left) - size_of(right)) <= 1e-6 * abs(size_of(right))
    return left == right


def size_of(value: Trace | float) -> float:
    """Return the norm of a tensor, or the size of a number."""
    return value.norm if isinstance(value, Trace) else abs(value)


def are_equal(left: Values, right: Values) -> bool:
    """Compare values by name."""
    return left.keys() == right.keys() and all(is_equal(left[key], right[key]) for key in left)


def distance(left: Values, right: Values) -> float:
    """Return the largest relative distance of tensors of one name that is known, or NaN."""
    pairs = [(left[name], right[name]) for name in left if name in right]
    known = [
        result
        for before, after in pairs
        if isinstance(before, Trace) and isinstance(after, Trace)
        if (result := before.distance(after)) == result  # not NaN
    ]
    return max(known, default=float("nan"))


FIELDS: Mapping[Field, Callable[[Update, Update], bool]] = {
    "order of samples": lambda a, b: order_of(a.batches) == order_of(b.batches),
    "contents of samples": lambda a, b: contents_of(a.batches) == contents_of(b.batches),
    "weights": lambda a, b: are_equal(a.weights, b.weights),
    "buffers": lambda a, b: are_equal(a.buffers, b.buffers),
    "dropout masks": lambda a, b: a.masks == b.masks,
    "learning rates": lambda a, b: (a.rates, a.settings) == (b.rates, b.settings),
    "optimizer state": lambda a, b: are_equal(a.state, b.state),
    # An average is recognised when it is near the weights: in one of the runs perhaps later.
    "averages": lambda a, b: all(
        is_equal(a.averages[name], b.averages[name]) for name in a.averages if name in b.averages
    ),
    "loss scale": lambda a, b: a.scale == b.scale,
    "loss": lambda a, b: a.loss == b.loss or (a.loss != a.loss and b.loss != b.loss),
    "gradients": lambda a, b: are_equal(a.gradients, b.gradients),
}
"""Whether two updates have each field in common, causes before what follows from them."""


def order_of(batches: Iterable[Batch]) -> tuple[int | str, ...]:
    """Return the samples of batches by number, else by label, else by content."""
    return tuple(
        chain.from_iterable(batch.indices or batch.labels or batch.samples for batch in batches)
    )


def contents_of(batches: Iterable[Batch]) -> tuple[str, ...]:
    """Return the digests of the samples of batches."""
    return tuple(chain.from_iterable(batch.samples for batch in batches))


def other_generators(left: Update, right: Update, used: Iterable[str]) -> tuple[str, ...]:
    """Return the names of used generators whose states differ."""
    return tuple(
        name
        for name in used
        if name in left.generators
        and name in right.generators
        and left.generators[name] != right.generators[name]
    )


def used_generators(updates: Sequence[Update]) -> list[str]:
    """Return the names of the generators whose states change."""
    states: dict[str, set[str]] = {}
    for update in updates:
        for name, state in update.generators.items():
            states.setdefault(name, set()).add(state)
    return [name for name, of_name in states.items() if len(of_name) > 1]
