"""Whether an update's gradient is that of one process with the whole global batch.

The gradient is compared with the exact one: the sum over all samples on all workers of the
gradients of their losses, over the number of samples. If the direction is the same, the scale
names the cause. If not, what people compute instead is tried: each worker's own gradient, the mean
of unequal means, the last micro-batch, gradients clipped before they are averaged.
"""

import math
from collections.abc import Sequence
from itertools import zip_longest

import numpy as np
import torch
from torch import Tensor, nn

from largebatch.audit.causes import NAMED_SCALE, causes_of, float16_remedy
from largebatch.audit.comparison import (
    Fit,
    Numbers,
    Shares,
    Transform,
    compare,
    compare_alone,
    names_of_unequal,
)
from largebatch.audit.findings import Finding, Level, fault
from largebatch.audit.ranks import Ranks
from largebatch.audit.recording import Update
from largebatch.audit.reference import Gradients, Reference
from largebatch.errors import shorten
from largebatch.formatting import three_digits

SAME = 0.02
"""Largest residual of equal directions. Sums in another order leave 1e-6 in float32; bfloat16 has 8
bits, so rounding gradients or sums once leaves 0.2 %, and several times up to 1 %."""

_SAME_SCALE = 0.02
"""Largest relative difference of equal scales, for the same reason. People's faults are factors of
2 or more: workers, micro-batches, samples."""

_EXPLAINED = 0.1
"""An alternative explains a direction if its residual is this part of the exact one's, or less."""

_EQUAL = 1e-3
"""Largest relative difference of gradients that workers share. All-reduce gives all of them the
same bits; sums in several orders (a hierarchy, compression) may differ in the last."""

_TINY = 1e-6
"""Length of a gradient relative to the longest one, below which it may be rounding only."""

_OTHER_LOSS = 0.99
"""Cosine of the gradients of two losses on the logits, below which they are different losses."""

_LOST = 0.01
"""Part of a gradient's values that become zero in a type before this is a fault."""


def check_gradient(
    update: Update, parameters: Sequence[nn.Parameter], names: Sequence[str], ranks: Ranks
) -> list[Finding]:
    """Compare one update with that of one process; every worker calls this."""
    error = None if isinstance(update.reference, Reference) else str(update.reference)
    ranks.require(
        "gradient scale",
        "the pass that is compared with",
        error,
        remedy="the model and loss_fn must run again on a batch, and on a half of it",
    )
    counts = ranks.gather(len(update.reference.counts))
    if not all(counts):
        return [_no_forward_pass(is_inside=update.micros > 0 and not any(counts))]
    found = _check_places(update, names, ranks)
    _leave_out(update, update.reference)
    return found + _Comparison(update, update.reference, parameters, names, ranks).findings()


def _check_places(update: Update, names: Sequence[str], ranks: Ranks) -> list[Finding]:
    """Return a fault if optimizers have other tensors than the model's, or than other workers'.

    From here on only the tensors that all of them have are compared.
    """
    everyone = [set(it) for it in ranks.gather(sorted(update.places))]
    update.places = set.intersection(*everyone)
    left_out = {place for place, it in enumerate(update.gradients) if it is not None}
    some, lost = set.union(*everyone) - update.places, left_out - set.union(*everyone)
    if not some and not (lost and update.strangers):
        return []
    wrong = [names[place] for place in sorted(some or lost)]
    where = f"no optimizer, and {update.strangers} others that get no gradient are"
    if some:
        where = "the optimizers of some workers only"
    text = f"{len(wrong)} of {len(names)} tensors ({shorten(wrong, most=3)}) are in {where}"
    remedy = "make each worker's optimizer from all parameters of the model as it is trained"
    return [fault("updates", text, remedy, float(len(wrong)))]


def _leave_out(update: Update, reference: Reference) -> None:
    """Drop the gradients of parameters that are not compared."""
    parts = (reference.total, reference.mean, reference.last, reference.reduced, reference.hooked)
    for gradients in (update.gradients, *parts):
        for place in set(range(len(gradients))) - update.places:
            gradients[place] = None


def _no_forward_pass(*, is_inside: bool) -> Finding:
    """Return the finding on an update before which the model has not run."""
    text = "no forward pass of the model in training mode was seen before the update"
    remedy = "pass the model that the step trains, in training mode"
    if is_inside:
        text = "the forward pass is inside optimizer.step(closure), so there is no gradient before"
        remedy = "pass a `step` that calls backward, and then optimizer.step() without a closure"
    return Finding(check="gradient scale", level="unknown", text=text, remedy=remedy)


class _Comparison:
    """The comparisons of one update; every method that compares is called by all workers."""

    def __init__(
        self,
        update: Update,
        reference: Reference,
        parameters: Sequence[nn.Parameter],
        names: Sequence[str],
        ranks: Ranks,
    ) -> None:
        self.update, self.reference, self.ranks = update, reference, ranks
        self.parameters, self.names = parameters, names
        scales, cosine = reference.loss_scales, reference.loss_cosine
        seen = sum(scales) / len(scales) if scales else 0
        facts = ranks.gather([reference.counts, reference.by_weight, seen, cosine])
        counts, by_weight, factors, cosines = (list(it) for it in zip(*facts, strict=True))
        scale = sum(factors) / len(facts) / update.loss_scale
        self.loss_scales = factors
        self.shares = Shares(counts, any(by_weight), scale or math.nan, min(cosines))

    def findings(self) -> list[Finding]:
        """Return the findings on precision, clipping, scale and direction."""
        nothing = [] if self.shares.samples else [_no_forward_pass(is_inside=False)]
        if broken := self._not_finite() or nothing:
            return broken
        before = self._clipped_before()
        if self._is_other_loss():
            text = (
                f"the step's loss is not loss_fn (cosine {self.shares.loss_cosine:.3f} on the "
                "logits), so the gradient was not compared"
            )
            remedy = "pass the loss that the step computes"
            unknown = Finding(check="gradient direction", level="unknown", text=text, remedy=remedy)
            return [*before, unknown]
        exact = self._fit(self.reference.total, self.shares.samples, transform=self._clip)
        lost = self._underflow(exact)
        unequal = self._unequal()
        if before or unequal:
            return [*lost, *(before or unequal)]
        found = [*lost, *self._clipping()]
        if any(it.level == "fault" for it in found):
            return found
        other = None if _is_same(exact) else self._left_or_zeroed(exact)
        other = other or self._by_hooks(exact)
        if other is None and exact.residual > SAME:
            other = self._direction(exact)
        return [*found, *([other] if other else self._scale(exact))]

    def _fit(self, parts: Gradients, divisor: float, *, transform: Transform | None = None) -> Fit:
        return compare(
            self.update.gradients,
            parts,
            self.parameters,
            self.ranks,
            divisor=divisor,
            transform=transform,
        )

    def _clip(self, exact: Tensor, parameter: nn.Parameter) -> Tensor:
        """Clip the exact gradient of a parameter as the script clipped its own."""
        for clip in self.update.clips:
            if id(parameter) not in clip.lengths:
                continue
            exact = exact.clamp(-clip.most, clip.most) if clip.norm is None else exact * clip.factor
        return exact

    def _changed(self, gradient: Tensor, parameter: nn.Parameter) -> Tensor:
        """Call a parameter's own hooks with a gradient, and clip it."""
        for hook in list((parameter._backward_hooks or {}).values()):
            shaped = gradient.reshape(parameter.shape).to(parameter.dtype)
            result = hook(shaped)
            gradient = shaped if result is None else result
        return self._clip(gradient.flatten().double(), parameter)

    def _not_finite(self) -> list[Finding]:
        """Return a fault if gradients overflowed, with where."""
        got = [it for it in self.update.gradients if it is not None]
        bad = sum(int((~it.isfinite()).sum()) for it in got)
        facts = self.ranks.gather([bad, sum(it.numel() for it in got), self.reference.is_finite])
        if not any(it[0] for it in facts) and all(it[2] for it in facts):
            return []
        worst = max(facts, key=lambda it: it[0])
        where = [str(rank) for rank, it in enumerate(facts) if not it[2]]
        if where:
            text = f"the exact gradient is infinite or NaN too, on worker {shorten(where)}"
            remedy = "look for the cause in the data or the rate: it is not in the reduction"
        else:
            text, remedy = "that of one process is finite", float16_remedy("overflows")
        return [
            Finding(
                check="precision",
                level="fault",
                text=f"{worst[0]:,} of {worst[1]:,} values of the gradient are infinite or NaN; "
                + text,
                remedy=remedy,
                figure=worst[0],
            )
        ]

    def _underflow(self, exact: Fit) -> list[Finding]:
        """Return a fault if values became zero on the way, or that none did."""
        lost, of = float(exact.lost.sum()), float(exact.nonzero.sum())
        share = lost / of if of else 0.0
        if share <= _LOST or not self._uses_float16():
            return []
        text = f"{100 * share:.1f} % of the values that are not zero in one process arrived as zero"
        remedy = float16_remedy("underflows")
        return [Finding(check="precision", level="fault", text=text, remedy=remedy, figure=share)]

    def _uses_float16(self) -> bool:
        """Return True if gradients may have been float16 on any worker.

        Those of float32 and bfloat16 do not underflow where the exact ones do not.
        """
        own = any(it is not None and it.dtype == torch.float16 for it in self.update.gradients)
        return any(self.ranks.gather(own or self.update.may_be_float16))

    def _is_other_loss(self) -> bool:
        return self.shares.loss_cosine < _OTHER_LOSS

    def _unequal(self) -> list[Finding]:
        """Return a fault if the workers have different gradients."""
        mean = self._fit(self.update.gradients, self.ranks.size)
        unequal = names_of_unequal(mean, self.names, _EQUAL)
        return [self._not_reduced(unequal)] if unequal else []

    def _not_reduced(self, unequal: list[str]) -> Finding:
        exact = self._fit(self.reference.total, self.shares.samples)
        cosine = exact.cosine
        alone = compare_alone(self.update.gradients, self.reference.total, self.parameters)
        is_own = all(it <= SAME for it in self.ranks.gather(alone.residual))
        many = f"{len(unequal)} of {len(self.names)} gradients differ between workers"
        what = "every worker uses its own gradient" if is_own else f"{many} ({shorten(unequal)})"
        text = f"{what}: cosine {cosine:.3f} with that of one process"
        remedy = (
            "average the gradients before each update: call the DistributedDataParallel model, not "
            "its module, and leave no_sync on the last micro-batch"
        )
        if not is_own:
            remedy = "average all gradients before each update, of these parameters too"
        return fault("gradient direction", text, remedy, cosine)

    def _clipped_before(self) -> list[Finding]:
        """Return a fault if workers clipped gradients with different norms, or in other ways."""
        own = [(it.most, it.norm, it.factor) for it in self.update.clips]
        for call in zip_longest(*self.ranks.gather(own), fillvalue=(math.inf, None, 1.0)):
            limits, norms, factors = zip(*call, strict=True)
            if min(factors) == 1:
                continue
            if max(limits) > (1 + _EQUAL) * min(limits):
                return [self._clipped_by_some(limits, factors)]
            if None in norms or max(norms) - min(norms) <= _EQUAL * max(norms):
                continue
            exact = self._fit(self.reference.total, self.shares.samples)
            length, most = math.sqrt(exact.exact.sum()), limits[0]
            ratio = math.sqrt(exact.own.sum()) / (length * min(1.0, most / (length + 1e-6)))
            text = (
                f"each worker clips its own gradient before they are averaged (norms "
                f"{three_digits(min(norms))} to {three_digits(max(norms))}, maximum {most:g}): the "
                f"result is {three_digits(ratio)} times as long as if clipped after"
            )
            remedy = "call clip_grad_norm_ after the gradients are averaged"
            return [fault("clipping", text, remedy, ratio)]
        return []

    def _clipped_by_some(self, limits: Sequence[float], factors: Sequence[float]) -> Finding:
        number = sum(it < math.inf for it in limits)
        ratio = min(factors) / max(factors)
        text = (
            f"{number} of {self.ranks.size} workers clip gradients" * (number < self.ranks.size)
            or f"workers clip gradients to {min(limits):g} .. {max(limits):g}"
        ) + f": some are {three_digits(ratio)} times as long as those of other workers"
        return fault("clipping", text, "clip on every worker, with the same maximum", ratio)

    def _clipping(self) -> list[Finding]:
        """Return whether gradients were unscaled before they were clipped."""
        whole = self._fit(self.reference.total, self.shares.samples)
        scaled = self.ranks.gather(self._clipped_with_scale(np.sqrt(whole.exact)))[0]
        if scaled is not None:
            remedy = "call scaler.unscale_(optimizer) before clipping, for each optimizer"
            return [fault("clipping", scaled[0], remedy, scaled[1])]
        clips = self.update.clips
        times = sum(it.lengths.keys() == clips[0].lengths.keys() for it in clips)
        if 1 < times == self.shares.micros and any(it.factor < 1 for it in clips):
            text = f"gradients are clipped {times} times, in each of the micro-batches of an update"
            remedy = "clip once, when the gradients of all of them are summed"
            return [fault("clipping", text, remedy, float(times))]
        for clip in clips:
            if clip.norm is not None:
                text = (
                    f"norm {three_digits(clip.norm)}, maximum {clip.most:g}, equal on all workers"
                )
                return [Finding(check="clipping", level="fine", text=text, figure=clip.norm)]
        return []

    def _clipped_with_scale(self, exact: Numbers) -> tuple[str, float] | None:
        """Describe gradients that were clipped with their loss scale, and how long all were.

        `exact` are the lengths of the exact gradients.
        """
        scale = self.update.loss_scale
        numbers = {id(it): at for at, it in enumerate(self.parameters)}
        clipped: set[int] = set()
        for clip in self.update.clips:
            lengths = {numbers[it]: length for it, length in clip.lengths.items() if it in numbers}
            first = [at for at in lengths if at not in clipped and exact[at] > _TINY * exact.max()]
            clipped |= lengths.keys()
            wrong = [at for at in first if abs(lengths[at] / exact[at] / scale - 1) < NAMED_SCALE]
            if scale > 2 and wrong and clip.factor < 1:
                ratio = math.hypot(*(lengths[at] for at in first)) / math.hypot(*exact[first])
                names = shorten([self.names[at] for at in wrong], most=3)
                text = (
                    f"{len(wrong)} of {len(first)} gradients ({names}) are clipped while they are "
                    f"{scale:g} times too large, the loss scale: all together "
                    f"{three_digits(ratio)} times as long, maximum {clip.most:g}"
                )
                return text, ratio
        return None

    def _left_or_zeroed(self, exact: Fit) -> Finding | None:
        """Return a fault if `zero_grad` was called too late, too early or never."""
        if exact.exact.any() and not exact.own.any():
            text = "the gradients are zero at the update: zero_grad comes between it and backward"
            remedy = "call zero_grad after the update, or before backward"
            if math.isnan(self.shares.loss_scale):
                text = "the gradients are zero at the update: no backward pass was seen before it"
                remedy = "call backward before the update"
            return fault("gradient scale", text, remedy, 0.0)
        everyone = self.ranks.gather(sorted(self.update.held & self.update.places))
        held = sorted(set().union(*everyone))
        if not held:
            return None
        names = shorten([self.names[place] for place in held], most=3)
        text = (
            f"{len(held)} of {len(self.names)} gradients ({names}) still have those of the update "
            f"before: {_likeness(exact)}"
        )
        remedy = "call zero_grad once per update, for all parameters"
        if exact.residual > SAME:
            return fault("gradient direction", text, remedy, exact.cosine)
        return fault("gradient scale", text, remedy, exact.scale)

    def _by_hooks(self, exact: Fit) -> Finding | None:
        """Return what hooks change, if that explains the gradient: a note if it may be meant."""
        if _is_same(exact) or not any(self.ranks.gather(self.reference.has_hooks)):
            return None
        one = self._fit(self.reference.hooked, self.shares.samples, transform=self._changed)
        if not _is_same(one):
            return None
        if exact.residual <= SAME:
            text = f"hooks multiply all gradients by {three_digits(exact.scale)}"
            remedy = "remove these hooks: DistributedDataParallel averages, the rate scales"
            return fault("gradient scale", text, remedy, exact.scale)
        some = self._of_some_tensors(exact)
        if some is not None and (some.figure or 0) > 1:
            return some
        names = names_of_unequal(exact, self.names, SAME)
        return Finding(
            check="gradient direction",
            level="note",
            text=f"hooks change {len(names)} of {len(self.names)} gradients "
            f"({shorten(names, most=3)}): cosine {exact.cosine:.3f} with those without hooks",
            remedy="nothing if that is meant: one process with these hooks computes the same",
            figure=exact.cosine,
        )

    def _direction(self, exact: Fit) -> Finding:
        """Name what was computed instead of the exact gradient."""
        shares, limit = self.shares, max(_EXPLAINED * exact.residual, 1e-4)
        cosine = exact.cosine
        if any(self.ranks.gather(self.reference.draws_again)):
            text = (
                "the backward pass recomputes layers with other random numbers than their forward "
                f"pass: {_likeness(exact)}"
            )
            remedy = "call checkpoint with preserve_rng_state=True, and draw with torch"
            return fault("gradient direction", text, remedy, cosine)
        if not shares.are_equal:
            mean = self._fit(self.reference.mean, self.ranks.size, transform=self._clip)
            if mean.residual <= limit:
                return self._mean_of_means(cosine)
        if shares.micros > 1 and (cause := self._of_micros(limit)):
            return fault("gradient direction", f"{cause[0]}: {_likeness(exact)}", cause[1], cosine)
        if other := self._changed_before(exact, limit) or self._of_some_tensors(exact):
            return other
        if max(self.loss_scales) > (1 + NAMED_SCALE) * min(self.loss_scales):
            each = shorten([f"{it:.4g}" for it in self.loss_scales])
            text = f"the workers' losses are {each} times loss_fn: {_likeness(exact)}"
            remedy = "multiply the loss by the same factor on every worker"
            return fault("gradient direction", text, remedy, cosine)
        worst = sorted(zip(exact.residuals(), self.names, strict=False), reverse=True)
        names = [name for residual, name in worst if residual > SAME]
        text = (
            f"{_likeness(exact)}, equal on all workers, most in "
            f"{shorten(names, most=3)}: a fault, a term of the loss that loss_fn has not (weights, "
            "a second head), or a step that changes weights or gradients (SAM)"
        )
        remedy = "for the audit leave such terms out of the step; what then remains is a fault"
        return Finding(
            check="gradient direction", level="unknown", text=text, remedy=remedy, figure=cosine
        )

    def _of_micros(self, limit: float) -> tuple[str, str] | None:
        """Return why micro-batches of an update have different weights, and the remedy."""
        number, size = self.shares.micros, self.ranks.size
        if self._fit(self.reference.last, size, transform=self._clip).residual <= limit:
            text = f"only the last of {number} micro-batches counts"
            return text, "call zero_grad once per update, not per micro-batch"
        if self._fit(self.reference.reduced, size, transform=self._clip).residual <= limit:
            text = (
                f"gradients are summed over {size} workers after each of {number} micro-batches, "
                f"so that a micro-batch counts {size} times as often as the next one"
            )
            return text, "sum gradients over workers once per update, after the last micro-batch"
        return None

    def _changed_before(self, exact: Fit, limit: float) -> Finding | None:
        """Return a fault if workers changed their own gradients before they were averaged."""
        own: Gradients = [
            None if it is None else self._changed(it, at)
            for it, at in zip(self.reference.mean, self.parameters, strict=True)
        ]
        if self._fit(own, self.ranks.size).residual > limit:
            return None
        clip = next((it for it in self.update.clips if it.norm is None), None)
        if clip is None:
            text = f"hooks change each worker's own gradient before the average: {_likeness(exact)}"
            remedy = "change gradients after they are averaged, in the same way on all workers"
            return fault("gradient direction", text, remedy, exact.cosine)
        text = f"each worker clips values of its own gradient to {clip.most:g}, before the average"
        remedy = "call clip_grad_value_ after the gradients are averaged"
        return fault("clipping", text, remedy, clip.most)

    def _of_some_tensors(self, exact: Fit) -> Finding | None:
        """Return a fault if some tensors are right, and others a factor of the workers off."""
        used, size = exact.exact > 0, self.ranks.size
        factors = exact.product[used] / exact.exact[used]
        rest = np.abs(exact.own[used] - factors**2 * exact.exact[used])
        named = {1.0, size, 1 / size, self.update.loss_scale, 1 / self.update.loss_scale}
        known = [np.abs(factors / it - 1) <= _SAME_SCALE for it in sorted(named)]
        right = known[sorted(named).index(1)]
        parallel = rest <= SAME**2 * exact.own[used]
        if not (parallel & np.any(known, 0)).all() or not right.any() or right.all():
            return None
        names = [name for name, it in zip(self.names, used, strict=True) if it]
        wrong = [name for name, it in zip(names, right, strict=True) if not it]
        factor = float(factors[~right][0])
        text = (
            f"{len(wrong)} of {len(names)} gradients are {three_digits(factor)} times those of one "
            f"process ({shorten(wrong, most=3)}), the others are right"
        )
        remedy = "divide every gradient by the workers once, and by the loss scale once"
        return fault("gradient direction", text, remedy, factor)

    def _mean_of_means(self, cosine: float) -> Finding:
        """Return a fault, or a note if only class weights differ, as in most scripts with them."""
        counts = [sum(it) / max(len(it), 1) for it in self.shares.counts]
        every = [count for of_worker in self.shares.counts for count in of_worker]
        unit = "units of class weight" if self.shares.by_weight else "samples"
        text = (
            f"a mean of the means of {min(every):g} to {max(every):g} {unit} (workers "
            f"{shorten([f'{it:g}' for it in counts])}): cosine {cosine:.3f} with the mean over all "
            "samples"
        )
        remedy = f"sum the losses, and divide by the {unit} of all workers and micro-batches"
        level: Level = "fault"
        if self.shares.by_weight:
            level, remedy = (
                "note",
                f"nothing, it is usual with class weights; to be exact, {remedy}",
            )
        return Finding(
            check="gradient direction", level=level, text=text, remedy=remedy, figure=cosine
        )

    def _scale(self, exact: Fit) -> list[Finding]:
        scale, shares = exact.scale, self.shares
        if abs(scale - 1) <= _SAME_SCALE:
            text = f"{scale:.4f} times that of one process with all {shares.text}"
            level: Level = "fine"
            direction = Finding(
                check="gradient direction",
                level=level,
                text=f"cosine {exact.cosine:.6f}",
                figure=exact.cosine,
            )
            return [
                Finding(check="gradient scale", level=level, text=text, figure=scale),
                direction,
            ]
        causes = causes_of(
            scale,
            loss_scale=shares.loss_scale,
            workers=self.ranks.size,
            micros=shares.micros,
            unscaled=self.update.loss_scale,
            batch=shares.samples / sum(map(len, shares.counts)),
        )
        why = " and ".join(it.text for it in causes) or "no factor of the script explains it"
        text = f"{three_digits(scale)} times that of one process with all {shares.text}: {why}"
        remedy = "; ".join(it.remedy for it in causes) or "look for a factor in the loss"
        certain = scale > 1 or any(it.is_certain for it in causes)
        if any(self.ranks.gather(self.update.repeats_samples)):
            text += "; the step passes each sample more than once"
            remedy, certain = "leave the other passes out of the step for the audit", False
        level = "fault" if certain else "unknown"
        return [
            Finding(check="gradient scale", level=level, text=text, remedy=remedy, figure=scale)
        ]


def _is_same(fit: Fit) -> bool:
    return fit.residual <= SAME and abs(fit.scale - 1) <= _SAME_SCALE


def _likeness(exact: Fit) -> str:
    """Describe the direction and the length of a gradient along the exact one."""
    text = f"cosine {exact.cosine:.3f} with that of one process"
    if abs(exact.scale - 1) <= _SAME_SCALE:
        return text
    return f"{text}, and {three_digits(exact.scale)} times as long along it"
