"""What a rest has of the state before the stop: rates, loss scale, weights, optimizer, averages."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise

from largebatch.audit.resume.aligned import (
    FIELDS,
    Resumed,
    Values,
    are_equal,
    distance,
    is_equal,
    size_of,
)
from largebatch.audit.resume.record import Trace, Update
from largebatch.audit.rules import resumed_state as rules
from largebatch.rules import Finding, decide

_SHOWN = 3  # rates of a text

_SAME_RATE = 1e-6
"""Relative difference below which rates are equal: computed in closed form, or step by step."""


def measure_new_run(resumed: Resumed) -> rules.NewRun | None:
    """Return evidence if the rest begins with the state, rates and samples of the whole's begin."""
    resumed_from: list[str] = []
    for rank in resumed.ranks:
        of_rest, of_whole = resumed.pairs(rank)[0]
        start = resumed.whole[rank].updates[0]
        is_new = (
            not are_equal(of_rest.weights, of_whole.weights)
            and are_equal(of_rest.weights, start.weights)
            and are_equal(of_rest.state, start.state)
            and of_rest.rates == start.rates
            and of_rest.epoch == start.epoch
        )
        if not is_new:
            return None
        resumed_from += resumed.rest[rank].resumed_from
    return rules.NewRun(resumed_from=tuple(dict.fromkeys(resumed_from)))


def check_carried(resumed: Resumed) -> list[Finding]:
    """Compare the state before the rest's first update, and the rates of all its updates."""
    weights = _measure_weights(resumed)
    buffers = _measure_buffers(resumed)
    averages = _measure_averages(resumed)
    if weights is not None and weights.is_new:
        # A model that nothing was loaded into has new buffers, and so has its copy.
        if buffers is not None and buffers.is_new:
            buffers = None
        if averages is not None and averages.tensors.is_new:
            averages = None
    if weights is not None and weights.is_rounded and buffers is not None and buffers.is_rounded:
        buffers = None  # saved in the same smaller type
    # An optimizer of other tensors has no state of these.
    has_tensors = weights is None or not weights.missing
    optimizers = range(_optimizers(resumed)) if has_tensors else ()
    states = [_measure_state(resumed, optimizer) for optimizer in optimizers]
    rates = _measure_rates(resumed)
    is_state_lost = any(state is not None and state.tensors.missing for state in states)
    if rates is not None and rates.is_first_only and is_state_lost:
        rates = None  # the state has the rate too, until the scheduler sets another one
    findings = decide(rates, rules.RATES)
    findings += decide(_measure_scale(resumed), rules.LOSS_SCALE)
    findings += decide(weights, rules.WEIGHTS)
    findings += decide(buffers, rules.BUFFERS)
    for state in states:
        findings += decide(state, rules.OPTIMIZER_STATE)
    return findings + decide(averages, rules.AVERAGES)


# Rates.


def _optimizers(resumed: Resumed) -> int:
    return 1 + max(update.optimizer for update in resumed.whole[0].updates)


def _measure_rates(resumed: Resumed) -> rules.Rates | None:
    """Find the first rate that differs on a worker, of any optimizer."""
    evidence = None
    for rank in resumed.ranks:
        for optimizer in range(_optimizers(resumed)):
            evidence = _rates_of(resumed, rank, optimizer)
            if evidence is not None and evidence.update:
                return evidence
    return evidence


def _rates_of(resumed: Resumed, rank: int, optimizer: int) -> rules.Rates | None:
    pairs = [
        (number, of_rest, of_whole)
        for number, (of_rest, of_whole) in enumerate(resumed.pairs(rank))
        if of_rest.optimizer == of_whole.optimizer == optimizer
    ]
    groups = max((len(of_whole.rates) for _, _, of_whole in pairs), default=0)
    for place, (number, of_rest, of_whole) in enumerate(pairs):
        names = [("learning rate", of_rest.rates, of_whole.rates)]
        names += _settings(of_rest, of_whole)
        for name, rates, expected in names:
            differing = [
                group
                for group, pair in enumerate(zip(rates, expected, strict=False))
                if not math.isclose(*pair, rel_tol=_SAME_RATE, abs_tol=1e-30)
            ]
            if not differing:
                continue
            group = differing[0]
            if name != "learning rate":
                return rules.Rates(
                    updates=resumed.number,
                    groups=groups,
                    update=resumed.stop + number + 1,
                    name=name,
                    group=group,
                    differing_groups=len(differing),
                    resumed=(rates[group],),
                    reference=(expected[group],),
                )
            series = _Series(resumed, rank, optimizer, group)
            return series.evidence(place, number, groups, len(differing))
    return rules.Rates(updates=resumed.number, groups=groups) if groups else None


def _settings(
    of_rest: Update, of_whole: Update
) -> list[tuple[str, tuple[float, ...], tuple[float, ...]]]:
    """Return name, values of the rest and of the whole of the numbers that all groups have."""
    if len(of_rest.settings) != len(of_whole.settings) or not of_whole.settings:
        return []
    known = set.intersection(*(set(it) for it in (*of_rest.settings, *of_whole.settings)))
    return [
        (
            name,
            tuple(group[name] for group in of_rest.settings),
            tuple(group[name] for group in of_whole.settings),
        )
        for name in sorted(known - {"initial_lr", "lr"})
    ]


class _Series:
    """Rates of a group in all updates of an optimizer, before and after the stop."""

    def __init__(self, resumed: Resumed, rank: int, optimizer: int, group: int) -> None:
        self._resumed = resumed
        self._rank = rank
        of_whole = resumed.whole[rank].updates
        self._rest = [
            update.rates[group]
            for update in resumed.rest[rank].updates
            if update.optimizer == optimizer and group < len(update.rates)
        ]
        self._whole = [
            update.rates[group]
            for update in of_whole
            if update.optimizer == optimizer and group < len(update.rates)
        ]
        before = of_whole[: resumed.stop]
        self._stop = sum(update.optimizer == optimizer for update in before)

    def evidence(
        self, place: int, number: int, groups: int, differing_groups: int
    ) -> rules.Rates | None:
        """Return what is known of rates that differ from the `place`-th of the rest on."""
        begins_again = self._matches(-self._stop)
        if not self._resumed.is_prefix and not begins_again:
            # The first part has a schedule of its own length, which it saves.
            return None
        following = self._whole[self._stop :]
        later = [*zip(self._rest, following, strict=False)][1:]
        counters = self._counters()
        of_rest, of_whole = self._resumed.pairs(self._rank)[number]
        return rules.Rates(
            updates=self._resumed.number,
            groups=groups,
            update=self._resumed.stop + number + 1,
            differing_groups=differing_groups,
            resumed=tuple(self._rest[place : place + _SHOWN]),
            reference=tuple(following[place : place + _SHOWN]),
            begins_again=begins_again,
            is_first_only=(
                place == 0
                and counters is None
                and len(later) > 0
                and all(math.isclose(*pair, rel_tol=_SAME_RATE, abs_tol=1e-30) for pair in later)
            ),
            warms_up=self._rises_again(begins_again=begins_again),
            shift=self._shift(),
            counters=counters,
            is_after_weights=(
                number > 0
                and counters is None
                and not begins_again
                and not are_equal(of_rest.weights, of_whole.weights)
            ),
            moves=self._moves(of_whole=False),
            moves_of_whole=self._moves(of_whole=True),
        )

    def _matches(self, shift: int) -> bool:
        """Return True if the rest has the rates that the whole has `shift` updates later.

        The first rate may be the optimizer's own, which it loads.
        """
        pairs = [
            (rate, self._whole[number + self._stop + shift])
            for number, rate in enumerate(self._rest)
            if 0 <= number + self._stop + shift < len(self._whole)
        ]
        if len(pairs) > 2:
            pairs = pairs[1:]
        return len(pairs) >= min(2, len(self._rest)) and all(
            math.isclose(*pair, rel_tol=_SAME_RATE, abs_tol=1e-30) for pair in pairs
        )

    def _shift(self) -> int | None:
        shifts = range(-self._stop, len(self._whole) - self._stop)
        return next((it for it in sorted(shifts, key=abs) if it and self._matches(it)), None)

    def _rises_again(self, *, begins_again: bool) -> bool:
        if begins_again:
            # Only at its beginning: a schedule with restarts rises later too.
            return any(before < after for before, after in pairwise(self._rest[:3]))
        following = self._whole[self._stop :]
        parts = [
            rate / expected
            for rate, expected in zip(self._rest, following, strict=False)
            if expected > 0
        ]
        rises = all(before <= after * (1 + _SAME_RATE) for before, after in pairwise(parts))
        return len(parts) > 1 and rises and parts[0] < parts[-1] and parts[-1] <= 1 + _SAME_RATE

    def _counters(self) -> tuple[int, int] | None:
        for of_rest, of_whole in self._resumed.pairs(self._rank):
            for pair in zip(of_rest.schedules, of_whole.schedules, strict=False):
                if pair[0] != pair[1]:
                    return pair
        return None

    def _moves(self, *, of_whole: bool) -> int:
        """Count the moves of schedulers between the updates after the stop."""
        run = self._resumed.whole if of_whole else self._resumed.rest
        worker = run[self._rank]
        updates = [*worker.updates[(self._resumed.stop if of_whole else 0) + 1 :]]
        if worker.end is not None:
            updates.append(worker.end)
        return sum(update.schedule_moves for update in updates)


def _measure_scale(resumed: Resumed) -> rules.Scale | None:
    """Compare the loss scale in the first update that differs in it, from equal weights."""
    evidence = None
    for rank in resumed.ranks:
        at_start = resumed.whole[rank].updates[0].scale
        first = [*resumed.starts(rank)][:1]
        for of_rest, of_whole in (*first, *resumed.pairs(rank)[1:]):
            if of_rest.scale is None and of_whole.scale is None:
                continue
            if of_rest.number and not are_equal(of_rest.weights, of_whole.weights):
                break
            evidence = rules.Scale(
                resumed=of_rest.scale,
                reference=of_whole.scale,
                at_start=at_start,
                growth=of_rest.scale_growth,
                reference_growth=of_whole.scale_growth,
            )
            if of_rest.scale != of_whole.scale or of_rest.scale_growth != of_whole.scale_growth:
                return evidence
    return evidence


# Tensors.


def _compare(
    of_rest: Values, of_whole: Values, *, history: Sequence[Values], copies: Values, stop: int
) -> rules.Restored:
    """Compare values of the rest's first update with those of the whole there.

    `history` has those of the whole before each of its updates, `copies` the tensors that they
    could be by mistake.
    """
    missing = tuple(name for name in of_whole if name not in of_rest)
    unequal = tuple(
        name
        for name, value in of_whole.items()
        if name in of_rest and not is_equal(of_rest[name], value)
    )
    others = [
        number
        for number, values in enumerate(history)
        if number != stop
        and unequal
        and all(name in values and is_equal(of_rest[name], values[name]) for name in unequal)
    ]
    digests = {name: it.digest for name, it in of_whole.items() if isinstance(it, Trace)}
    return rules.Restored(
        number=len(of_whole),
        missing=missing,
        unequal=unequal,
        initial=sum(
            name in history[0] and is_equal(of_rest[name], history[0][name]) for name in unequal
        ),
        copied=sum(name in copies and is_equal(of_rest[name], copies[name]) for name in unequal),
        zeros=sum(size_of(of_rest[name]) == 0 for name in unequal),
        exchanged=sum(
            isinstance(value := of_rest[name], Trace)
            and any(value.digest == digest for other, digest in digests.items() if other != name)
            for name in unequal
        ),
        other_update=min(others, key=lambda it: abs(it - stop), default=None),
        expected_update=stop,
        distance=distance(
            {name: of_rest[name] for name in unequal}, {name: of_whole[name] for name in unequal}
        ),
    )


def _worst(results: Sequence[rules.Restored]) -> rules.Restored | None:
    """Return the result of the first worker with a difference, and name such workers."""
    wrong = [rank for rank, result in enumerate(results) if result.wrong]
    if not wrong:
        return results[0] if results else None
    some = tuple(wrong) if len(wrong) < len(results) else ()
    return replace(results[wrong[0]], workers=some)


def _measure_weights(resumed: Resumed) -> rules.Restored | None:
    results = []
    for rank in resumed.ranks:
        of_rest, of_whole = next(resumed.starts(rank))
        averages = {_own_name(name): value for name, value in of_whole.averages.items()}
        history = [update.weights for update in resumed.whole[rank].updates]
        result = _compare(
            of_rest.weights, of_whole.weights, history=history, copies=averages, stop=resumed.stop
        )
        results.append(_with_keys(result, resumed, rank))
    return _worst(results)


def _measure_buffers(resumed: Resumed) -> rules.Restored | None:
    results = []
    _, of_worker_0 = next(resumed.starts(0))
    for rank in resumed.ranks:
        of_rest, of_whole = next(resumed.starts(rank))
        history = [update.buffers for update in resumed.whole[rank].updates]
        result = _compare(
            of_rest.buffers,
            of_whole.buffers,
            history=history,
            copies=of_worker_0.buffers if rank else {},
            stop=resumed.stop,
        )
        if result.is_copied and _are_sent(resumed, rank):
            result = replace(result, unequal=())
        results.append(_with_keys(result, resumed, rank))
    worst = _worst(results)
    return worst if worst is not None and worst.number else None


def _are_sent(resumed: Resumed, rank: int) -> bool:
    """Return True if a worker's buffers are those of the whole after a pass: a wrapper sends them.

    DistributedDataParallel sends worker 0's before each pass.
    """
    following = resumed.pairs(rank)[1:2]
    return bool(following) and are_equal(following[0][0].buffers, following[0][1].buffers)


def _with_keys(result: rules.Restored, resumed: Resumed, rank: int) -> rules.Restored:
    """Add the keys that the rest's load_state_dict left out, and the whole's did not."""
    of_rest = resumed.rest[rank]
    of_whole = resumed.whole[rank]
    return replace(
        result,
        missing_keys=tuple(it for it in of_rest.missing_keys if it not in of_whole.missing_keys),
        unused_keys=tuple(
            it for it in of_rest.unexpected_keys if it not in of_whole.unexpected_keys
        ),
    )


def _own_name(name: str) -> str:
    """Return the name in the model of a tensor of an average: `number:name`."""
    return name.partition(":")[2]


def _measure_state(resumed: Resumed, optimizer: int) -> rules.OptimizerState | None:
    results = []
    first: tuple[Update, Update] | None = None
    for rank in resumed.ranks:
        for of_rest, of_whole in resumed.starts(rank):
            if of_rest.optimizer != optimizer:
                continue
            history = [
                update.state if update.optimizer == optimizer else {}
                for update in resumed.whole[rank].updates
            ]
            results.append(
                _compare(
                    of_rest.state, of_whole.state, history=history, copies={}, stop=resumed.stop
                )
            )
            if first is None or (results[-1].wrong and not any(it.wrong for it in results[:-1])):
                first = of_rest, of_whole
    worst = _worst(results)
    if worst is None or first is None:
        return None
    of_rest, of_whole = first
    if not worst.number and of_rest.sizes == of_whole.sizes:
        return None
    wrong = (*worst.missing, *worst.unequal)
    return rules.OptimizerState(
        tensors=worst,
        keys=tuple(dict.fromkeys(_key(name) for name in wrong)),
        sizes=of_rest.sizes,
        reference_sizes=of_whole.sizes,
        parameters=len({_parameter(name) for name in worst.missing}),
        parameters_with_state=len({_parameter(name) for name in of_whole.state}),
        steps=_steps(of_rest.state, of_whole.state, wrong),
        optimizer=optimizer,
        optimizers=_optimizers(resumed),
    )


def _parameter(name: str) -> str:
    return name.rpartition(":")[0]


def _key(name: str) -> str:
    return name.rpartition(":")[2]


def _steps(of_rest: Values, of_whole: Values, names: Iterable[str]) -> tuple[float, float] | None:
    for name in names:
        if _key(name) == "step" and name in of_rest:
            return size_of(of_rest[name]), size_of(of_whole[name])
    return None


def _measure_averages(resumed: Resumed) -> rules.Averages | None:
    """Compare averages in the first update for which both runs have some."""
    results = []
    counts: list[tuple[int | None, int | None]] = []
    parting = 0
    for rank in resumed.ranks:
        pairs = [*[*resumed.starts(rank)][:1], *resumed.pairs(rank)[1:]]
        if (ends := resumed.ends(rank)) is not None:
            pairs.append(ends)
        with_one = [(of_rest, of_whole) for of_rest, of_whole in pairs if of_whole.averages]
        if not with_one:
            continue
        of_rest, of_whole = next((pair for pair in with_one if pair[0].averages), with_one[0])
        copies = {
            name: of_rest.weights[_own_name(name)]
            for name in of_whole.averages
            if _own_name(name) in of_rest.weights
        }
        history = [update.averages for update in resumed.whole[rank].updates]
        results.append(
            _compare(
                of_rest.averages,
                of_whole.averages,
                history=history,
                copies=copies,
                stop=resumed.stop,
            )
        )
        counts.append((of_rest.averaged_updates, of_whole.averaged_updates))
        parting = parting or _parting(pairs, resumed.stop)
    worst = _worst(results)
    if worst is None:
        return None
    if all(name.startswith("0:") for name in (*worst.missing, *worst.unequal)):
        worst = replace(
            worst,
            missing=tuple(map(_own_name, worst.missing)),
            unequal=tuple(map(_own_name, worst.unequal)),
        )
    count, expected = next((it for it in counts if it[0] != it[1]), counts[0])
    return rules.Averages(tensors=worst, count=count, reference_count=expected, parting=parting)


def _parting(pairs: Sequence[tuple[Update, Update]], stop: int) -> int:
    """Return the updates after which averages differ, where all weights were equal until then."""
    for number, (of_rest, of_whole) in enumerate(pairs):
        if not are_equal(of_rest.weights, of_whole.weights):
            return 0
        if not FIELDS["averages"](of_rest, of_whole):
            return stop + number
    return 0
