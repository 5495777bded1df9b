"""Random draws of a rest beside those of the whole run: augmentation, dropout, generators."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, NamedTuple

from largebatch.audit.resume.aligned import (
    FIELDS,
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

    used: int
    update: int = 0
    """Number of this update, counted from 1; 0 if there is none."""

    names: tuple[str, ...] = ()
    origin: rules.Origin = "other"
    workers_of_one: int = 0

    def before(self, update: int) -> tuple[str, ...]:
        """Return the generators, if their states differ when the draws of an update begin to."""
        return self.names if self.update <= update else ()


@dataclass(slots=True)
class _Draws:
    """Draws of the rest that were compared with those of the whole."""

    number: int = 0
    differing: int = 0
    update: int = 0
    """First update with other draws, counted from 1; 0 if there is none."""

    earlier: int = 0
    """Number of other draws that the whole has before the stop."""

    def add(self, update: int, number: int, other: Sequence[object], known: set[Any]) -> None:
        """Count an update's draws, the other ones among them, and those that are `known`."""
        self.number += number
        self.differing += len(other)
        self.earlier += sum(it in known for it in other)
        if other and (not self.update or update < self.update):
            self.update = update

    def evidence(
        self, states: _States, *, processes: int = 0, follows: tuple[str, ...] = ()
    ) -> rules.Draws:
        """Return these numbers with what is known of the generators."""
        return rules.Draws(
            number=max(self.number, self.differing),
            differing=self.differing,
            update=self.update,
            earlier=self.earlier,
            generators=states.before(self.update),
            origin=states.origin,
            processes=processes,
            follows=follows,
        )


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
        evidence = contents.evidence(
            states,
            processes=resumed.rest[0].workers_of_loader,
            follows=("dropout masks",) if masks.differing else (),
        )
        findings += decide(evidence, rules.AUGMENTATION)
        is_named = is_named or (is_augmented_otherwise and bool(states.names))
    if (masks.number or masks.differing) and not (masks.differing and is_named):
        findings += decide(masks.evidence(states), rules.DROPOUT)
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
                used=number_used,
                update=resumed.stop + number + 1,
                names=tuple(dict.fromkeys(names)),
                origin="start" if of_start else "other",
                workers_of_one=_workers_of_one(resumed, number, set(names)),
            )
    return _States(used=number_used)


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


def _compare_masks(resumed: Resumed) -> _Draws:
    draws = _Draws()
    for rank in resumed.ranks:
        before = resumed.whole[rank].updates[: resumed.stop]
        known = {mask for update in before for mask in update.masks}
        for update, (of_rest, of_whole) in enumerate(resumed.pairs(rank), resumed.stop + 1):
            other = [
                mask
                for mask, expected in zip_longest(of_rest.masks, of_whole.masks)
                if mask != expected
            ]
            draws.add(update, len(of_whole.masks), other, known)
    return draws


def _compare_contents(resumed: Resumed) -> _Draws:
    """Compare samples of equal numbers, or of equal labels, by content."""
    key = key_of(resumed)
    draws = _Draws()
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
                draws.add(update, len(expected.samples), other, known)
    return draws


def _has_other_loss(resumed: Resumed) -> bool:
    """Return True if the loss or gradients of equal states with equal samples differ."""
    for rank in resumed.ranks:
        for of_rest, of_whole in resumed.pairs(rank):
            if not are_equal(of_rest.weights, of_whole.weights):
                break
            if not all(FIELDS[name](of_rest, of_whole) for name in ("loss", "gradients")):
                return True
    return False
