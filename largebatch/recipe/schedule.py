"""The section `schedule`: the learning rate.

The kinds are the policies of LRBench (arXiv:1908.06477) under its short names, some also under a
longer one, and half a cosine, restarts and the two-point spline. LRBench's k0 is peak_lr and its k1
is low_lr; its t counts optimizer steps from the end of the warm-up.
"""

from typing import Annotated, Literal, Self, TypeAlias

from pydantic import Field, model_validator

from largebatch.recipe.section import Duration, Fraction, NonNegative, Positive, Section

Share = Annotated[float, Field(ge=0, le=1)]

Power = Annotated[float, Field(gt=0, le=1000)]
"""Exponent of a policy; beyond the bound the fall takes one step, whatever its length."""


class Constant(Section):
    """Stay at peak_lr."""

    kind: Literal["constant", "fix"]


class StepDecay(Section):
    """Multiply the rate by gamma at regular intervals."""

    kind: Literal["step"]

    every: Duration
    """Length of an interval."""

    gamma: Fraction = 0.1
    """Factor of the rate after each interval."""


class MultiStepDecay(Section):
    """Multiply the rate by gamma at given points."""

    kind: Literal["steps", "nstep"]

    at: Annotated[tuple[Duration, ...], Field(min_length=1, max_length=1000)]
    """The points, counted from the start of the run, warm-up included; in a piece, from its
    start."""

    gamma: Fraction = 0.1
    """Factor of the rate at each point."""


class Exponential(Section):
    """Multiply the rate by gamma at every step, or divide it by gamma if it begins low."""

    kind: Literal["exp"]

    gamma: Fraction
    """Factor of the rate at every step: 0.99 leaves a third after 110 steps."""

    begin: Literal["low", "peak"] = "peak"
    """`low`: the rate rises to peak_lr in the last update of the run, or piece, as in a range test
    (arXiv:1506.01186). The rates are those of `peak` in reverse order."""


class Inverse(Section):
    """Fall along (1 + gamma t)**-power, where t counts steps; never ends."""

    kind: Literal["inv"]

    gamma: Positive
    """Speed of the fall: 1 / gamma steps after the peak the rate is peak_lr / 2**power."""

    power: Power
    """Steepness of the fall in the long run."""


class Sigmoid(Section):
    """Fall from almost the peak along 1 / (1 + exp(gamma (t - half_at))), where t counts steps."""

    kind: Literal["sig"]

    half_at: Duration
    """The point of half the peak, counted from the end of the warm-up; in a piece, from its
    start."""

    gamma: Positive
    """Steepness of the fall: most of it takes 10 / gamma steps."""


class Fall(Section):
    """Base of the decays that end at a rate."""

    end_lr: NonNegative = 0.0
    """The rate at the end of the fall, and after it; below peak_lr."""

    over: Duration | None = None
    """Length of the fall, from the end of the warm-up; null: until the run, or piece, ends."""


class Polynomial(Fall):
    """Fall to end_lr along (1 - t)**power."""

    kind: Literal["polynomial", "poly"]

    power: Power = 2.0
    """1 is a straight line; MLPerf's rule is 2."""


class Cosine(Fall):
    """Fall to end_lr along half a cosine."""

    kind: Literal["cosine"]


class Spline(Fall):
    """Fall through two points to end_lr along a monotone cubic (arXiv:2603.10301)."""

    kind: Literal["spline"]

    points: tuple[tuple[Share, Share], tuple[Share, Share]]
    """Two points, each a share of the fall's length and a share of peak_lr: [[0.3, 0.8], [0.7,
    0.2]]."""

    @model_validator(mode="after")
    def _points_fall(self) -> Self:
        (place1, share1), (place2, share2) = self.points
        if not (0 < place1 < place2 < 1 and share1 >= share2):
            raise ValueError(
                "points: the first share of each lies between 0 and 1 and grows, the second does "
                f"not grow; got {[list(point) for point in self.points]}"
            )
        return self


class Cycle(Section):
    """Base of the policies that move between two rates."""

    low_lr: NonNegative
    """The lower of the two rates, below peak_lr, which is the upper."""


class HalfCycle(Cycle):
    """Base of the cycles that rise first by default."""

    half_cycle: Duration
    """Length of the rise from low_lr to peak_lr; the fall takes as long."""

    begin: Literal["low", "peak"] = "low"
    """Rate at which the first cycle begins. `peak`: LRBench's DTRI, DSIN and the like."""


class Triangle(HalfCycle):
    """Rise from low_lr to peak_lr in a straight line and fall back, repeatedly."""

    kind: Literal["tri"]


class Triangle2(HalfCycle):
    """As tri; each cycle rises half as far above low_lr as the one before."""

    kind: Literal["tri2"]


class TriangleExp(HalfCycle):
    """As tri; the height above low_lr is multiplied by gamma at every step."""

    kind: Literal["triexp"]

    gamma: Fraction
    """Factor of the height above low_lr at every step: 0.999 halves it in 693 steps."""


class Sine(HalfCycle):
    """Rise from low_lr to peak_lr and fall back along half a sine wave, repeatedly."""

    kind: Literal["sin"]


class Sine2(HalfCycle):
    """As sin; each cycle rises half as far above low_lr as the one before."""

    kind: Literal["sin2"]


class SineExp(HalfCycle):
    """As sin; the height above low_lr is multiplied by gamma at every step."""

    kind: Literal["sinexp"]

    gamma: Fraction
    """Factor of the height above low_lr at every step: 0.999 halves it in 693 steps."""


class WholeCycle(Cycle):
    """Base of the cycles that fall first by default."""

    cycle: Duration
    """Length of a fall and a rise: l in the paper, and twice the l of its code."""

    begin: Literal["low", "peak"] = "peak"
    """Rate at which the first cycle begins. `low`: LRBench's UPCOS and the like."""


class CosineCycles(WholeCycle):
    """Fall from peak_lr to low_lr along half a cosine and rise back, repeatedly."""

    kind: Literal["cos"]


class CosineCycles2(WholeCycle):
    """As cos; after each low it rises half as far above low_lr."""

    kind: Literal["cos2"]


class CosineCyclesExp(WholeCycle):
    """As cos; the height above low_lr is multiplied by gamma at every step."""

    kind: Literal["cosexp"]

    gamma: Fraction
    """Factor of the height above low_lr at every step: 0.999 halves it in 693 steps."""


class Restarts(Cycle):
    """Fall from peak_lr to low_lr and restart at the peak (SGDR, arXiv:1608.03983)."""

    kind: Literal["restarts"]

    every: Duration
    """Length of the first fall."""

    fall: Literal["linear", "sine", "cosine"] = "cosine"
    """Shape of the fall: LRBench's RSW, SINRSW and COSRSW."""

    lengthen: Annotated[float, Field(ge=1, le=1000)] = 1.0
    """Length of a fall over that of the one before; SGDR's T_mult."""

    factor: Fraction = 1.0
    """Factor of the height above low_lr at every restart; 0.5: LRBench's RSW2 and the like."""

    gamma: Fraction = 1.0
    """Factor of the height above low_lr at every step; LRBench's RSWEXP and the like."""


Simple: TypeAlias = (
    Constant
    | StepDecay
    | MultiStepDecay
    | Exponential
    | Inverse
    | Sigmoid
    | Polynomial
    | Cosine
    | Spline
    | Triangle
    | Triangle2
    | TriangleExp
    | Sine
    | Sine2
    | SineExp
    | CosineCycles
    | CosineCycles2
    | CosineCyclesExp
    | Restarts
)
"""The policies that can also be a piece of another."""


class Piece(Section):
    """A part of the run with its own policy, which counts from the start of the piece."""

    length: Duration | None
    """Length of the piece; null for the last one, and only there: until the run ends."""

    peak_lr: Positive
    """The highest rate of this piece."""

    decay: Annotated[Simple, Field(discriminator="kind")]
    """The policy of this piece."""

    @model_validator(mode="after")
    def _peak_is_the_highest(self) -> Self:
        _require_below(self.decay, self.peak_lr)
        return self


class Piecewise(Section):
    """Follow several policies in turn, each with its own peak."""

    kind: Literal["piecewise"]

    pieces: tuple[Piece, ...]
    """Two or more pieces, from the end of the warm-up on; the highest of their peaks is the
    schedule's peak_lr."""

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
    """Length of the linear rise to the first rate of the policy, which is peak_lr, but low_lr for
    tri, sin and the like; null: no warm-up."""

    start_lr: NonNegative = 0.0
    """The first rate of the warm-up."""

    decay: Annotated[Simple | Piecewise, Field(discriminator="kind")]
    """The policy: the rate after the warm-up."""

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
    """Raise ValueError for a lower rate that is not below the peak."""
    match decay:
        case Fall(end_lr=lower):
            key = "end_lr"
        case Cycle(low_lr=lower):
            key = "low_lr"
        case _:
            return
    if lower >= peak_lr:
        raise ValueError(f"decay.{key} ({lower:g}) must be below peak_lr ({peak_lr:g})")
