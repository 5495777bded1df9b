"""The section `schedule`: the learning rate.

The kinds are the policies of LRBench (arXiv:1908.06477) under its short names, some also under a
longer one, and half a cosine. LRBench's k0 is peak_lr and its k1 is low_lr; its t counts
optimizer steps from the end of the warm-up.
"""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from largebatch.recipe.section import Choice, Duration, Fraction, NonNegative, Positive, Section

Power = Annotated[float, Field(gt=0, le=1000)]
"""Exponent of a policy; beyond the bound the fall takes one step, whatever its length."""


class Decay(Choice):
    """Base of the policies, each of which can also be a piece of another.

    A builder takes the peak and a `largebatch.schedules.build.Segment`.
    """

    group: ClassVar = "schedules"

    def at_other_steps(self, factor: float) -> dict[str, float]:  # noqa: ARG002 -- for subclasses
        """Return the settings that count per step, for a run with `factor` times the steps."""
        return {}


class Constant(Decay):
    """Stay at peak_lr."""

    builder: ClassVar = "largebatch.schedules.build:build_constant"

    kind: Literal["constant", "fix"]


class StepDecay(Decay):
    """Multiply the rate by gamma at regular intervals."""

    builder: ClassVar = "largebatch.schedules.build:build_step_decay"

    kind: Literal["step"]

    every: Duration
    """Length of an interval."""

    gamma: Fraction = 0.1
    """Factor of the rate after each interval."""


class MultiStepDecay(Decay):
    """Multiply the rate by gamma at given points."""

    builder: ClassVar = "largebatch.schedules.build:build_multistep_decay"

    kind: Literal["steps", "nstep"]

    at: Annotated[tuple[Duration, ...], Field(min_length=1, max_length=1000)]
    """The points, counted from the start of the run, warm-up included; in a piece, from its
    start."""

    gamma: Fraction = 0.1
    """Factor of the rate at each point."""


class Exponential(Decay):
    """Multiply the rate by gamma at every step, or divide it by gamma if it begins low."""

    builder: ClassVar = "largebatch.schedules.build:build_exponential"

    kind: Literal["exp"]

    gamma: Fraction
    """Factor of the rate at every step: 0.99 leaves a third after 110 steps."""

    begin: Literal["low", "peak"] = "peak"
    """`low`: the rate rises to peak_lr in the last update of the run, or piece, as in a range test
    (arXiv:1506.01186). The rates are those of `peak` in reverse order."""

    def at_other_steps(self, factor: float) -> dict[str, float]:
        """Return the factor of fewer or more steps, the same over the whole run."""
        return {"gamma": self.gamma ** (1 / factor)}


class Inverse(Decay):
    """Fall along (1 + gamma t)**-power, where t counts steps; never ends."""

    builder: ClassVar = "largebatch.schedules.build:build_inverse"

    kind: Literal["inv"]

    gamma: Positive
    """Speed of the fall: 1 / gamma steps after the peak the rate is peak_lr / 2**power."""

    power: Power
    """Steepness of the fall in the long run."""

    def at_other_steps(self, factor: float) -> dict[str, float]:
        """Return the speed that leaves the same rate at the end."""
        return {"gamma": self.gamma / factor}


class Fall(Section):
    """Base of the decays that end at a rate."""

    end_lr: NonNegative = 0.0
    """The rate at the end of the fall, and after it; below peak_lr."""

    over: Duration | None = None
    """Length of the fall, from the end of the warm-up; null: until the run, or piece, ends."""


class Polynomial(Decay, Fall):
    """Fall to end_lr along (1 - t)**power."""

    builder: ClassVar = "largebatch.schedules.build:build_polynomial"

    kind: Literal["polynomial", "poly"]

    power: Power = 2.0
    """1 is a straight line; MLPerf's rule is 2."""


class Cosine(Decay, Fall):
    """Fall to end_lr along half a cosine."""

    builder: ClassVar = "largebatch.schedules.build:build_cosine"

    kind: Literal["cosine"]


class Cycle(Section):
    """Base of the policies that move between two rates."""

    low_lr: NonNegative
    """The lower of the two rates, below peak_lr, which is the upper."""


class HalfCycle(Cycle):
    """Base of the policies that rise from low_lr to peak_lr and fall back, repeatedly."""

    half_cycle: Duration
    """Length of the rise from low_lr to peak_lr; the fall takes as long."""


class Wave(Decay, HalfCycle):
    """Rise and fall in straight lines (tri) or along half a sine wave (sin)."""

    builder: ClassVar = "largebatch.schedules.build:build_wave"

    kind: Literal["tri", "tri2", "sin", "sin2"]
    """tri2 and sin2: each cycle rises half as far above low_lr as the one before."""


class WaveExp(Decay, HalfCycle):
    """As tri or sin; the height above low_lr is multiplied by gamma at every step."""

    builder: ClassVar = "largebatch.schedules.build:build_wave"

    kind: Literal["triexp", "sinexp"]

    gamma: Fraction
    """Factor of the height above low_lr at every step: 0.999 halves it in 693 steps."""

    def at_other_steps(self, factor: float) -> dict[str, float]:
        """Return the factor of fewer or more steps, the same over the whole run."""
        return {"gamma": self.gamma ** (1 / factor)}


class CosineCycles(Decay, Cycle):
    """Fall from peak_lr to low_lr along half a cosine and rise back, repeatedly."""

    builder: ClassVar = "largebatch.schedules.build:build_cosine_cycles"

    kind: Literal["cos"]

    cycle: Duration
    """Length of a fall and a rise: l in the paper, and twice the l of its code."""


class Piece(Section):
    """A part of the run with its own policy, which counts from the start of the piece."""

    length: Duration | None
    """Length of the piece; null for the last one, and only there: until the run ends."""

    peak_lr: Positive
    """The highest rate of this piece."""

    decay: Decay
    """The policy of this piece."""

    @model_validator(mode="after")
    def _peak_is_the_highest(self) -> Self:
        _require_below(self.decay, self.peak_lr)
        return self


class Piecewise(Choice):
    """Follow several policies in turn, each with its own peak."""

    builder: ClassVar = "largebatch.schedules.build:build_piecewise"

    kind: Literal["piecewise"]

    pieces: tuple[Piece, ...]
    """Two or more pieces, from the end of the warm-up on; the highest of their peaks is the
    schedule's peak_lr."""

    @model_validator(mode="after")
    def _only_the_last_is_open(self) -> Self:
        if len(self.pieces) < 2:
            raise ValueError(f"give two pieces or more, got {len(self.pieces)}")
        for number, piece in enumerate(self.pieces):
            if (piece.length is None) != (number == len(self.pieces) - 1):
                raise ValueError(
                    f"pieces.{number}.length: null is for the last piece, which lasts until the "
                    "run ends, and only for it"
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

    decay: Annotated[Decay | Piecewise, Field(discriminator="kind")]
    """The policy: the rate after the warm-up."""

    first_step: Literal[0, 1] = 0
    """The number of the first update; MLPerf's reference and MXNet count from 1."""

    @model_validator(mode="after")
    def _rates_fit(self) -> Self:
        if self.warmup is None and self.start_lr:
            raise ValueError("start_lr is the start of the warm-up: give warmup too")
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


def _require_below(decay: Decay, peak_lr: float) -> None:
    match decay:
        case Fall(end_lr=lower):
            key = "end_lr"
        case Cycle(low_lr=lower):
            key = "low_lr"
        case _:
            return
    if lower >= peak_lr:
        raise ValueError(f"decay.{key} ({lower:g}) must be below peak_lr ({peak_lr:g})")
