"""The section `schedule` and a plan -> the learning rate of every step."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

from largebatch.errors import RecipeError
from largebatch.formatting import plural
from largebatch.recipe import schedule
from largebatch.recipe.arithmetic.plan import Plan
from largebatch.recipe.section import Duration
from largebatch.schedules import functions
from largebatch.schedules.functions import Policy, Schedule


def build_schedule(section: schedule.Schedule, plan: Plan) -> Schedule:
    """Return the learning rate of every update of a plan, which is the same on any machine.

    With a batch schedule the policy follows the samples seen, in updates of the first batch, and
    its rate is multiplied by the factor of each piece.

    Raises RecipeError where the lengths in the recipe contradict each other.
    """
    warmup_steps = plan.steps_in(section.warmup) if section.warmup else 0
    # With a batch schedule a policy counts samples, in updates of the first batch, of which the run
    # has another number than of its own.
    steps = math.ceil(plan.position(plan.steps) / plan.global_batch)
    segment = Segment(
        key="schedule.decay",
        before=warmup_steps,
        steps=steps + section.first_step - warmup_steps,
        steps_in=plan.steps_in,
    )
    after: Policy = section.decay.build(section.peak_lr, segment)
    if warmup_steps and section.start_lr >= after(0):
        raise RecipeError(
            f"schedule.start_lr ({section.start_lr:g}) must be below the rate at which "
            f"{section.decay.kind} begins ({after(0):g}), since the warm-up rises to it; without a "
            "warm-up, give warmup: null"
        )
    # The warm-up rises to the first rate of the policy, which for a cycle is its lowest.
    ramp = functions.warmup(after, steps=warmup_steps, start=section.start_lr)
    policy = functions.skip(ramp, steps=section.first_step)
    if not plan.batch_changes:
        return policy

    def of_samples(step: int) -> float:
        piece = plan.piece_at(step)
        return policy(piece.samples_before(step) / plan.global_batch) * piece.lr_factor

    return of_samples


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """The part of a run that a policy sets the rates of."""

    key: str
    before: int
    """Steps from the point where the recipe starts to count to the first of these."""

    steps: int
    steps_in: Callable[[Duration], int]

    def length(self, name: str, duration: Duration, *, limit: int) -> int:
        """Return a length in steps; raise RecipeError if it is longer than `limit`."""
        length = self.steps_in(duration)
        if length > limit:
            raise RecipeError(
                f"{self.key}.{name} ({plural(length, 'step')}) is too long to take effect in the "
                f"{plural(self.steps, 'step')} of this policy: at most {plural(limit, 'step')}"
            )
        return length

    def fall(self, decay: schedule.Fall) -> int:
        """Return the steps of a fall: by default all of the segment."""
        if decay.over is None:
            return self.steps
        return self.length("over", decay.over, limit=self.steps)

    def points(self, durations: tuple[Duration, ...]) -> list[int]:
        """Return the points in steps from the start of the policy."""
        points = [self.steps_in(duration) for duration in durations]
        end = self.before + self.steps
        if points != sorted(set(points)) or points[0] <= self.before or points[-1] >= end:
            raise RecipeError(
                f"{self.key}.at: the points must come one after the other, after the first step of "
                f"this policy ({self.before}) and before its end ({end}), got steps "
                f"{', '.join(map(str, points))}"
            )
        return [point - self.before for point in points]


def build_constant(_: schedule.Constant, peak: float, __: Segment) -> Policy:
    """Stay at the peak."""
    return functions.constant(peak=peak)


def build_step_decay(decay: schedule.StepDecay, peak: float, segment: Segment) -> Policy:
    """Fall in regular stairs, at least one of which ends before the segment."""
    steps = segment.length("every", decay.every, limit=segment.steps - 1)
    return functions.step(peak=peak, steps=steps, gamma=decay.gamma)


def build_multistep_decay(decay: schedule.MultiStepDecay, peak: float, segment: Segment) -> Policy:
    """Fall at given points."""
    boundaries = segment.points(decay.at)
    return functions.multistep(peak=peak, boundaries=boundaries, gamma=decay.gamma)


def build_exponential(decay: schedule.Exponential, peak: float, segment: Segment) -> Policy:
    """Fall from the peak in the first step, or rise to it in the last."""
    if decay.begin == "low":
        return functions.exponential_rise(peak=peak, gamma=decay.gamma, steps=segment.steps - 1)
    return functions.exponential(peak=peak, gamma=decay.gamma)


def build_inverse(decay: schedule.Inverse, peak: float, _: Segment) -> Policy:
    """Fall along a power of the steps."""
    return functions.inverse(peak=peak, gamma=decay.gamma, power=decay.power)


def build_polynomial(decay: schedule.Polynomial, peak: float, segment: Segment) -> Policy:
    """Fall along a polynomial."""
    steps = segment.fall(decay)
    return functions.polynomial(peak=peak, steps=steps, power=decay.power, end=decay.end_lr)


def build_cosine(decay: schedule.Cosine, peak: float, segment: Segment) -> Policy:
    """Fall along half a cosine."""
    return functions.cosine(peak=peak, steps=segment.fall(decay), end=decay.end_lr)


def build_wave(decay: schedule.Wave | schedule.WaveExp, peak: float, segment: Segment) -> Policy:
    """Rise and fall in lines or along a sine, to lower heights with some kinds."""
    shape, factor = _WAVES[decay.kind]
    return shape(
        peak=peak,
        low=decay.low_lr,
        steps=segment.length("half_cycle", decay.half_cycle, limit=segment.steps - 1),
        factor=factor,
        gamma=decay.gamma if isinstance(decay, schedule.WaveExp) else 1.0,
    )


_WAVES = {
    "tri": (functions.triangular, 1.0),
    "tri2": (functions.triangular, 0.5),
    "triexp": (functions.triangular, 1.0),
    "sin": (functions.sine, 1.0),
    "sin2": (functions.sine, 0.5),
    "sinexp": (functions.sine, 1.0),
}
"""The shape of a wave, and the factor of its height after each cycle."""


def build_cosine_cycles(decay: schedule.CosineCycles, peak: float, segment: Segment) -> Policy:
    """Fall and rise along a cosine; a cycle may be twice as long as the segment."""
    steps = segment.length("cycle", decay.cycle, limit=2 * (segment.steps - 1))
    return functions.cosine_cycles(peak=peak, low=decay.low_lr, steps=steps)


def build_piecewise(decay: schedule.Piecewise, _: float, segment: Segment) -> Policy:
    """Follow the pieces in turn, each of which has its own peak."""
    pieces = decay.pieces
    boundaries = list[int]()
    epochs = 0.0
    steps = 0
    # Lengths are added before they are rounded: else every boundary would add its own error, and
    # three thirds of an epoch would not be one.
    for piece in pieces[:-1]:
        assert piece.length is not None
        epochs += piece.length.epochs or 0.0
        steps += piece.length.steps or 0
        rounded = segment.steps_in(Duration.model_construct(epochs=epochs)) if epochs else 0
        boundaries.append(steps + rounded)
    policies = []
    for number, (start, end) in enumerate(pairwise([0, *boundaries, segment.steps])):
        key = f"{segment.key}.pieces.{number}"
        # Every later piece needs a step too.
        latest = segment.steps - (len(boundaries) - number)
        if not start < end <= latest:
            raise RecipeError(
                f"{key}.length: the piece would go from step {start} to {end} of the "
                f"{segment.steps} after the warm-up; every piece, the last one too, needs a step"
            )
        piece_segment = replace(segment, key=f"{key}.decay", before=0, steps=end - start)
        policies.append(pieces[number].decay.build(pieces[number].peak_lr, piece_segment))
    return functions.piecewise(policies, boundaries=boundaries)


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """All learning rates of a run, and the first steps of its parts."""

    rates: tuple[float, ...]
    begin: int
    """The first step of the policy, after the warm-up."""

    clean: int
    """The first step on clean images; the number of steps if there is none."""

    plan: Plan

    @property
    def peak(self) -> int:
        """The first step at the highest rate."""
        return max(range(len(self.rates)), key=self.rates.__getitem__)

    def facts(self) -> dict[str, str]:
        """Return the most important facts about the schedule in words."""
        plan = self.plan
        steps = len(self.rates)
        rows = {
            "run": f"{plural(steps, 'step')}, {plural(plan.position(steps), 'sample')}, "
            f"{plan.epoch(steps):.2f} epochs",
            "first lr": self._at(0),
            "peak lr": self._at(self.peak),
            "last lr": self._at(steps - 1),
        }
        if self.begin:
            rows["warm-up"] = f"before step {self.begin:,} (epoch {plan.epoch(self.begin):.2f})"
        if plan.batch_changes:
            rows["batches"] = f"{plan.global_batch:,}, " + ", ".join(
                f"{change.global_batch:,} from step {change.step:,}"
                for change in plan.batch_changes
            )
        if self.clean < steps:
            rows["clean"] = f"from {self._at(self.clean)}"
        return rows

    def _at(self, step: int) -> str:
        return f"{self.rates[step]:.6g} at step {step:,} (epoch {self.plan.epoch(step):.2f})"


def follow(section: schedule.Schedule, plan: Plan) -> Course:
    """Compute every learning rate of a run."""
    return Course(
        rates=tuple(map(build_schedule(section, plan), range(plan.steps))),
        begin=max(0, plan.warmup_steps - section.first_step),
        clean=plan.train_steps,
        plan=plan,
    )
