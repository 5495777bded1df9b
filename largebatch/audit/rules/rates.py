"""What can be said about learning rates and the plan of a run, in tables of rules.

The rate grows with the batch (Goyal et al., arXiv:1706.02677, for SGD) or with its square root
(Krizhevsky, arXiv:1404.5997; Malladi et al., arXiv:2205.10782, for Adam). Goyal's warm-up takes 5
epochs and begins at the rate of the small batch. Normalisation and biases have no decay in MLPerf's
rules, and BatchNorm has none in Goyal's.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

from largebatch.formatting import plural, three_digits
from largebatch.recipe.installed import FEWEST_UPDATES
from largebatch.rules import Rule

_WARM_UP_EPOCHS = 5  # length of the warm-up of Goyal et al., section 2.2

_MARGIN = 1.5  # factor outside the two rules at which a rate is noted: searches usually step by 2

SAME = 1e-6  # relative difference of equal rates: they are computed in float64 in another order

# The rate beside one that trained well at another batch.


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """Largest rate of a run, and the rate that trained well at another batch."""

    rate: float
    """NaN if it is not known."""

    batch: int
    momentum: float
    """NaN for an optimizer without one."""

    is_adaptive: bool
    """True for Adam and the like, whose rates follow the square root of the batch."""

    base_batch: int
    base_rate: float

    @property
    def linear(self) -> float:
        """Rate by the linear rule."""
        return self.base_rate * self.batch / self.base_batch

    @property
    def root(self) -> float:
        """Rate by the square-root rule."""
        return self.base_rate * math.sqrt(self.batch / self.base_batch)

    @property
    def is_unscaled(self) -> bool:
        """True if an optimizer that is not adaptive has the rate of a smaller batch."""
        is_larger = self.batch > self.base_batch and not self.is_adaptive
        return is_larger and math.isclose(self.rate, self.base_rate, rel_tol=SAME)

    @property
    def is_between(self) -> bool:
        """True if the rate is between both rules, with a margin."""
        low = min(self.linear, self.root) / _MARGIN
        return low <= self.rate <= max(self.linear, self.root) * _MARGIN


def _peak_text(e: Peak) -> str:
    momentum = "" if math.isnan(e.momentum) else f", momentum {e.momentum:g}"
    return (
        f"the rate is {three_digits(e.rate)} at a batch of {e.batch:,}{momentum}; from "
        f"{three_digits(e.base_rate)} at {e.base_batch:,} the linear rule gives "
        f"{three_digits(e.linear)}, the square root {three_digits(e.root)}"
    )


def _peak_remedy(e: Peak) -> str:
    if e.is_adaptive:
        return f"try {three_digits(e.root)} (square-root rule) with a warm-up"
    return f"try {three_digits(e.linear)} (linear rule) with a warm-up"


PEAK: tuple[Rule[Peak], ...] = (
    Rule(
        check="rate for the batch",
        level="unknown",
        when=lambda e: math.isnan(e.rate),
        text="the rate rises in these updates, so its peak is not known",
        remedy="give rate= (the rate by update) and epochs= to compare its peak",
    ),
    Rule(
        check="rate for the batch",
        level="fine",
        when=lambda e: e.is_between and not e.is_unscaled,
        text=_peak_text,
        figure=lambda e: e.rate / e.linear,
    ),
    Rule(
        check="rate for the batch",
        level="note",
        text=_peak_text,
        remedy=_peak_remedy,
        figure=lambda e: e.rate / e.linear,
    ),
)

# The schedule in the first updates.

_STEP_ONCE = "step the scheduler once an update, or count its length in these steps"


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstRates:
    """Rates of the first updates beside the planned ones."""

    measured: tuple[float, ...]
    planned: tuple[float, ...]
    times: int
    """Steps an update in which the schedule moves; 0 if no number explains the rates."""


def _rates_text(e: FirstRates) -> str:
    return (
        f"{', '.join(map(three_digits, e.measured))} instead of "
        f"{', '.join(map(three_digits, e.planned))}"
    )


SCHEDULE: tuple[Rule[FirstRates], ...] = (
    Rule(
        check="warm-up",
        level="fine",
        when=lambda e: e.times == 1,
        text=lambda e: f"{plural(len(e.measured), 'update')} had the rates of the schedule",
    ),
    Rule(
        check="warm-up",
        level="fault",
        when=lambda e: e.times > 1,
        text=lambda e: f"the schedule moves {e.times} steps an update: rates {_rates_text(e)}",
        remedy=_STEP_ONCE,
        figure=lambda e: float(e.times),
    ),
    Rule(
        check="warm-up",
        level="fault",
        text=lambda e: f"the first updates had rates {_rates_text(e)}",
        remedy="step the schedule in `step`, as your loop does, and check in which unit it counts: "
        "batches, updates or epochs",
        figure=lambda e: e.measured[-1] / e.planned[-1] if e.planned[-1] else None,
    ),
)

# Moves of torch's schedulers, without the planned rates.

_RATE_ARGUMENT = "rate= (the rate by update, from the present one)"


@dataclass(frozen=True, slots=True, kw_only=True)
class NoMoves:
    """Updates without a move of a scheduler between them that can be counted."""

    updates: int
    placed: str
    """Name of a scheduler whose calls give its place in the schedule; else empty."""

    has_moves: bool
    """True if a scheduler moved before the first or after the last of them."""


NO_MOVES: tuple[Rule[NoMoves], ...] = (
    Rule(
        check="warm-up",
        level="unknown",
        when=lambda e: not e.has_moves,
        text="not examined",
        remedy=f"give {_RATE_ARGUMENT}",
        argument=_RATE_ARGUMENT,
    ),
    Rule(
        check="warm-up",
        level="unknown",
        when=lambda e: bool(e.placed),  # such as step(epoch + batch / batches)
        text=lambda e: (
            f"the rates of {plural(e.updates, 'update')} were not compared: {e.placed}.step() is "
            "given its place in the schedule"
        ),
        remedy=f"give {_RATE_ARGUMENT}",
    ),
    Rule(
        check="warm-up",
        level="unknown",
        text=lambda e: (
            f"the rates of {plural(e.updates, 'update')} were not compared: too few to count the "
            "moves of a scheduler"
        ),
        remedy=f"give {_RATE_ARGUMENT}",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerMoves:
    """Moves of the scheduler that moves most in an update, and the lengths of the run."""

    scheduler: str
    times: int
    in_a_row: int
    """Largest number of moves between two forward passes."""

    is_of_accelerate: bool
    """True if Accelerate moves it, which it does once for each worker by design."""

    length: int
    """Number of steps that the scheduler is made for; 0 if it is not known."""

    updates: int
    """Number of updates in the run; 0 if it is not known."""

    epochs: float
    """NaN if they were not given."""

    batches: int
    """Number of batches of an epoch; 0 if it is not known."""

    micros: int
    workers: int

    @property
    def counts_moves(self) -> bool:
        """True if the length is that of the run in these moves."""
        return self.updates > 0 and self.length == self.times * self.updates

    @property
    def is_by_worker(self) -> bool:
        """True if the scheduler moves as often as Accelerate moves it."""
        return self.times in {self.workers, self.workers * self.micros}

    @property
    def updates_an_epoch(self) -> set[int]:
        """Numbers of updates of an epoch, with its last, shorter one and without."""
        return {self.batches // self.micros, math.ceil(self.batches / self.micros)} - {0}

    @property
    def has_lengths(self) -> bool:
        """True if the lengths of the scheduler and of an epoch are known."""
        return self.length > 0 and self.batches > 0

    @property
    def counts_batches(self) -> bool:
        """True if the length is whole epochs in batches."""
        return self.has_lengths and self.length % self.batches == 0

    @property
    def counts_updates(self) -> bool:
        """True if the length is whole epochs in updates."""
        if not self.has_lengths:
            return False
        numbers = self.updates_an_epoch
        is_whole = any(self.length % number == 0 for number in numbers)
        return is_whole and self.length >= min(numbers)


def _moves_text(e: SchedulerMoves) -> str:
    text = f"{e.scheduler} moves {plural(e.times, 'step')} an update"
    return text + ", as many as there are workers" * (e.times == e.workers > 1)


def _micro_batches_text(e: SchedulerMoves) -> str:
    text = f"{_moves_text(e)}, once in each micro-batch"
    if e.has_lengths:
        text += f"; its length is {e.length:,}, an epoch has {e.batches:,} batches"
    return text


MOVES: tuple[Rule[SchedulerMoves], ...] = (
    Rule(
        check="warm-up",
        level="fault",
        when=lambda e: e.times == 1 and e.length == e.epochs < e.updates,
        text=lambda e: (
            f"{_moves_text(e)}; its length, {e.length}, is the number of epochs: the run has "
            f"{e.updates} updates"
        ),
        remedy="step it once an epoch, or give it a length in updates",
        figure=lambda e: e.updates / e.length,
    ),
    Rule(
        check="warm-up",
        level="fine",
        when=lambda e: e.times == 1,
        text=_moves_text,
        figure=lambda e: float(e.times),
    ),
    Rule(
        check="warm-up",
        level="fine",
        when=lambda e: e.counts_moves,
        text=lambda e: f"{_moves_text(e)}, and its length, {e.length:,}, counts them",
        figure=lambda e: float(e.times),
    ),
    Rule(
        check="warm-up",
        level="note",
        when=lambda e: e.is_of_accelerate and e.is_by_worker,
        text=lambda e: f"{_moves_text(e)}, as Accelerate does by design",
        remedy="nothing if its length counts the batches of all workers, before prepare()",
        figure=lambda e: float(e.times),
    ),
    Rule(
        check="warm-up",
        level="fault",
        when=lambda e: e.in_a_row > 1,
        text=lambda e: (
            _moves_text(e) + f", up to {e.in_a_row} of them in a row" * (e.in_a_row < e.times)
        ),
        remedy=lambda e: _STEP_ONCE + "; if it does, epochs= shows that" * (not e.updates),
        figure=lambda e: float(e.times),
    ),
    # A scheduler that moves in each micro-batch is right if its length counts them.
    Rule(
        check="warm-up",
        level="fine",
        when=lambda e: e.counts_batches,
        text=_micro_batches_text,
        figure=lambda e: float(e.times),
    ),
    Rule(
        check="warm-up",
        level="fault",
        when=lambda e: e.counts_updates,
        text=lambda e: f"{_micro_batches_text(e)} in {max(e.updates_an_epoch):,} updates",
        remedy=_STEP_ONCE,
        figure=lambda e: float(e.times),
    ),
    Rule(
        check="warm-up",
        level="note",
        text=_micro_batches_text,
        remedy=f"{_STEP_ONCE}; rate= compares the rates",
        figure=lambda e: float(e.times),
    ),
)

# The plan of the run.


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmUp:
    """The planned rise of the rate."""

    updates: int
    epochs: float
    start: float
    """First rate over the peak."""

    growth: float
    """The batch over the one whose rate trained well."""


def _warm_up_text(e: WarmUp) -> str:
    return (
        f"the rate starts at {three_digits(100 * e.start)} % of its peak and reaches it after "
        f"{plural(e.updates, 'update')} ({three_digits(e.epochs)} epochs)"
    )


WARM_UP: tuple[Rule[WarmUp], ...] = (
    Rule(
        check="warm-up",
        level="fine",
        when=lambda e: (
            e.growth <= 1
            or (e.epochs >= _WARM_UP_EPOCHS / 2 and e.start <= 1 / math.sqrt(e.growth))
        ),
        text=_warm_up_text,
        figure=lambda e: e.epochs,
    ),
    Rule(
        check="warm-up",
        level="note",
        text=_warm_up_text,
        remedy=lambda e: (
            f"Goyal et al. rise over {_WARM_UP_EPOCHS} epochs from the rate of the small batch "
            f"({three_digits(100 / e.growth)} % of the peak)"
        ),
        figure=lambda e: e.epochs,
    ),
)


class Length(NamedTuple):
    """Length of a run."""

    updates: int
    epochs: float


def _length_text(e: Length) -> str:
    return f"{plural(e.updates, 'update')} in {e.epochs:g} epochs"


LENGTH: tuple[Rule[Length], ...] = (
    Rule(
        check="updates",
        level="note",
        when=lambda e: e.updates < FEWEST_UPDATES,
        text=_length_text,
        remedy="if the training loss ends high, more epochs or a smaller batch: no rate replaces "
        "updates",
        figure=lambda e: float(e.updates),
    ),
    Rule(
        check="updates",
        level="fine",
        text=_length_text,
        figure=lambda e: float(e.updates),
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecayedTensors:
    """Tensors with weight decay."""

    decayed: int
    plain: int
    """Number of normalisation tensors and biases."""

    wrong: int
    """Number of those that have decay."""

    most: float
    """Largest decay of one of them."""


DECAY: tuple[Rule[DecayedTensors], ...] = (
    Rule(
        check="weight decay",
        level="note",
        when=lambda e: e.wrong > 0,
        text=lambda e: (
            f"{e.wrong} of {e.plain} normalisation tensors and biases have weight decay, "
            f"{three_digits(e.most)}"
        ),
        remedy="give them a group without decay: largebatch.models.param_groups(model, ...)",
        figure=lambda e: float(e.wrong),
    ),
    Rule(
        check="weight decay",
        level="fine",
        when=lambda e: e.decayed > 0,
        text=lambda e: (
            f"{plural(e.decayed, 'tensor')} with decay, no normalisation or bias among them"
        ),
    ),
    Rule(check="weight decay", level="fine", text="no tensor has weight decay"),
)
