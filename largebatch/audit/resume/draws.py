"""Random draws of a rest beside those of the whole run: augmentation, dropout, generators."""

from collections.abc import Sequence
from itertools import zip_longest
from typing import NamedTuple

from largebatch.audit.resume.aligned import (
    Resumed,
    are_equal,
    other_generators,
    used_generators,
)
from largebatch.audit.resume.reading import key_of
from largebatch.audit.rules import resumed_data as rules
from largebatch.rules import Finding, decide


class _States(NamedTuple):
    """Generators whose states differ in the first update where one that is used does."""

    names: tuple[str, ...]
    used: int
    origin: rules.Origin
    workers_of_one: int


class _Contents(NamedTuple):
    """Samples with equal numbers that were compared by content."""

    number: int
    differing: int
    update: int
    earlier: int


class _Masks(NamedTuple):
    """Masks of dropout layers."""

    number: int
    differing: int
    update: int
    earlier: int


def check_draws(
    resumed: Resumed, reading: rules.Reading, earlier: Sequence[Finding]
) -> list[Finding]:
    """Compare augmented samples, dropout masks and the states of generators.

    On other workers or batches these differ by design, and are not compared; nor are augmented
    samples where the order of samples differs. A fault of `earlier` findings explains updates that
    differ otherwise.
    """
    if not resumed.is_exact:
        return []
    states = _compare_states(resumed)
    masks = _compare_masks(resumed)
    contents = _compare_contents(resumed) if reading.is_ordered else None
    is_augmented_otherwise = contents is not None and contents.differing > 0
    effects = ["augmentation"] if is_augmented_otherwise else []
    if masks.differing:
        effects.append("dropout masks")
    generators = rules.Generators(
        names=states.names,
        used=states.used,
        workers_of_one=states.workers_of_one,
        workers=len(resumed.whole),
        follows=tuple(effects),
        is_unexplained=(
            not effects
            and not any(finding.level == "fault" for finding in earlier)
            and _has_other_loss(resumed)
        ),
    )
    if states.workers_of_one and effects:
        return decide(generators, rules.RANDOM_NUMBERS)
    # Whatever is drawn from one generator has one cause, which is named with its first effect.
    is_named = bool(states.names) and reading.is_drawn
    findings: list[Finding] = []
    if contents is not None and contents.number:
        evidence = rules.Draws(
            number=contents.number,
            differing=contents.differing,
            update=contents.update,
            earlier=contents.earlier,
            generators=states.names,
            origin=states.origin,
            processes=resumed.rest[0].workers_of_loader,
            follows=("dropout masks",) if masks.differing else (),
        )
        findings += decide(evidence, rules.AUGMENTATION)
        is_named = is_named or (is_augmented_otherwise and bool(states.names))
    if masks.number and not (masks.differing and is_named):
        evidence = rules.Draws(
            number=masks.number,
            differing=masks.differing,
            update=masks.update,
            earlier=masks.earlier,
            generators=states.names,
            origin=states.origin,
        )
        findings += decide(evidence, rules.DROPOUT)
    if states.used and not effects and not is_named:
        findings += decide(generators, rules.RANDOM_NUMBERS)
    return findings


def _compare_states(resumed: Resumed) -> _States:
    """Compare the generators that the whole draws from, in the first update where one differs."""
    used = {rank: used_generators(resumed.whole[rank].updates) for rank in resumed.ranks}
    number_used = max(map(len, used.values()))
    for number in range(resumed.number):
        names: list[str] = []
        of_start = True
        for rank in resumed.ranks:
            of_rest, of_whole = resumed.pairs(rank)[number]
            differing = other_generators(of_rest, of_whole, used[rank])
            names += differing
            start = resumed.whole[rank].updates[number].generators
            of_start = of_start and all(
                of_rest.generators[name] == start.get(name) for name in differing
            )
        if names:
            return _States(
                names=tuple(dict.fromkeys(names)),
                used=number_used,
                origin="start" if of_start else "other",
                workers_of_one=_workers_of_one(resumed, number, set(names)),
            )
    return _States((), number_used, "other", 0)


def _workers_of_one(resumed: Resumed, number: int, names: set[str]) -> int:
    """Count the workers that have worker 0's states, where the whole has others."""
    states = resumed.rest[0].updates[number].generators
    expected = resumed.pairs(0)[number][1].generators
    workers = 0
    for rank in resumed.ranks[1:]:
        of_rest, of_whole = resumed.pairs(rank)[number]
        workers += any(
            of_rest.generators.get(name) == states.get(name)
            and of_whole.generators.get(name) != expected.get(name)
            for name in names
        )
    return workers


def _compare_masks(resumed: Resumed) -> _Masks:
    number = 0
    differing = 0
    first = 0
    earlier = 0
    for rank in resumed.ranks:
        before = resumed.whole[rank].updates[: resumed.stop]
        known = {mask for update in before for mask in update.masks}
        for update, (of_rest, of_whole) in enumerate(resumed.pairs(rank), resumed.stop + 1):
            number += len(of_whole.masks)
            other = [
                mask
                for mask, expected in zip_longest(of_rest.masks, of_whole.masks)
                if mask != expected
            ]
            if other and (not first or update < first):
                first = update
            differing += len(other)
            earlier += sum(mask in known for mask in other)
    return _Masks(max(number, differing), differing, first, earlier)


def _compare_contents(resumed: Resumed) -> _Contents:
    """Compare samples of equal numbers, or of equal labels, by content."""
    key = key_of(resumed)
    number = 0
    differing = 0
    first = 0
    earlier = 0
    for rank in resumed.ranks:
        known = {
            pair
            for update in resumed.whole[rank].updates[: resumed.stop]
            for batch in update.batches
            for pair in zip(key(batch), batch.samples, strict=False)
        }
        for update, (of_rest, of_whole) in enumerate(resumed.pairs(rank), resumed.stop + 1):
            for batch, expected in zip(of_rest.batches, of_whole.batches, strict=False):
                other = [
                    (name, sample)
                    for name, sample, reference in zip(
                        key(batch), batch.samples, expected.samples, strict=False
                    )
                    if sample != reference
                ]
                number += len(expected.samples)
                differing += len(other)
                earlier += sum(pair in known for pair in other)
                if other and (not first or update < first):
                    first = update
    return _Contents(number, differing, first, earlier)


def _has_other_loss(resumed: Resumed) -> bool:
    """Return True if the loss or gradients of equal states with equal samples differ."""
    for rank in resumed.ranks:
        for of_rest, of_whole in resumed.pairs(rank):
            if not are_equal(of_rest.weights, of_whole.weights):
                break
            is_equal = of_rest.loss == of_whole.loss
            if not is_equal or not are_equal(of_rest.gradients, of_whole.gradients):
                return True
    return False
