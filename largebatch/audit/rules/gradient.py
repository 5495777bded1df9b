"""What can be wrong with the gradient of an update, in tables of rules.

The exact gradient is that of one process with all samples. If the direction is the same, the scale
names the cause; if not, what people compute instead has been tried.
"""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

from largebatch.errors import shorten
from largebatch.formatting import plural, three_digits
from largebatch.rules import Finding, Rule

SAME = 0.02
"""Largest residual of equal directions. Sums in another order leave 1e-6 in float32; bfloat16 has 8
bits, so rounding gradients or sums once leaves 0.2 %, and several times up to 1 %."""

_SAME_SCALE = 0.02
"""Largest relative difference of equal scales, for the same reason. People's faults are factors of
2 or more: workers, micro-batches, samples."""

_NAMED_SCALE = 0.05  # largest relative difference of a scale from the factor that explains it

_LEAST_LOSS_SCALE = 2**4  # power of two from which on a factor of the loss is a loss scale

EQUAL = 1e-3
"""Largest relative difference of gradients that workers share. All-reduce gives all of them the
same bits; sums in several orders (a hierarchy, compression) may differ in the last."""

OTHER_LOSS = 0.99
"""Cosine of the gradients of two losses on the logits, below which they are different losses."""

_LOST = 0.01  # part of a gradient's values that become zero in a type before this is a fault

_FLOAT16 = "send float32 or bfloat16, or divide by the workers before the sum and use a GradScaler"


def is_near(value: float, expected: float, tolerance: float = _NAMED_SCALE) -> bool:
    """Return True if a value differs from the expected one by this part at most."""
    return abs(value / expected - 1) <= tolerance


class Likeness(NamedTuple):
    """How a gradient compares with the exact one."""

    scale: float
    """Factor by which the exact gradient is multiplied for the least distance."""

    cosine: float
    residual: float
    """Part of the gradient's length that no factor of the exact one explains, 0 .. 1."""

    @property
    def is_same(self) -> bool:
        """True if they differ by rounding only."""
        return self.residual <= SAME and abs(self.scale - 1) <= _SAME_SCALE

    def __str__(self) -> str:
        text = f"cosine {self.cosine:.3f} with that of one process"
        if abs(self.scale - 1) <= _SAME_SCALE:
            return text
        return f"{text}, and {three_digits(self.scale)} times as long along it"


# Before gradients are compared: was there a pass, does the optimizer have the model's tensors?


class NoPass(NamedTuple):
    """An update without a forward pass in training mode before it."""

    in_evaluation: bool
    """True if a pass with gradients was made in evaluation mode."""


NO_PASS: tuple[Rule[NoPass], ...] = (
    Rule(
        check="gradient scale",
        level="unknown",
        when=lambda e: e.in_evaluation,
        text="no forward pass of the model in training mode was seen before the update, but in "
        "evaluation mode",
        remedy="call model.train() before the training, also after each evaluation",
    ),
    Rule(
        check="gradient scale",
        level="unknown",
        text="no forward pass of the model in training mode was seen before the update",
        remedy="pass the model that the step trains, and call backward outside of a closure",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimized:
    """The model's tensors that not every worker's optimizer has."""

    of_some: tuple[str, ...]
    """Names of those that only some workers' optimizers have."""

    of_none: tuple[str, ...]
    """Names of those with a gradient that no optimizer has."""

    number: int
    """Number of the model's tensors that are trained."""

    strangers: int
    """Number of tensors in the optimizers that are not the model's and have no gradient."""


_ALL_TENSORS = "make each worker's optimizer from all parameters of the model as it is trained"

OPTIMIZED: tuple[Rule[Optimized], ...] = (
    Rule(
        check="updates",
        level="fault",
        when=lambda e: bool(e.of_some),
        text=lambda e: (
            f"{len(e.of_some)} of {e.number} tensors ({shorten(e.of_some, most=3)}) are in the "
            "optimizers of some workers only"
        ),
        remedy=_ALL_TENSORS,
        figure=lambda e: float(len(e.of_some)),
    ),
    Rule(
        check="updates",
        level="fault",
        # A frozen layer has no optimizer on purpose: tensors of a copy in its place show the fault.
        when=lambda e: bool(e.of_none) and e.strangers > 0,
        text=lambda e: (
            f"{len(e.of_none)} of {e.number} tensors ({shorten(e.of_none, most=3)}) are in no "
            f"optimizer, and {e.strangers} others that get no gradient are"
        ),
        remedy=_ALL_TENSORS,
        figure=lambda e: float(len(e.of_none)),
    ),
)

# Values that a type cannot hold.


@dataclass(frozen=True, slots=True, kw_only=True)
class Finiteness:
    """Values of a gradient that are infinite or NaN, on the worker that has most of them."""

    bad: int
    values: int
    workers: tuple[str, ...]
    """Numbers of the workers on which the exact gradient has such values too."""


FINITENESS: tuple[Rule[Finiteness], ...] = (
    Rule(
        check="precision",
        level="fault",
        when=lambda e: bool(e.workers),
        text=lambda e: (
            f"{e.bad:,} of {e.values:,} values of the gradient are infinite or NaN, and the exact "
            f"ones too, on worker {shorten(e.workers)}"
        ),
        remedy="look for the cause in the data or the rate: it is not in the reduction",
        figure=lambda e: e.bad,
    ),
    Rule(
        check="precision",
        level="fault",
        when=lambda e: e.bad > 0,
        text=lambda e: f"{e.bad:,} of {e.values:,} values of the gradient are infinite or NaN",
        remedy=_FLOAT16,
        figure=lambda e: e.bad,
    ),
)


class Underflow(NamedTuple):
    """Values that became zero."""

    share: float
    """Part of the exact gradient's values, without those that are zero."""

    in_float16: bool
    """True if a worker computes or sends gradients in float16; other types do not underflow."""


UNDERFLOW: tuple[Rule[Underflow], ...] = (
    Rule(
        check="precision",
        level="fault",
        when=lambda e: e.share > _LOST and e.in_float16,
        text=lambda e: (
            f"{100 * e.share:.1f} % of the values that are not zero in one process arrived as zero"
        ),
        remedy=_FLOAT16,
        figure=lambda e: e.share,
    ),
)

# Clipping.


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkersClip:
    """One call that clips the norm, on all workers."""

    norms: tuple[float, ...]
    """Norm on each worker before clipping."""

    limits: tuple[float, ...]
    """Maximum on each worker; infinite without clipping."""

    factors: tuple[float, ...]
    length: float
    """Length of the average of the workers' gradients."""

    exact_length: float
    """Length of the exact gradient, without clipping."""

    @property
    def over_exact(self) -> float:
        """Length of the average over that of the exact gradient if it is clipped."""
        factor = min(1.0, self.limits[0] / (self.exact_length + 1e-6))  # as torch computes it
        return self.length / (self.exact_length * factor)

    @property
    def ratio(self) -> float:
        """Smallest factor of a worker over the largest one."""
        return min(self.factors) / max(self.factors)


WORKERS_CLIP: tuple[Rule[WorkersClip], ...] = (
    Rule(
        check="clipping",
        level="fault",
        when=lambda e: min(e.factors) < 1 and len(set(e.limits)) > 1,
        text=lambda e: (
            f"workers clip to norms from {min(e.limits):g} to {max(e.limits):g}: lengths of "
            f"gradients differ {three_digits(e.ratio)} times"
        ),
        remedy="clip on every worker, with the same maximum",
        figure=lambda e: e.ratio,
    ),
    Rule(
        check="clipping",
        level="fault",
        when=lambda e: min(e.factors) < 1 and max(e.norms) - min(e.norms) > EQUAL * max(e.norms),
        text=lambda e: (
            f"each worker clips its own gradient to {e.limits[0]:g} before the average, which is "
            f"{three_digits(e.over_exact)} times as long as if clipped after"
        ),
        remedy="call clip_grad_norm_ after the gradients are averaged",
        figure=lambda e: e.over_exact,
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipCall:
    """One call that clips."""

    most: float
    factor: float
    over_exact: float
    """Length of the gradients before it over the exact lengths."""

    loss_scale: float


CLIP_CALL: tuple[Rule[ClipCall], ...] = (
    Rule(
        check="clipping",
        level="fault",
        when=lambda e: e.loss_scale > 2 and e.factor < 1 and is_near(e.over_exact, e.loss_scale),
        text=lambda e: (
            f"gradients are clipped to {e.most:g} with their loss scale, {e.loss_scale:g}"
        ),
        remedy="call scaler.unscale_(optimizer) before clipping",
        figure=lambda e: e.over_exact,
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipCalls:
    """All calls that clip in an update."""

    times: int
    """Number of calls with the same tensors as the first one."""

    micros: int
    is_shorter: bool
    """True if one of them changed the gradients."""

    norm: float
    """Norm before the first call that clips a norm; NaN if none does."""

    most: float


CLIP_CALLS: tuple[Rule[ClipCalls], ...] = (
    Rule(
        check="clipping",
        level="fault",
        when=lambda e: 1 < e.times == e.micros and e.is_shorter,
        text=lambda e: (
            f"gradients are clipped {e.times} times, in each of the micro-batches of an update"
        ),
        remedy="clip once, when the gradients of all of them are summed",
        figure=lambda e: float(e.times),
    ),
    Rule(
        check="clipping",
        level="fine",
        when=lambda e: not math.isnan(e.norm),
        text=lambda e: f"norm {three_digits(e.norm)}, maximum {e.most:g}, equal on all workers",
        figure=lambda e: e.norm,
    ),
)

# What the loss and the workers' gradients have in common.


class OtherLoss(NamedTuple):
    """The step's loss beside `loss_fn`."""

    cosine: float
    """Smallest cosine of a worker between the gradients of both on the logits."""


LOSS: tuple[Rule[OtherLoss], ...] = (
    Rule(
        check="gradient direction",
        level="unknown",
        when=lambda e: e.cosine < OTHER_LOSS,
        text=lambda e: f"the step's loss is not loss_fn (cosine {e.cosine:.3f} on the logits)",
        remedy="pass the step's own loss",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unequal:
    """Gradients that differ between workers."""

    names: tuple[str, ...]
    number: int
    """Number of all gradients."""

    nonzero: int
    """Number of gradients that are not zero in one process."""

    cosine: float
    """Cosine of the average with the exact gradient, without clipping; NaN if that is not known."""

    has_equal_weights: bool
    """True if the weights are equal nevertheless, at a rate that is not 0."""


def _cosine_figure(e: Unequal) -> float | None:
    return None if math.isnan(e.cosine) else e.cosine


def _cosine_text(e: Unequal) -> str:
    return "" if math.isnan(e.cosine) else f": cosine {e.cosine:.3f} with that of one process"


_AVERAGE = (
    "average the gradients before each update: call the DistributedDataParallel model, not its "
    "module, and leave no_sync on the last micro-batch"
)

UNEQUAL: tuple[Rule[Unequal], ...] = (
    Rule(
        check="gradient direction",
        level="unknown",
        when=lambda e: e.has_equal_weights,
        text="gradients differ between workers, weights do not: they are averaged or sent",
        remedy="nothing if weights are averaged on purpose (local SGD)",
    ),
    Rule(
        check="gradient direction",
        level="fault",
        when=lambda e: len(e.names) < e.nonzero,
        text=lambda e: (
            f"{len(e.names)} of {e.number} gradients differ between workers "
            f"({shorten(e.names, most=3)}){_cosine_text(e)}"
        ),
        remedy=_AVERAGE,
        figure=_cosine_figure,
    ),
    Rule(
        check="gradient direction",
        level="fault",
        text=lambda e: f"every worker uses its own gradient{_cosine_text(e)}",
        remedy=_AVERAGE,
        figure=_cosine_figure,
    ),
)

# The comparison itself.


@dataclass(frozen=True, slots=True, kw_only=True)
class Exact:
    """A gradient that is that of one process."""

    likeness: Likeness
    samples: float
    compared: int
    number: int
    """Number of the model's tensors that are trained, of which `compared` have an optimizer."""


EXACT: tuple[Rule[Exact], ...] = (
    Rule(
        check="gradient scale",
        level="fine",
        text=lambda e: (
            f"{e.likeness.scale:.4f} times that of one process with all {e.samples:,.0f} samples"
            + f", of {e.compared} of {e.number} tensors" * (e.compared < e.number)
        ),
        figure=lambda e: e.likeness.scale,
    ),
    Rule(
        check="gradient direction",
        level="fine",
        text=lambda e: f"cosine {e.likeness.cosine:.6f}",
        figure=lambda e: e.likeness.cosine,
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """What `zero_grad` has left of the update before, or taken from this one."""

    likeness: Likeness
    is_zero: bool
    """True if the gradient is zero, and the exact one is not."""

    names: tuple[str, ...]
    """Names of the gradients that were not zero when the first backward pass began."""

    number: int


def _not_cleared(e: Left) -> str:
    names = shorten(e.names, most=3)
    return f"{len(e.names)} of {e.number} gradients ({names}) were not cleared: {e.likeness}"


_CLEAR_ALL = "call zero_grad once per update, for all parameters"

LEFT: tuple[Rule[Left], ...] = (
    Rule(
        check="gradient scale",
        level="fault",
        when=lambda e: e.is_zero,
        text="the gradients are zero at the update: no backward comes after zero_grad",
        remedy="call zero_grad after the update",
        figure=lambda _: 0.0,
    ),
    Rule(
        check="gradient direction",
        level="fault",
        when=lambda e: bool(e.names) and e.likeness.residual > SAME,
        text=_not_cleared,
        remedy=_CLEAR_ALL,
        figure=lambda e: e.likeness.cosine,
    ),
    Rule(
        check="gradient scale",
        level="fault",
        when=lambda e: bool(e.names),
        text=_not_cleared,
        remedy=_CLEAR_ALL,
        figure=lambda e: e.likeness.scale,
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hooked:
    """A gradient that is exact but for the hooks of the script."""

    likeness: Likeness
    names: tuple[str, ...]
    number: int


HOOKED: tuple[Rule[Hooked], ...] = (
    Rule(
        check="gradient direction",
        level="note",
        text=lambda e: (
            f"hooks change {len(e.names)} of {e.number} gradients ({shorten(e.names, most=3)}): "
            f"{e.likeness}"
        ),
        remedy="nothing if that is meant: one process with these hooks computes the same",
        figure=lambda e: e.likeness.cosine,
    ),
)

Alternative = Literal["", "mean of means", "last micro-batch", "summed early", "changed early"]
"""What a script may compute instead of the exact gradient; empty if none of it explains this one.

`summed early` is summed over the workers after each micro-batch, so that the first ones are summed
several times; `changed early` is changed by a hook or by clipping on each worker before the sum.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class WrongDirection:
    """A gradient of another direction than the exact one, equal on all workers."""

    likeness: Likeness
    alternative: Alternative
    sizes: tuple[float, float]
    """Smallest and largest number of samples of a micro-batch."""

    has_class_weights: bool
    workers: int
    micros: int
    clipped_to: float
    """Maximum of the first call that clips; NaN if none does."""

    wrong: tuple[str, ...]
    """Names of the gradients that are not the exact ones."""

    number: int
    factor: float
    """Factor to the exact ones that all of these have, while others are right; NaN if none."""

    loss_scales: tuple[float, ...]
    """Factor of each worker's loss to `loss_fn`."""

    most_unequal: tuple[str, ...]
    """Names of the gradients that differ from the exact ones by more than the common scale."""


_SUM_SAMPLES = "sum the losses, and divide by the samples of all workers and micro-batches"
_CHANGE_LATER = "change gradients after they are averaged, equally on all workers"


def _changed_early(e: WrongDirection) -> str:
    text = "each worker changes its own gradient before the average, by a hook or clipping"
    return f"{text}: {e.likeness}"


DIRECTION: tuple[Rule[WrongDirection], ...] = (
    Rule(
        check="gradient direction",
        level="note",
        when=lambda e: e.alternative == "mean of means" and e.has_class_weights,
        text=lambda e: (
            f"a mean of means of which each has its own sum of class weights: {e.likeness}"
        ),
        remedy=f"nothing, it is usual with class weights; to be exact, {_SUM_SAMPLES}",
        figure=lambda e: e.likeness.cosine,
    ),
    Rule(
        check="gradient direction",
        level="fault",
        when=lambda e: e.alternative == "mean of means",
        text=lambda e: (
            f"a mean of the means of {e.sizes[0]:g} to {e.sizes[1]:g} samples: {e.likeness}"
        ),
        remedy=_SUM_SAMPLES,
        figure=lambda e: e.likeness.cosine,
    ),
    Rule(
        check="gradient direction",
        level="fault",
        when=lambda e: e.alternative == "last micro-batch",
        text=lambda e: f"only the last of {e.micros} micro-batches counts: {e.likeness}",
        remedy="call zero_grad once per update",
        figure=lambda e: e.likeness.cosine,
    ),
    Rule(
        check="gradient direction",
        level="fault",
        when=lambda e: e.alternative == "summed early",
        text=lambda e: (
            f"gradients are summed over {e.workers} workers after each of {e.micros} "
            f"micro-batches: {e.likeness}"
        ),
        remedy="sum gradients over workers once per update, after the last micro-batch",
        figure=lambda e: e.likeness.cosine,
    ),
    Rule(
        check="clipping",
        level="fault",
        when=lambda e: e.alternative == "changed early" and not math.isnan(e.clipped_to),
        text=_changed_early,
        remedy=_CHANGE_LATER,
        figure=lambda e: e.clipped_to,
    ),
    Rule(
        check="gradient direction",
        level="fault",
        when=lambda e: e.alternative == "changed early",
        text=_changed_early,
        remedy=_CHANGE_LATER,
        figure=lambda e: e.likeness.cosine,
    ),
    Rule(
        check="gradient direction",
        level="fault",
        when=lambda e: not math.isnan(e.factor),
        text=lambda e: (
            f"{len(e.wrong)} of {e.number} gradients are {three_digits(e.factor)} times those of "
            f"one process ({shorten(e.wrong, most=3)}), the others right"
        ),
        remedy="divide every gradient by the workers once",
        figure=lambda e: e.factor,
    ),
    Rule(
        check="gradient direction",
        level="fault",
        when=lambda e: max(e.loss_scales) > (1 + _NAMED_SCALE) * min(e.loss_scales),
        text=lambda e: (
            f"the workers' losses are {shorten([f'{scale:.4g}' for scale in e.loss_scales])} "
            f"times loss_fn: {e.likeness}"
        ),
        remedy="multiply the loss by the same factor on every worker",
        figure=lambda e: e.likeness.cosine,
    ),
    Rule(
        check="gradient direction",
        level="unknown",
        text=lambda e: (
            f"{e.likeness}, equal on all workers, most in {shorten(e.most_unequal, most=3)}: a "
            "fault, a term of the loss that loss_fn has not, or a step that changes weights"
        ),
        remedy="for the audit leave such terms out of the step; what then remains is a fault",
        figure=lambda e: e.likeness.cosine,
    ),
)

# The scale is a product of a factor in the loss, which was seen, and one after it. Each is named by
# the first rule that holds; a factor of 1 has no rule with a text.


@dataclass(frozen=True, slots=True, kw_only=True)
class Factors:
    """A wrong scale, and the numbers of which it may be made."""

    scale: float
    of_loss: float
    """Factor of the script's loss to the mean over the samples of an update, 1 if not seen."""

    loss_scale: float
    """Scale of the script's GradScaler; 1 without one."""

    workers: int
    micros: int
    most_micros: int
    """Largest number of micro-batches of an update so far."""

    batch: float
    """Number of samples of a micro-batch of one worker."""

    @property
    def after_loss(self) -> float:
        """Factor that is not in the loss."""
        return self.scale / self.of_loss

    @property
    def is_unscaled_twice(self) -> bool:
        """True if the scale is the inverse of the loss scale."""
        scale = self.of_loss * self.loss_scale
        return scale >= _LEAST_LOSS_SCALE and is_near(self.scale, 1 / scale)

    @property
    def is_loss_scale(self) -> bool:
        """True if the factor of the loss is a power of two such as a GradScaler's."""
        power = math.log2(self.of_loss)
        return self.of_loss >= _LEAST_LOSS_SCALE and is_near(power, round(power), 1e-6)


_SCALE = "gradient scale"

IN_LOSS: tuple[Rule[Factors], ...] = (
    Rule(
        check=_SCALE,
        level="fault",
        when=lambda e: e.is_unscaled_twice,
        text=lambda e: (
            f"gradients are divided by the loss scale {e.of_loss * e.loss_scale:g} twice"
        ),
        remedy="unscale once: scaler.step does it unless unscale_ was called",
    ),
    Rule(check=_SCALE, level="fine", when=lambda e: is_near(e.of_loss, 1), text=""),
    Rule(
        check=_SCALE,
        level="fault",
        when=lambda e: is_near(e.of_loss, e.micros / e.most_micros),
        text=lambda e: (
            f"the last {e.micros} micro-batches of an epoch are divided by {e.most_micros}"
        ),
        remedy="divide by the micro-batches that the update has",
    ),
    Rule(
        check=_SCALE,
        level="fault",
        when=lambda e: is_near(e.of_loss, e.micros),
        text=lambda e: f"the losses of {e.micros} micro-batches are added, not averaged",
        remedy="divide each by their number",
    ),
    Rule(
        check=_SCALE,
        level="fault",
        when=lambda e: is_near(e.of_loss, 1 / e.micros),
        text=lambda e: f"the loss is divided by {e.micros} micro-batches twice",
        remedy="divide it once",
    ),
    Rule(
        check=_SCALE,
        level="fault",
        when=lambda e: is_near(e.of_loss, e.batch),
        text=lambda e: f"the loss is a sum over {e.batch:g} samples, not a mean",
        remedy="take their mean",
    ),
    Rule(
        check=_SCALE,
        level="fault",
        when=lambda e: e.is_loss_scale,
        text=lambda e: f"the gradient still has the loss scale {e.of_loss:g}",
        remedy="call scaler.step(optimizer), or scaler.unscale_ before the update",
    ),
    Rule(
        check=_SCALE,
        level="fault",
        text=lambda e: f"the loss is {three_digits(e.of_loss)} times loss_fn",
        remedy="remove the factor",
    ),
)

AFTER_LOSS: tuple[Rule[Factors], ...] = (
    # Dividing by the loss scale twice explains the whole scale.
    Rule(check=_SCALE, level="fine", when=lambda e: e.is_unscaled_twice, text=""),
    Rule(check=_SCALE, level="fine", when=lambda e: is_near(e.after_loss, 1), text=""),
    Rule(
        check=_SCALE,
        level="fault",
        when=lambda e: is_near(e.after_loss, e.workers),
        text=lambda e: f"gradients are summed over {plural(e.workers, 'worker')}, not averaged",
        remedy="divide by them once",
    ),
    Rule(
        check=_SCALE,
        level="fault",
        when=lambda e: is_near(e.after_loss, 1 / e.workers),
        text=lambda e: f"gradients are divided by {plural(e.workers, 'worker')} twice",
        remedy="divide once: DistributedDataParallel and Horovod average already",
    ),
    Rule(
        check=_SCALE,
        level="unknown",
        text=lambda e: f"a factor {three_digits(e.after_loss)} after the loss",
        remedy="look for it after backward",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """A gradient of the exact direction, and another length."""

    scale: float
    samples: float
    causes: tuple[Finding, ...]
    """What IN_LOSS and AFTER_LOSS name."""

    repeats_samples: bool
    """True if the model of some worker saw more samples than the step was given."""

    @property
    def is_unexplained(self) -> bool:
        """True if only the factor after the loss is known, not its reason."""
        return bool(self.causes) and self.causes[0].level == "unknown"


def _scale_text(e: Scale) -> str:
    causes = " and ".join(cause.text for cause in e.causes)
    return (
        f"{three_digits(e.scale)} times that of one process with all {e.samples:,.0f} samples: "
        f"{causes or 'no factor of the script explains it'}"
    )


def _scale_remedy(e: Scale) -> str:
    return "; ".join(cause.remedy for cause in e.causes) or "look for a factor in the loss"


SCALE: tuple[Rule[Scale], ...] = (
    Rule(
        check=_SCALE,
        level="unknown",
        when=lambda e: e.repeats_samples,
        text=lambda e: f"{_scale_text(e)}; the step passes each sample more than once",
        remedy="leave the other passes out of the step for the audit",
        figure=lambda e: e.scale,
    ),
    Rule(
        check=_SCALE,
        level="unknown",
        # It may be clipping in the script's own way, which an audit does not see.
        when=lambda e: e.scale < 1 and e.is_unexplained,
        text=_scale_text,
        remedy=lambda e: (
            "clip with torch.nn.utils.clip_grad_norm_, which is checked; else " + _scale_remedy(e)
        ),
        figure=lambda e: e.scale,
    ),
    Rule(
        check=_SCALE,
        level="fault",
        text=_scale_text,
        remedy=_scale_remedy,
        figure=lambda e: e.scale,
    ),
)
