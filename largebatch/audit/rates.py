"""Learning rate, warm-up, number of updates and weight decay against rules for large batches.

Rules: the rate grows with the batch (Goyal et al., arXiv:1706.02677, for SGD) or with its square
root (Krizhevsky, arXiv:1404.5997; Malladi et al., arXiv:2205.10782, for Adam). Goyal's warm-up
takes 5 epochs and begins at the rate of the small batch. Normalisation and biases have no decay in
MLPerf's rules, and BatchNorm has none in Goyal's.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ConstantLR, LinearLR, SequentialLR

from largebatch.audit.findings import Finding, fault, fine, note, unknown
from largebatch.audit.ranks import Ranks, StoppedError
from largebatch.audit.recording import ScheduleStep, Update
from largebatch.audit.subject import Subject
from largebatch.formatting import plural, three_digits
from largebatch.models import norm_parameters
from largebatch.recipe.installed import FEWEST_UPDATES

_WARM_UP_EPOCHS = 5  # length of the warm-up of Goyal et al., section 2.2

_MARGIN = 1.5  # factor outside the two rules at which a rate is noted: searches usually step by 2

_SAME = 1e-6  # relative difference of equal rates: they are computed in float64 in another order

_FASTEST = 9
"""Moves of a schedule an update below which all are tried, whatever the numbers of the script."""

_MOST_UPDATES = 100_000  # largest number of updates at which the schedule is read

Rate = Callable[[int], float]


def check_rates(
    subject: Subject,
    updates: Sequence[Update],
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
    updates: Sequence[Update],
    batch: int,
    micros: int,
    workers: int,
    steps: Sequence[ScheduleStep],
) -> list[Finding]:
    """Return the findings of one worker, whose script computes the planned rates."""
    measured, number, findings = [it.rate for it in updates], 0, []
    if subject.epochs and micros and hasattr(subject.loader, "__len__"):
        number = round(len(subject.loader) / micros * subject.epochs)
    rate = subject.rate
    planned = [rate(update) for update in range(min(number, _MOST_UPDATES))] if rate else []
    if subject.base and batch:
        peak = max(planned) if planned else _peak(subject.optimizer, measured)
        findings.append(_check_base(peak, batch, subject.base, subject.optimizer))
    if rate:
        factors = {*range(2, _FASTEST), workers, micros, workers * micros} - {1}
        findings.append(_check_schedule(measured, [it.attempt for it in updates], rate, factors))
    else:
        attempts = [it.attempt for it in updates]
        findings.append(_check_steps(subject, steps, attempts, micros, number, workers))
    if number and subject.epochs:
        if planned:
            growth = batch / subject.base[0] if subject.base else 1.0
            findings.append(_check_warm_up(planned, number / subject.epochs, growth))
        text = f"{plural(number, 'update')} in {subject.epochs:g} epochs"
        remedy = "if the training loss ends high, more epochs or a smaller batch: no rate replaces "
        few = note("updates", text, f"{remedy}updates", float(number))
        many = fine("updates", text, figure=float(number))
        findings.append(few if number < FEWEST_UPDATES else many)
    return [*findings, _check_decay(subject.inner, subject.optimizer)]


def require_base(base: tuple[float, float]) -> None:
    """Raise ValueError unless `base` is a global batch and a rate, in this order."""
    is_pair = isinstance(base, tuple | list) and len(base) == 2
    if not is_pair or not base[0] >= 1 or base[0] % 1 or not 0 < base[1] < math.inf:
        raise ValueError(f"base is {base}; expected (global batch, rate), such as (256, 0.1)")


def _peak(optimizer: Optimizer, measured: Sequence[float]) -> float | None:
    """Return the largest rate of a run as far as its schedulers know it; None if rates rise.

    A scheduler of torch keeps `initial_lr`, from which OneCycleLR rises to `max_lr`.
    """
    groups, keys = optimizer.param_groups, ("initial_lr", "max_lr")
    known = [float(group[key]) for group in groups for key in keys if key in group]
    if not known and max(measured) > measured[0] * (1 + _SAME):
        return None
    return max([*known, *measured])


def _check_base(
    peak: float | None, batch: int, base: tuple[int, float], optimizer: Optimizer
) -> Finding:
    if peak is None:
        text = "the rate rises in these updates, so its peak is not known"
        remedy = "give rate= (the rate by update) and epochs= to compare its peak"
        return unknown("rate for the batch", text, remedy)
    factor = batch / base[0]
    linear, root = base[1] * factor, base[1] * math.sqrt(factor)
    adaptive = "Adam" in type(optimizer).__name__
    unscaled = factor > 1 and not adaptive and math.isclose(peak, base[1], rel_tol=_SAME)
    text = f"the rate is {three_digits(peak)} at a batch of {batch:,}"
    momentum = optimizer.param_groups[0].get("momentum")
    text += "" if momentum is None else f", momentum {momentum:g}"
    text += f"; from {three_digits(base[1])} at {base[0]:,} the linear rule gives "
    text += f"{three_digits(linear)}, the square root {three_digits(root)}"
    if min(linear, root) / _MARGIN <= peak <= max(linear, root) * _MARGIN and not unscaled:
        return fine("rate for the batch", text, figure=peak / linear)
    rule, value = ("square-root", root) if adaptive else ("linear", linear)
    remedy = f"try {three_digits(value)} ({rule} rule) with a warm-up"
    return note("rate for the batch", text, remedy, peak / linear)


def _check_schedule(
    measured: Sequence[float], attempts: Sequence[int], rate: Rate, factors: set[int]
) -> Finding:
    """Compare the rates of the first updates with `rate`; find a schedule that moves too fast.

    It may move when a GradScaler skips an update, too. If it moves several times an update, the
    first update comes before that, or after all of these moves but one.
    """

    def equal(places: Sequence[int]) -> bool:
        pairs = zip(measured, map(rate, places), strict=True)
        return all(math.isclose(*pair, rel_tol=_SAME, abs_tol=1e-12) for pair in pairs)

    plan = range(len(measured))
    if equal(plan) or equal(attempts):
        return fine("warm-up", f"{plural(len(measured), 'update')} had the rates of the schedule")
    expected = [rate(update) for update in plan]
    rates = f"{', '.join(map(three_digits, measured))} instead of "
    rates += ", ".join(map(three_digits, expected))
    for times in sorted(factors if len(measured) > 1 else ()):  # one rate shows no speed
        if any(equal([times * it + late for it in attempts]) for late in (0, times - 1)):
            text = f"the schedule moves {times} steps an update: rates {rates}"
            remedy = "step the scheduler once an update, or count its length in these steps"
            return fault("warm-up", text, remedy, float(times))
    remedy = "step the schedule in `step`, as your loop does, and check in which unit it counts: "
    remedy += "batches, updates or epochs"
    figure = measured[-1] / expected[-1] if expected[-1] else None
    return fault("warm-up", f"the first updates had rates {rates}", remedy, figure)


def _check_steps(
    subject: Subject,
    steps: Sequence[ScheduleStep],
    attempts: Sequence[int],
    micros: int,
    number: int,
    workers: int,
) -> Finding:
    """Count how often torch's schedulers move in an update, without the planned rates.

    A scheduler that moves in each micro-batch is right if its length counts them; the length of
    torch's schedulers is known. `number` is that of the updates in the run, 0 if it is not known.
    """
    counted = [it for it in steps if not it.is_placed]
    # Only between two updates are all moves of an update seen, whether they come after it or before
    # the next one; the audit may begin and end between them.
    whole = [it for it in counted if attempts[0] < it.updates <= attempts[-1]]
    if not whole:
        rates = f"the rates of {plural(len(attempts), 'update')} were not compared"
        text = f"{rates}: no scheduler of torch moved between them"
        if counted:
            text = f"{rates}: too few to count the moves of a scheduler"
        return unknown("warm-up", text, "give rate= (the rate by update, from the present one)")
    moves = Counter((id(it.scheduler), it.updates) for it in whole)
    in_a_row = Counter((id(it.scheduler), it.updates, it.passes) for it in whole)
    (mover, _), times = moves.most_common(1)[0]
    first = next(it for it in whole if id(it.scheduler) == mover)
    name, length = type(first.scheduler).__name__, _length_of(first.scheduler)
    text = f"{name} moves {plural(times, 'step')} an update"
    if times == 1 and number and subject.epochs and length == subject.epochs < number:
        text += f"; its length, {length}, is the number of epochs: the run has {number} updates"
        remedy = "step it once an epoch, or give it a length in updates"
        return fault("warm-up", text, remedy, number / length)
    if times == 1:
        return fine("warm-up", text, figure=1.0)
    if first.is_of_accelerate and times in {workers, workers * micros}:
        remedy = "nothing if its length counts the batches of all workers, before prepare()"
        return note("warm-up", f"{text}, as Accelerate does by design", remedy, float(times))
    remedy = "step the scheduler once an update, or count its length in these steps"
    if (most := max(in_a_row.values())) > 1:
        text += f", up to {most} of them in a row"
        return fault("warm-up", text, remedy, float(times))
    batches = len(subject.loader) if hasattr(subject.loader, "__len__") else 0
    return _check_length(f"{text}, once in each micro-batch", times, length, batches, micros)


def _check_length(text: str, times: int, length: int, batches: int, micros: int) -> Finding:
    """Return the finding on a scheduler that moves in each micro-batch, from its length."""
    remedy = "step the scheduler once an update, or count its length in these steps"
    updates = {batches // micros, math.ceil(batches / micros)} - {0}
    if length and batches:
        text += f"; its length is {length:,}, an epoch has {batches:,} batches"
        if length % batches == 0:
            return fine("warm-up", text, figure=float(times))
        if any(length % it == 0 for it in updates) and length >= min(updates):
            return fault("warm-up", f"{text} in {max(updates):,} updates", remedy, float(times))
    return note("warm-up", text, f"{remedy}; rate= compares the rates", float(times))


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


def _check_warm_up(rates: Sequence[float], updates_an_epoch: float, growth: float) -> Finding:
    """Check the length and the start of the warm-up; `growth` is the batch over the base's."""
    peak = max(rates)
    length = next(update for update, it in enumerate(rates) if it >= (1 - _SAME) * peak)
    start, epochs = rates[0] / peak if peak else 1.0, length / updates_an_epoch
    text = f"the rate starts at {three_digits(100 * start)} % of its peak and reaches it after "
    text += f"{plural(length, 'update')} ({three_digits(epochs)} epochs)"
    if growth <= 1 or (epochs >= _WARM_UP_EPOCHS / 2 and start <= 1 / math.sqrt(growth)):
        return fine("warm-up", text, figure=epochs)
    remedy = f"Goyal et al. rise over {_WARM_UP_EPOCHS} epochs from the rate of the small batch "
    remedy += f"({three_digits(100 / growth)} % of the peak)"
    return note("warm-up", text, remedy, epochs)


def _check_decay(model: nn.Module, optimizer: Optimizer) -> Finding:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    plain = {p for p in trained if p.ndim <= 1} | norm_parameters(model)
    decayed = {
        parameter: group["weight_decay"]
        for group in optimizer.param_groups
        for parameter in group["params"]
        if group.get("weight_decay")
    }
    wrong = [value for parameter, value in decayed.items() if parameter in plain]
    if not wrong:
        text = f"{plural(len(decayed), 'tensor')} with decay, no normalisation or bias among them"
        return fine("weight decay", text if decayed else "no tensor has weight decay")
    most = three_digits(max(wrong))
    text = (
        f"{len(wrong)} of {len(plain)} normalisation tensors and biases have weight decay, {most}"
    )
    remedy = "give them a group without decay: largebatch.models.param_groups(model, ...)"
    return note("weight decay", text, remedy, float(len(wrong)))
