"""Which samples a rest reads, and where the whole run has them."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import NamedTuple

from largebatch.audit.resume.aligned import Resumed, other_generators, used_generators
from largebatch.audit.resume.record import Batch, Run, Update
from largebatch.audit.rules import resumed_data as rules
from largebatch.audit.rules.data import Orders

Sample = int | str
"""A sample's number in the data set; its label or content where it has none."""

Key = Callable[[Batch], tuple[Sample, ...]]


class _Read(NamedTuple):
    """A batch of a worker, and the number of updates before the one that it is for."""

    samples: tuple[Sample, ...]
    batch: Batch
    update: int

    @property
    def place(self) -> rules.Place:
        return rules.Place(
            update=self.update + 1, epoch=self.batch.epoch + 1, batch=self.batch.position + 1
        )


def measure_orders(whole: Run) -> Orders | None:
    """Return evidence if workers of the whole read two epochs in one order, as the rest does."""
    equal = 0
    is_shuffled = False
    for worker in whole:
        epochs: dict[tuple[int, int], list[int]] = {}
        for update in worker.updates:
            for batch in update.batches:
                numbers = batch.indices or ()
                epochs.setdefault((batch.loader, batch.epoch), []).extend(numbers)
        loader = min(epochs, default=(0, 0))[0]
        first = epochs.get((loader, 0), [])
        second = epochs.get((loader, 1), [])
        if len(first) > 1 and first == second:
            equal += 1
            is_shuffled = is_shuffled or first != sorted(first)
    if not equal:
        return None
    return Orders(equal=equal, workers=len(whole), is_shuffled=is_shuffled, may_be_set=False)


def first_place(resumed: Resumed) -> int | None:
    """Return the update of the whole, from 1, that has the samples of the rest's first batch."""
    if resumed.number == 0 or not resumed.whole[0].updates:
        return None
    key = key_of(resumed)
    of_rest = _batches(resumed.rest[0].updates, key)
    of_whole = _batches(resumed.whole[0].updates, key)
    found = _find(of_rest, of_whole, expected=0)
    return None if found is None else found.place.update


def key_of(resumed: Resumed) -> Key:
    """Return what names the samples of a batch: numbers, contents or labels.

    Without numbers, equal labels in all updates show an equal order, whatever is augmented.
    """
    batches = [
        batch
        for worker in chain(resumed.whole, resumed.rest)
        for update in worker.updates
        for batch in update.batches
    ]
    if all(batch.indices is not None for batch in batches):
        return lambda batch: batch.indices or ()
    has_labels = any(batch.labels for batch in batches)
    if has_labels and _has_equal_labels(resumed):
        return lambda batch: batch.labels
    contents = {digest for worker in resumed.whole for digest in _contents(worker.updates)}
    of_rest = [*_contents(resumed.rest[0].updates)]
    known = sum(digest in contents for digest in of_rest)
    # Augmented samples have new contents in each epoch.
    if known > len(of_rest) / 2 or not has_labels:
        return lambda batch: batch.samples
    return lambda batch: batch.labels


def _has_equal_labels(resumed: Resumed) -> bool:
    return all(
        [batch.labels for batch in of_rest.batches] == [it.labels for it in of_whole.batches]
        for rank in resumed.ranks
        for of_rest, of_whole in resumed.pairs(rank)
    )


def _contents(updates: Iterable[Update]) -> Iterable[str]:
    return chain.from_iterable(batch.samples for it in updates for batch in it.batches)


def _batches(updates: Sequence[Update], key: Key, before: int = 0) -> list[_Read]:
    return [
        _Read(key(batch), batch, number)
        for number, update in enumerate(updates, before)
        for batch in update.batches
    ]


def _of_update(update: Update, key: Key) -> tuple[Sample, ...]:
    return tuple(chain.from_iterable(map(key, update.batches)))


def measure_reading(resumed: Resumed) -> rules.Reading:
    """Compare the samples of each update, and their order on each worker."""
    key = key_of(resumed)
    number = resumed.number
    stop = resumed.stop
    of_whole = [_sets(resumed.whole, key, stop + update) for update in range(number)]
    of_rest = [_sets(resumed.rest, key, update) for update in range(number)]
    samples = sum(counter.total() for counter in of_whole)
    if not samples or not any(of_rest):
        return rules.Reading(updates=number, samples=0)
    other_set = [it for it in range(number) if of_whole[it] != of_rest[it]]
    other_order = [
        update
        for rank in resumed.ranks
        for update, pair in enumerate(resumed.pairs(rank))
        if resumed.has_as_many_workers and _of_update(pair[0], key) != _of_update(pair[1], key)
    ]
    if not other_set:
        return rules.Reading(
            updates=number,
            samples=samples,
            update=stop + min(other_order) + 1 if other_order else 0,
            are_same_sets=True,
            other_workers=None if resumed.has_as_many_workers else len(resumed.rest),
        )
    return _at(resumed, key, min(other_set), samples)


def _sets(run: Run, key: Key, update: int) -> Counter[Sample]:
    return Counter(
        chain.from_iterable(
            _of_update(worker.updates[update], key)
            for worker in run
            if update < len(worker.updates)
        )
    )


def _at(resumed: Resumed, key: Key, number: int, samples: int) -> rules.Reading:
    """Measure the reading from the rest's update with this number on, which has other samples."""
    stop = resumed.stop
    rank = next(
        (
            rank
            for rank in resumed.ranks
            if _of_update(resumed.rest[rank].updates[number], key)
            != _of_update(resumed.whole[rank].updates[stop + number], key)
        ),
        0,
    )
    of_rest = resumed.rest[rank].updates
    of_whole = resumed.whole[rank].updates
    expected = _batches(of_whole[stop + number :], key, stop + number)
    following = _batches(of_rest[number:], key, stop + number)
    read = _place_of(resumed, key, rank, number)
    passed = _missing(resumed, key, expected[:1], following[:1], read)
    used = used_generators(of_whole)
    generators = other_generators(of_rest[number], of_whole[stop + number], used)
    return rules.Reading(
        updates=resumed.number,
        samples=samples,
        update=stop + number + 1,
        expected=expected[0].place if expected else None,
        read=read,
        twice=passed[0],
        never=passed[1],
        accumulation=max(1, len(of_whole[stop + number].batches)),
        workers=len(resumed.whole),
        other_workers=None if resumed.has_as_many_workers else len(resumed.rest),
        epoch_set=of_whole[stop + number].epoch,
        epoch_set_by_rest=of_rest[number].epoch,
        generators=generators if resumed.has_as_many_workers else (),
        follows=_drawn_too(resumed, generators),
    )


def _drawn_too(resumed: Resumed, generators: tuple[str, ...]) -> tuple[str, ...]:
    masks = any(
        of_rest.masks != of_whole.masks
        for rank in resumed.ranks
        for of_rest, of_whole in resumed.pairs(rank)
    )
    return ("dropout masks",) if generators and masks else ()


def _place_of(resumed: Resumed, key: Key, rank: int, number: int) -> rules.Place | None:
    """Find where the whole reads what a rest reads from one of its updates on."""
    stop = resumed.stop
    if resumed.has_as_many_workers:
        of_whole = _batches(resumed.whole[rank].updates, key)
        before = sum(it.update < stop + number for it in of_whole)
        following = _batches(resumed.rest[rank].updates[number:], key)
        found = _find(following, of_whole, expected=before)
        if found is not None:
            return found.place
    # With batches of other sizes or workers, the samples of whole updates.
    samples = _sets(resumed.rest, key, number)
    for update, of_update in enumerate(resumed.whole[0].updates):
        if of_update.batches and _sets(resumed.whole, key, update) == samples:
            return _Read((), of_update.batches[0], update).place
    return None


def _find(following: Sequence[_Read], of_whole: Sequence[_Read], *, expected: int) -> _Read | None:
    """Return the batch of the whole from which on it has most of the following batches.

    Of several, the one nearest to the expected place.
    """
    best: _Read | None = None
    most = 0
    for place in sorted(range(len(of_whole)), key=lambda it: abs(it - expected)):
        equal = 0
        for left, right in zip(following, of_whole[place:], strict=False):
            if left.samples != right.samples:
                break
            equal += 1
        if equal > most:
            best = of_whole[place]
            most = equal
    return best


def _missing(
    resumed: Resumed,
    key: Key,
    expected: Sequence[_Read],
    following: Sequence[_Read],
    read: rules.Place | None,
) -> tuple[int, int]:
    """Count the readings of an epoch that the whole does not have, and those that are missing."""
    if not expected or not following:
        return 0, 0
    epoch = expected[0].batch
    in_whole = _of_epoch(resumed.whole, key, epoch)
    actual = _of_epoch(resumed.first, key, epoch)
    if read is None or read.epoch <= epoch.epoch + 1:
        actual += _of_epoch(resumed.rest, key, following[0].batch)
    return (actual - in_whole).total(), (in_whole - actual).total()


def _of_epoch(run: Run, key: Key, epoch: Batch) -> Counter[Sample]:
    return Counter(
        chain.from_iterable(
            key(batch)
            for worker in run
            for update in worker.updates
            for batch in update.batches
            if (batch.loader, batch.epoch) == (epoch.loader, epoch.epoch)
        )
    )
