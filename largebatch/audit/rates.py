"""Learning rate, warm-up, number of updates and weight decay against rules for large batches.

Rules: the rate grows with the batch (Goyal et al., arXiv:1706.02677, for SGD) or with its square
root (Krizhevsky, arXiv:1404.5997; Malladi et al., arXiv:2205.10782, for Adam). Goyal's warm-up
takes 5 epochs and begins at the rate of the small batch. Normalisation and biases have no decay in
MLPerf's rules, and BatchNorm has none in Goyal's.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn
from torch.optim import Optimizer

from largebatch.audit.findings import Finding
from largebatch.audit.ranks import Ranks, StoppedError
from largebatch.audit.recording import Update
from largebatch.audit.subject import Subject
from largebatch.formatting import plural, three_digits
from largebatch.models import norm_parameters
from largebatch.recipe.installed import FEWEST_UPDATES

_WARM_UP_EPOCHS = 5
"""Length of the warm-up of Goyal et al., section 2.2."""

_IMAGENET = 1_000_000
"""Number of samples from which a data set is compared with ImageNet, which has 1,281,167."""

_MARGIN = 1.5
"""Factor outside the two rules at which a rate is noted: searches usually step by 2."""

_SAME = 1e-6
"""Relative difference of equal rates: they are computed in float64 in another order."""

_FASTEST = 9
"""Moves of a schedule an update below which all are tried, whatever the numbers of the script."""

_MOST_UPDATES = 100_000
"""Largest number of updates at which the schedule is read."""

Rate = Callable[[int], float]


@dataclass(frozen=True, slots=True)
class Counts:
    """Numbers of a script's updates."""

    global_batch: int
    """Number of samples of an update."""

    accumulation: int
    """Number of micro-batches of an update on a worker."""

    world_size: int


def check_rates(subject: Subject, updates: Sequence[Update], ranks: Ranks) -> list[Finding]:
    """Check learning rates and the plan of the run; `updates` are the first of the script."""
    if not updates:
        return []
    measured = [update.rate for update in updates]
    samples, micros = (
        max(it) for it in zip(*((u.samples, u.micros) for u in updates), strict=True)
    )
    attempts = [update.attempt for update in updates]
    counts = Counts(sum(ranks.gather(samples)), micros, ranks.size)  # not of an epoch's last batch
    remedy = "`rate` must return a number for each update of the run, counted from 0"
    try:
        return ranks.attempt(
            "warm-up",
            "comparing the rates",
            lambda: _compare(subject, measured, attempts, counts),
            remedy=remedy,
        )
    except StoppedError as stopped:  # the other findings on these updates are kept
        return [stopped.finding()]


def _compare(
    subject: Subject, measured: Sequence[float], attempts: Sequence[int], counts: Counts
) -> list[Finding]:
    """Return the findings of one worker, whose script computes the planned rates."""
    number = _number_of_updates(subject, counts.accumulation)
    planned = _planned(subject.rate, number) if subject.rate else []
    findings = []
    if subject.base and counts.global_batch:
        peak = max(planned) if planned else _peak(subject.optimizer, measured)
        findings.append(_rising() if peak is None else _check_base(peak, counts, subject))
    if subject.rate:
        findings.append(_check_schedule(measured, attempts, subject.rate, counts))
    if number and subject.epochs:
        if planned:
            growth = counts.global_batch / subject.base[0] if subject.base else 1.0
            findings.append(_check_warm_up(planned, number / subject.epochs, growth))
        findings.append(_check_updates(number, counts, subject))
    return [*findings, _check_decay(subject.inner, subject.optimizer)]


def _number_of_updates(subject: Subject, accumulation: int) -> int | None:
    """Return the number of updates of the whole run, if it is known."""
    if subject.epochs is None or not accumulation or not hasattr(subject.loader, "__len__"):
        return None
    return round(len(subject.loader) / accumulation * subject.epochs)


def _planned(rate: Rate, updates: int | None) -> list[float]:
    """Return the planned rates; none if the length of the run is not known."""
    return [rate(update) for update in range(min(updates or 0, _MOST_UPDATES))]


def require_base(base: tuple[float, float]) -> None:
    """Raise ValueError unless `base` is a global batch and a rate, in this order."""
    if not isinstance(base, tuple | list) or len(base) != 2:
        raise ValueError(f"base is {base}; expected (global batch, rate), such as (256, 0.1)")
    batch, rate = base
    if not batch >= 1 or batch % 1 or not 0 < rate < math.inf:
        raise ValueError(
            f"base is {base}; expected (global batch, rate), a whole number and a rate above 0"
        )


def _peak(optimizer: Optimizer, measured: Sequence[float]) -> float | None:
    """Return the largest rate of a run as far as its schedulers know it; None if rates rise.

    A scheduler of torch keeps `initial_lr`, from which OneCycleLR rises to `max_lr`.
    """
    groups = optimizer.param_groups
    keys = ("initial_lr", "max_lr")
    known = [float(group[key]) for group in groups for key in keys if key in group]
    if not known and max(measured) > measured[0] * (1 + _SAME):
        return None
    return max([*known, *measured])


def _rising() -> Finding:
    return Finding(
        check="rate for the batch",
        level="unknown",
        text="the rate rises in these updates, so its peak is not known",
        remedy="give rate= (the rate by update) and epochs= to compare its peak",
    )


def _check_base(peak: float, counts: Counts, subject: Subject) -> Finding:
    """Compare a peak rate with the linear and the square-root rule from `subject.base`."""
    assert subject.base is not None
    base, global_batch, optimizer = subject.base, counts.global_batch, subject.optimizer
    factor = global_batch / base[0]
    linear, root = base[1] * factor, base[1] * math.sqrt(factor)
    adaptive = "Adam" in type(optimizer).__name__
    unscaled = factor > 1 and not adaptive and math.isclose(peak, base[1], rel_tol=_SAME)
    fits = min(linear, root) / _MARGIN <= peak <= max(linear, root) * _MARGIN and not unscaled
    momentum = optimizer.param_groups[0].get("momentum")
    text = (
        f"the rate is {three_digits(peak)} at a batch of {global_batch:,}"
        + (f", momentum {momentum:g}" if momentum is not None else "")
        + f"; from {three_digits(base[1])} at {base[0]:,} the linear rule gives "
        f"{three_digits(linear)}, the square root {three_digits(root)}"
    )
    rule, value = ("square-root", root) if adaptive else ("linear", linear)
    remedy = "the rate did not grow with the batch: " * unscaled
    remedy += f"try {three_digits(value)} ({rule} rule) with a warm-up"
    return Finding(
        check="rate for the batch",
        level="fine" if fits else "note",
        text=text,
        remedy="" if fits else remedy,
        figure=peak / linear,
    )


def _check_schedule(
    measured: Sequence[float], attempts: Sequence[int], rate: Rate, counts: Counts
) -> Finding:
    """Compare the rates of the first updates with `rate`; find a schedule that moves too fast.

    It may move when a GradScaler skips an update, too. If it moves several times an update, the
    first update comes before that, or after all of these moves but one.
    """
    expected = [rate(update) for update in range(len(measured))]
    if any(_equal(measured, [rate(it) for it in its]) for its in (range(len(measured)), attempts)):
        text = f"{plural(len(measured), 'update')} had the rates of the schedule"
        return Finding(check="warm-up", level="fine", text=text)
    names = {counts.world_size: "workers", counts.accumulation: "micro-batches of an update"}
    factors = {*range(2, _FASTEST), *names, counts.world_size * counts.accumulation} - {1}
    for times in sorted(factors if len(measured) > 1 else ()):  # one rate shows no speed
        moves = [[times * it + late for it in attempts] for late in (0, times - 1)]
        if any(_equal(measured, [rate(it) for it in its]) for its in moves):
            also = f" ({times} is also the number of {names[times]})" if times in names else ""
            return Finding(
                check="warm-up",
                level="fault",
                text=f"the schedule moves {times} steps an update{also}: rates "
                f"{_list(measured)} instead of {_list(expected)}",
                remedy="step the scheduler once an update, or count its length in these steps",
                figure=float(times),
            )
    return Finding(
        check="warm-up",
        level="note",
        text=f"the first updates had rates {_list(measured)}, the schedule says {_list(expected)}",
        remedy="check in which unit the schedule counts: batches, updates or epochs",
        figure=measured[-1] / expected[-1] if expected[-1] else None,
    )


def _check_warm_up(rates: Sequence[float], updates_an_epoch: float, growth: float) -> Finding:
    """Check the length and the start of the warm-up; `growth` is the batch over the base's."""
    peak = max(rates)
    length = next(update for update, it in enumerate(rates) if it >= (1 - _SAME) * peak)
    start, epochs = rates[0] / peak if peak else 1.0, length / updates_an_epoch
    text = (
        f"the rate starts at {three_digits(100 * start)} % of its peak and reaches it after "
        f"{plural(length, 'update')} ({three_digits(epochs)} epochs)"
    )
    needed = growth > 1 and (epochs < _WARM_UP_EPOCHS / 2 or start > 1 / math.sqrt(growth))
    return Finding(
        check="warm-up",
        level="note" if needed else "fine",
        text=text,
        remedy=f"Goyal et al. rise over {_WARM_UP_EPOCHS} epochs from the rate of the small batch "
        f"({three_digits(100 / growth)} % of the peak)"
        if needed
        else "",
        figure=epochs,
    )


def _check_updates(updates: int, counts: Counts, subject: Subject) -> Finding:
    """Compare the number of updates with the fewest published, which is for ImageNet."""
    assert subject.epochs
    text = f"{plural(updates, 'update')} in {subject.epochs:g} epochs"
    if subject.base:
        before = round(updates * counts.global_batch / subject.base[0])
        text += f"; at a batch of {subject.base[0]:,} it is {before:,}"
    few = updates < FEWEST_UPDATES
    if few and not subject.base and updates * counts.global_batch >= _IMAGENET * subject.epochs:
        text += f"; the fewest published for ImageNet are {FEWEST_UPDATES:,}"
    return Finding(
        check="updates",
        level="note" if few else "fine",
        text=text,
        remedy="if the training loss ends high, more epochs or a smaller batch: no rate replaces "
        "updates"
        if few
        else "",
        figure=float(updates),
    )


def _check_decay(model: nn.Module, optimizer: Optimizer) -> Finding:
    """Count normalisation parameters and biases that have weight decay."""
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
        text = text if decayed else "no tensor has weight decay"
        return Finding(check="weight decay", level="fine", text=text)
    return Finding(
        check="weight decay",
        level="note",
        text=f"{len(wrong)} of {len(plain)} normalisation tensors and biases have weight decay, "
        f"{three_digits(max(wrong))}",
        remedy="give them a group without decay: largebatch.models.param_groups(model, ...)",
        figure=float(len(wrong)),
    )


def _equal(measured: Sequence[float], expected: Sequence[float]) -> bool:
    return all(
        math.isclose(one, other, rel_tol=_SAME, abs_tol=1e-12)
        for one, other in zip(measured, expected, strict=True)
    )


def _list(rates: Sequence[float]) -> str:
    return ", ".join(map(three_digits, rates))
