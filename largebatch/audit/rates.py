"""Measure learning rates, the warm-up, the number of updates and weight decay of a run."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ConstantLR, LinearLR, SequentialLR

from largebatch.audit.ranks import Ranks, StoppedError
from largebatch.audit.recording import ScheduleStep, ScriptUpdate
from largebatch.audit.rules import rates as rules
from largebatch.audit.subject import Subject
from largebatch.models import norm_parameters
from largebatch.rules import Finding, decide

_FASTEST = 9
"""Moves of a schedule an update below which all are tried, whatever the numbers of the script."""

_MOST_UPDATES = 100_000  # largest number of updates at which the schedule is read

Rate = Callable[[int], float]


def check_rates(
    subject: Subject,
    updates: Sequence[ScriptUpdate],
    ranks: Ranks,
    steps: Sequence[ScheduleStep] = (),
) -> list[Finding]:
    """Check learning rates and the plan of the run; `updates` are the first of the script, `steps`
    those of torch's schedulers in them.
    """
    if not updates:
        return []
    samples = max(update.samples for update in updates)  # not those of an epoch's last batch
    micros = max(update.micros for update in updates)
    batch = sum(ranks.gather(samples))
    compare = partial(_compare, subject, updates, batch, micros, ranks.size, steps)
    remedy = "`rate` must return a number for each update of the run, counted from 0"
    try:
        return ranks.attempt("warm-up", "comparing the rates", compare, remedy=remedy)
    except StoppedError as stopped:  # the other findings on these updates are kept
        return [stopped.finding]


def _compare(
    subject: Subject,
    updates: Sequence[ScriptUpdate],
    batch: int,
    micros: int,
    workers: int,
    steps: Sequence[ScheduleStep],
) -> list[Finding]:
    """Return the findings of one worker, whose script computes the planned rates."""
    findings: list[Finding] = []
    number = 0  # of the updates of the run, if it is known
    if subject.epochs and micros:
        number = round(_batches_of(subject.loader) / micros * subject.epochs)
    rate = subject.rate
    planned = [rate(update) for update in range(min(number, _MOST_UPDATES))] if rate else []
    if subject.base and batch:
        peak = max(planned) if planned else _peak(subject.optimizer, [it.rate for it in updates])
        findings += decide(_measure_peak(peak, batch, subject.base, subject.optimizer), rules.PEAK)
    if rate:
        factors = {*range(2, _FASTEST), workers, micros, workers * micros} - {1}
        findings += decide(_measure_schedule(updates, rate, factors), rules.SCHEDULE)
    else:
        findings += _check_moves(subject, steps, updates, micros, number, workers)
    if number and subject.epochs:
        if planned:
            growth = batch / subject.base[0] if subject.base else 1.0
            warm_up = _measure_warm_up(planned, number / subject.epochs, growth)
            findings += decide(warm_up, rules.WARM_UP)
        findings += decide(rules.Length(number, subject.epochs), rules.LENGTH)
    return findings + decide(_measure_decay(subject.inner, subject.optimizer), rules.DECAY)


def _batches_of(loader: Any) -> int:  # noqa: ANN401 -- any loader
    """Return the number of batches of an epoch; 0 if it is not known."""
    return len(loader) if hasattr(loader, "__len__") else 0


def require_base(base: tuple[float, float]) -> None:
    """Raise ValueError unless `base` is a global batch and a rate, in this order."""
    is_pair = isinstance(base, tuple | list) and len(base) == 2
    if not is_pair or not base[0] >= 1 or base[0] % 1 or not 0 < base[1] < math.inf:
        raise ValueError(f"base is {base}; expected (global batch, rate), such as (256, 0.1)")


def _peak(optimizer: Optimizer, measured: Sequence[float]) -> float:
    """Return the largest rate of a run as far as its schedulers know it; NaN if rates rise.

    A scheduler of torch keeps `initial_lr`, from which OneCycleLR rises to `max_lr`.
    """
    keys = ("initial_lr", "max_lr")
    known = [float(it[key]) for it in optimizer.param_groups for key in keys if key in it]
    if not known and max(measured) > measured[0] * (1 + rules.SAME):
        return math.nan
    return max([*known, *measured])


def _measure_peak(
    peak: float, batch: int, base: tuple[int, float], optimizer: Optimizer
) -> rules.Peak:
    return rules.Peak(
        rate=peak,
        batch=batch,
        momentum=optimizer.param_groups[0].get("momentum", math.nan),
        is_adaptive="Adam" in type(optimizer).__name__,
        base_batch=base[0],
        base_rate=base[1],
    )


def _measure_schedule(
    updates: Sequence[ScriptUpdate], rate: Rate, factors: set[int]
) -> rules.FirstRates:
    """Compare the rates of the first updates with `rate`; find how often the schedule moves.

    It may move when a GradScaler skips an update, too. If it moves several times an update, the
    first update comes before that, or after all of these moves but one.
    """
    measured = tuple(update.rate for update in updates)
    attempts = [update.attempt for update in updates]

    def equal(places: Sequence[int]) -> bool:
        pairs = zip(measured, map(rate, places), strict=True)
        return all(math.isclose(*pair, rel_tol=rules.SAME, abs_tol=1e-12) for pair in pairs)

    def moves() -> int:
        if equal(range(len(measured))) or equal(attempts):
            return 1
        for times in sorted(factors if len(measured) > 1 else ()):  # one rate shows no speed
            if any(equal([times * it + late for it in attempts]) for late in (0, times - 1)):
                return times
        return 0

    planned = tuple(map(rate, range(len(measured))))
    return rules.FirstRates(measured=measured, planned=planned, times=moves())


def _check_moves(
    subject: Subject,
    steps: Sequence[ScheduleStep],
    updates: Sequence[ScriptUpdate],
    micros: int,
    number: int,
    workers: int,
) -> list[Finding]:
    """Count how often torch's schedulers move in an update, without the planned rates.

    `number` is that of the updates in the run, 0 if it is not known.
    """
    counted = [it for it in steps if not it.is_placed]
    first = updates[0].attempt
    last = updates[-1].attempt
    # Only between two updates are all moves of an update seen, whether they come after it or before
    # the next one; the audit may begin and end between them.
    between = [it for it in counted if first < it.updates <= last]
    if not between:
        placed = "" if counted or not steps else type(steps[0].scheduler).__name__
        no_moves = rules.NoMoves(updates=len(updates), placed=placed, has_moves=bool(steps))
        return decide(no_moves, rules.NO_MOVES)
    of_updates = Counter((id(it.scheduler), it.updates) for it in between)
    of_passes = Counter((id(it.scheduler), it.updates, it.passes) for it in between)
    (mover, _), times = of_updates.most_common(1)[0]
    step = next(it for it in between if id(it.scheduler) == mover)
    moves = rules.SchedulerMoves(
        scheduler=type(step.scheduler).__name__,
        times=times,
        in_a_row=max(of_passes.values()),
        is_of_accelerate=step.is_of_accelerate,
        length=_length_of(step.scheduler),
        updates=number,
        epochs=subject.epochs or math.nan,
        batches=_batches_of(subject.loader),
        micros=micros,
        workers=workers,
    )
    return decide(moves, rules.MOVES)


def _length_of(scheduler: Any) -> int:  # noqa: ANN401 -- each class has attributes of its own
    """Return the number of steps that a scheduler of torch is made for; 0 if it is not known."""
    if isinstance(scheduler, SequentialLR):
        last = _length_of(scheduler._schedulers[-1])
        return last and scheduler._milestones[-1] + last
    if isinstance(scheduler, (LinearLR, ConstantLR)):  # of a warm-up as often as of a run
        return 0
    for name in ("total_steps", "T_max", "total_iters"):
        if isinstance(length := getattr(scheduler, name, None), int):
            return length
    functions = getattr(scheduler, "lr_lambdas", ())  # Transformers' are partials
    words = [getattr(it, "keywords", {}).get("num_training_steps") for it in functions]
    return words[0] if words and isinstance(words[0], int) else 0


def _measure_warm_up(
    rates: Sequence[float], updates_an_epoch: float, growth: float
) -> rules.WarmUp:
    peak = max(rates)
    updates = next(place for place, it in enumerate(rates) if it >= (1 - rules.SAME) * peak)
    return rules.WarmUp(
        updates=updates,
        epochs=updates / updates_an_epoch,
        start=rates[0] / peak if peak else 1.0,
        growth=growth,
    )


def _measure_decay(model: nn.Module, optimizer: Optimizer) -> rules.DecayedTensors:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    plain = {p for p in trained if p.ndim <= 1} | norm_parameters(model)
    decayed = {
        parameter: group["weight_decay"]
        for group in optimizer.param_groups
        for parameter in group["params"]
        if group.get("weight_decay")
    }
    wrong = [decay for parameter, decay in decayed.items() if parameter in plain]
    return rules.DecayedTensors(
        decayed=len(decayed), plain=len(plain), wrong=len(wrong), most=max(wrong, default=0.0)
    )
