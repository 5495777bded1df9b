"""Compare the rest of a resumed run with the same updates of a run without a stop.

The state before the rest's first update, and each of its updates, have causes of their own: samples
that are read, draws, rates, tensors that were not loaded. A cause is named once; what follows from
it is not a second fault. Only where no cause was found is the difference of the updates one.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

from largebatch.audit.findings import Findings
from largebatch.audit.resume import carried
from largebatch.audit.resume.aligned import (
    FIELDS,
    Resumed,
    are_equal,
    contents_of,
    distance,
    other_generators,
)
from largebatch.audit.resume.draws import check_draws
from largebatch.audit.resume.reading import first_place, measure_orders, measure_reading
from largebatch.audit.resume.record import Run, Update, Worker
from largebatch.audit.rules import resume as rules
from largebatch.audit.rules import resumed_data, resumed_state
from largebatch.audit.rules.data import ORDERS
from largebatch.formatting import plural
from largebatch.rules import Finding, decide


@dataclass(frozen=True, slots=True)
class Resumption(Findings):
    """Findings of an audit of a resumption."""

    updates: int = 0
    """Number of updates of the rest that were compared with those of the whole."""

    difference: float = math.nan
    """Largest relative distance of a weight after the last update; NaN if it is not known."""

    @property
    def is_compared(self) -> bool:
        """True if the weights of all updates of the rest could be compared."""
        unknown = {finding.check for finding in self if finding.level == "unknown"}
        return self.updates > 0 and unknown.isdisjoint({"first part", "weights"})

    def _verdict(self) -> str:
        updates = plural(self.updates, "update")
        faults = plural(len(self.faults), "fault")
        if not self.is_compared:
            return faults if self.faults else "not compared"
        if self.faults and self.difference == 0:
            return f"{faults}; the weights of {updates} after the stop are equal"
        if self.faults:
            apart = f", weights up to {100 * self.difference:.2g} % apart after {updates}"
            return f"not the same training: {faults}{apart if self.difference > 0 else ''}"
        if self.difference == 0:
            how = "bit for bit"
        else:
            how = "within rounding" if self.difference < rules.WITHIN_ROUNDING else "not to the bit"
        return f"the same training: {updates} compared, {how}"


def compare(whole: Run, repeat: Run, first: Run, rest: Run) -> Resumption:
    """Compare the updates of a rest with those of the whole run.

    Args:
        whole: Workers of a run without a stop.
        repeat: The same run again. Without equal repeats nothing is compared.
        first: Workers of the first part, which saves.
        rest: Workers of the run that resumes; their number may be another.
    """
    repeated = decide(_first_difference(whole, repeat), rules.REPEATED_RUN)
    if repeated[0].level != "fine":
        return Resumption(tuple(repeated))
    if numbers := decide(_count(whole, first, rest), rules.NUMBERS_OF_UPDATES):
        return Resumption(tuple(numbers))
    window = _open_window(whole, first, rest)
    if window:
        rest = _with_window(first, rest)
    beginning = _first_difference(whole, first, of_first=True)
    findings = [*repeated, *decide(beginning, rules.FIRST_PART)]
    resumed = Resumed(whole=whole, first=first, rest=rest, is_prefix=beginning.cause is None)
    if new := decide(carried.measure_new_run(resumed), resumed_state.NEW_RUN):
        return _resumption(resumed, [*findings, *new])
    order = measure_reading(resumed)
    findings += decide(order, resumed_data.SAMPLES)
    findings += decide(measure_orders(whole), ORDERS)
    findings += carried.check_carried(resumed)
    findings += _check_files(resumed, repeat)
    findings += check_draws(resumed, order, findings)
    if resumed.is_prefix and not any(it.level == "fault" for it in findings):
        findings += decide(_measure_course(resumed, window), rules.COURSE)
    return _resumption(resumed, findings)


def _resumption(resumed: Resumed, findings: Sequence[Finding]) -> Resumption:
    return Resumption(
        tuple(findings),
        updates=resumed.number,
        difference=_last_distance(resumed),
    )


def _count(whole: Run, first: Run, rest: Run) -> rules.NumbersOfUpdates:
    resumed = Resumed(whole=whole, first=first, rest=rest, is_prefix=True)
    return rules.NumbersOfUpdates(
        whole=len(whole[0].updates),
        first=resumed.stop,
        rest=resumed.number,
        begins_at=first_place(resumed),
    )


# Runs that must be equal.


def _first_difference(whole: Run, other: Run, *, of_first: bool = False) -> rules.FirstDifference:
    """Find the first update in which a run differs from the whole, or from its beginning."""
    updates = len(other[0].updates)
    expected = updates if of_first else len(whole[0].updates)
    for number in range(min(updates, expected)):
        pairs = [
            (of_whole.updates[number], of_other.updates[number])
            for of_whole, of_other in zip(whole, other, strict=False)
            if number < min(len(of_whole.updates), len(of_other.updates))
        ]
        fields = tuple(
            name for name, equal in FIELDS.items() if not all(equal(*pair) for pair in pairs)
        )
        if fields:
            generators = [other_generators(*pair, pair[0].generators) for pair in pairs]
            return rules.FirstDifference(
                updates=number,
                update=number + 1,
                fields=fields,
                generators=tuple(dict.fromkeys(chain.from_iterable(generators))),
                processes=whole[0].workers_of_loader,
            )
    if updates != expected:
        return rules.FirstDifference(
            updates=updates, update=min(updates, expected) + 1, fields=("number of updates",)
        )
    return rules.FirstDifference(updates=updates)


def _open_window(whole: Run, first: Run, rest: Run) -> int:
    """Return how many batches the first part read after its last update, for the rest's first one.

    0 if there are none, or if the rest reads that update's batches again from the first.
    """
    end = first[0].end
    if end is None or not end.batches or len(first) != len(rest):
        return 0
    window = whole[0].updates[len(first[0].updates)].batches
    following = [*end.batches, *rest[0].updates[0].batches]
    return len(end.batches) if contents_of(following) == contents_of(window) else 0


def _with_window(first: Run, rest: Run) -> Run:
    """Add the batches behind the first part's last update to the rest's first one."""
    workers = []
    for before, after in zip(first, rest, strict=True):
        pending = () if before.end is None else before.end.batches
        update = replace(after.updates[0], batches=(*pending, *after.updates[0].batches))
        workers.append(replace(after, updates=(update, *after.updates[1:])))
    return tuple(workers)


# What follows.


def _states(resumed: Resumed, rank: int) -> list[tuple[Update, Update]]:
    """Return the states of rest and whole before each update, and after the last one."""
    states = resumed.pairs(rank)
    if (ends := resumed.ends(rank)) is not None:
        states.append(ends)
    return states


def _check_files(resumed: Resumed, repeat: Run) -> list[Finding]:
    """Find a file that the rest writes where the whole does not, or the reverse.

    Only states with equal weights are compared: other weights have other metrics.
    """
    for rank in resumed.ranks:
        written = _files_of(resumed.whole[rank])
        # Names of temporary files are new in each run.
        known = set(chain(*written)) & set(chain(*_files_of(repeat[rank])))
        for number, (of_rest, of_whole) in enumerate(_states(resumed, rank)):
            # What is written before the rest's first update belongs to its start.
            if number == 0 or not are_equal(of_rest.weights, of_whole.weights):
                continue
            of_state = {file.name for file in of_rest.saved}
            names = (of_state ^ {file.name for file in of_whole.saved}) & known
            if not names:
                continue
            name = min(names)
            update = resumed.stop + number
            evidence = rules.BestCheckpoint(
                name=name,
                update=update,
                last=max((it for it in range(update) if name in written[it]), default=None),
                is_written=name in of_state,
            )
            return decide(evidence, rules.BEST_CHECKPOINT)
    return []


def _files_of(worker: Worker) -> list[set[str]]:
    """Return the names of the files that were written before each update, and after the last."""
    updates = [*worker.updates, *([] if worker.end is None else [worker.end])]
    return [{file.name for file in update.saved} for update in updates]


_WITHIN: tuple[rules.Field, ...] = ("loss", "gradients")
_AFTER: tuple[rules.Field, ...] = ("optimizer state", "weights", "buffers", "averages")


def _measure_course(resumed: Resumed, window: int) -> rules.Course:
    """Find the first update whose weights, loss or gradients differ."""
    for number in range(resumed.number):
        fields: set[rules.Field] = set()
        for rank in resumed.ranks:
            states = _states(resumed, rank)
            fields |= _differing(states[number], _WITHIN)
            if number + 1 < len(states):
                fields |= _differing(states[number + 1], _AFTER)
        if fields:
            return rules.Course(
                updates=resumed.number,
                update=resumed.stop + number + 1,
                fields=tuple(name for name in (*_WITHIN, *_AFTER) if name in fields),
                distance=_last_distance(resumed),
                is_exact=resumed.is_exact,
                window=window if number == 0 else 0,
                draws=() if resumed.is_exact else _draws_by_design(resumed),
            )
    return rules.Course(updates=resumed.number)


def _differing(states: tuple[Update, Update], fields: Sequence[rules.Field]) -> set[rules.Field]:
    return {name for name in fields if not FIELDS[name](*states)}


def _draws_by_design(resumed: Resumed) -> tuple[str, ...]:
    """Return what depends on the number of workers or on their batches, so that weights differ."""
    updates = resumed.whole[0].updates
    augmented = {it for update in updates for batch in update.batches for it in batch.samples}
    names = []
    if any("running_mean" in name for name in updates[0].buffers):
        names.append("BatchNorm's statistics")
    if any(update.masks for update in updates):
        names.append("dropout masks")
    following = chain.from_iterable(
        batch.samples for worker in resumed.rest for it in worker.updates for batch in it.batches
    )
    if any(digest not in augmented for digest in following):
        names.append("augmentation")
    return tuple(names)


def _last_distance(resumed: Resumed) -> float:
    """Return the largest relative distance of a weight in the last states that were seen."""
    distances = [0.0]
    for rank in resumed.ranks:
        of_rest, of_whole = _states(resumed, rank)[-1]
        if not are_equal(of_rest.weights, of_whole.weights):
            distances.append(distance(of_rest.weights, of_whole.weights))
    return math.nan if any(map(math.isnan, distances)) else max(distances)
