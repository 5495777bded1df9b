"""The learning rate of a recipe.

The kinds are the policies of LRBench (arXiv:1908.06477) under its short names, with some longer
ones, and half a cosine beside them. LRBench's k0 is peak_lr and its k1 is low_lr; its t counts
optimizer steps from the end of the warm-up.
"""

from typing import Annotated, Literal, Self, TypeAlias

from pydantic import Field, model_validator

from largebatch.recipe.sections import Duration, Fraction, NonNegative, Positive, Section

Power = Annotated[float, Field(gt=0, le=1000)]
"""Beyond the bound a policy is one step long, whatever its length."""


class Constant(Section):
    """Stay at the peak."""

    kind: Literal["constant", "fix"]


class StepDecay(Section):
    """Multiply the rate by gamma again and again, after stretches of one length."""

    kind: Literal["step"]

    every: Duration
    """How long the rate stays the same."""

    gamma: Fraction = 0.1
    """The rate is multiplied by this at each stair."""


class MultiStepDecay(Section):
    """Multiply the rate by gamma at given points."""

    kind: Literal["steps", "nstep"]

    at: Annotated[tuple[Duration, ...], Field(min_length=1, max_length=1000)]
    """The points, counted from the start of the run, warm-up included; in a piece, from its
    start."""

    gamma: Fraction = 0.1
    """The rate is multiplied by this at each point."""


class Exponential(Section):
    """Multiply the rate by gamma at every step."""

    kind: Literal["exp"]

    gamma: Fraction
    """The rate of a step over that of the step before: 0.99 leaves a third after 110 steps."""


class Inverse(Section):
    """Fall along (1 + gamma t)**-power, where t counts steps; never ends."""

    kind: Literal["inv"]

    gamma: Positive
    """How fast it falls: 1 / gamma steps after the peak the rate has lost a factor 2**power."""

    power: Power
    """How steep it is in the long run."""


class Fall(Section):
    """Base of the decays that end at a rate."""

    end_lr: NonNegative = 0.0
    """The rate that the fall reaches, and stays at; below peak_lr."""

    over: Duration | None = None
    """How long the fall takes, from the end of the warm-up; null: until the run, or piece, ends."""


class Polynomial(Fall):
    """Fall to end_lr along (1 - t)**power."""

    kind: Literal["polynomial", "poly"]

    power: Power = 2.0
    """1 is a straight line; MLPerf's rule is 2."""


class Cosine(Fall):
    """Fall to end_lr along half a cosine."""

    kind: Literal["cosine"]


class Cycle(Section):
    """Base of the policies that move between two rates."""

    low_lr: NonNegative
    """The lower of the two rates, below peak_lr, which is the upper."""


class HalfCycle(Cycle):
    """Base of the cycles that begin at low_lr."""

    half_cycle: Duration
    """How long the rate rises from low_lr; it falls back in the same time."""


class Triangle(HalfCycle):
    """Rise from low_lr to peak_lr in a straight line and fall back, again and again."""

    kind: Literal["tri"]


class Triangle2(HalfCycle):
    """As tri; every cycle rises half as far above low_lr as the one before."""

    kind: Literal["tri2"]


class TriangleExp(HalfCycle):
    """As tri; the height above low_lr is multiplied by gamma at every step."""

    kind: Literal["triexp"]

    gamma: Fraction
    """The height above low_lr is multiplied by this at every step: 0.999 halves it in 693."""


class Sine(HalfCycle):
    """Rise from low_lr to peak_lr and fall back along half a sine wave, again and again."""

    kind: Literal["sin"]


class Sine2(HalfCycle):
    """As sin; every cycle rises half as far above low_lr as the one before."""

    kind: Literal["sin2"]


class SineExp(HalfCycle):
    """As sin; the height above low_lr is multiplied by gamma at every step."""

    kind: Literal["sinexp"]

    gamma: Fraction
    """The height above low_lr is multiplied by this at every step: 0.999 halves it in 693."""


class CosineCycles(Cycle):
    """Fall from peak_lr to low_lr along half a cosine and rise again, again and again."""

    kind: Literal["cos"]

    cycle: Duration
    """How long it takes to fall and rise again: the paper's l, and twice that of its code."""


Simple: TypeAlias = (
    Constant
    | StepDecay
    | MultiStepDecay
    | Exponential
    | Inverse
    | Polynomial
    | Cosine
    | Triangle
    | Triangle2
    | TriangleExp
    | Sine
    | Sine2
    | SineExp
    | CosineCycles
)
"""The policies that can also be a piece of another."""


class Piece(Section):
    """A part of the run with a policy of its own, which counts from the start of the piece."""

    length: Duration | None
    """How long it lasts; null for the last piece, and only there: until the run ends."""

    peak_lr: Positive
    """The highest rate of this piece."""

    decay: Annotated[Simple, Field(discriminator="kind")]
    """What the rate does in this piece."""

    @model_validator(mode="after")
    def _peak_is_the_highest(self) -> Self:
        _require_below(self.decay, self.peak_lr)
        return self


class Piecewise(Section):
    """Follow one policy after the other, each with a peak of its own."""

    kind: Literal["piecewise"]

    pieces: tuple[Piece, ...]
    """Two or more, from the end of the warm-up on; the highest of their peaks is the schedule's
    peak_lr."""

    @model_validator(mode="after")
    def _only_the_last_is_open(self) -> Self:
        if len(self.pieces) < 2:
            raise ValueError(f"give two pieces or more, got {len(self.pieces)}")
        for place, piece in enumerate(self.pieces, 1):
            last = place == len(self.pieces)
            if (piece.length is None) != last:
                raise ValueError(
                    "the last piece lasts until the run ends: its length must be null"
                    if last
                    else f"piece {place} has no length: only the last one's may be null"
                )
        return self


class Schedule(Section):
    """The learning rate: a linear warm-up, then a policy."""

    peak_lr: Positive
    """The highest rate of the run, unless a factor of batch.schedule raises it."""

    warmup: Duration | None
    """How long the rate rises in a straight line to where the policy begins, which is peak_lr, but
    low_lr for tri, sin and their like; null: no warm-up."""

    start_lr: NonNegative = 0.0
    """The rate at which the warm-up starts."""

    decay: Annotated[Simple | Piecewise, Field(discriminator="kind")]
    """The policy: what the rate does after the warm-up."""

    first_step: Literal[0, 1] = 0
    """The number of the first update; MLPerf's reference counts from 1."""

    @model_validator(mode="after")
    def _start_lr_is_used(self) -> Self:
        if self.warmup is None and self.start_lr:
            raise ValueError("start_lr is the start of the warm-up: give warmup too")
        return self

    @model_validator(mode="after")
    def _peak_is_the_highest(self) -> Self:
        if isinstance(self.decay, Piecewise):
            highest = max(piece.peak_lr for piece in self.decay.pieces)
            if highest != self.peak_lr:
                raise ValueError(
                    f"peak_lr ({self.peak_lr:g}) must be the highest peak_lr of decay.pieces, "
                    f"which is {highest:g}"
                )
        else:
            _require_below(self.decay, self.peak_lr)
        return self


def _require_below(decay: Simple, peak_lr: float) -> None:
    """Refuse a lower rate that is not below the peak; a decay could only rise then."""
    match decay:
        case Fall(end_lr=lower):
            key = "end_lr"
        case Cycle(low_lr=lower):
            key = "low_lr"
        case _:
            return
    if lower >= peak_lr:
        raise ValueError(f"decay.{key} ({lower:g}) must be below peak_lr ({peak_lr:g})")
