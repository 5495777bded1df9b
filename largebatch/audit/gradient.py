"""Whether an update's gradient is that of one process with the whole global batch.

The gradient is compared with the exact one: the sum over all samples on all workers of the
gradients of their losses, over the number of samples. If the direction is the same, the scale
names the cause. If not, what people compute instead is tried: each worker's own gradient, the mean
of unequal means, the last micro-batch, gradients clipped before they are averaged.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from largebatch.audit.findings import Finding, fault, fine, note, unknown
from largebatch.audit.ranks import Ranks
from largebatch.audit.recording import Update
from largebatch.audit.reference import Gradients, Reference, weighted
from largebatch.audit.replicas import differences
from largebatch.errors import shorten
from largebatch.formatting import plural, three_digits

SAME = 0.02
"""Largest residual of equal directions. Sums in another order leave 1e-6 in float32; bfloat16 has 8
bits, so rounding gradients or sums once leaves 0.2 %, and several times up to 1 %."""

_SAME_SCALE = 0.02
"""Largest relative difference of equal scales, for the same reason. People's faults are factors of
2 or more: workers, micro-batches, samples."""

_NAMED_SCALE = 0.05  # largest relative difference of a scale from the factor that explains it

_LEAST_LOSS_SCALE = 2**4  # power of two from which on a factor of the loss is a loss scale

_EXPLAINED = 0.1
"""An alternative explains a direction if its residual is this part of the exact one's, or less."""

_EQUAL = 1e-3
"""Largest relative difference of gradients that workers share. All-reduce gives all of them the
same bits; sums in several orders (a hierarchy, compression) may differ in the last."""

_OTHER_LOSS = 0.99
"""Cosine of the gradients of two losses on the logits, below which they are different losses."""

_LOST = 0.01  # part of a gradient's values that become zero in a type before this is a fault

_FLOAT16 = "send float32 or bfloat16, or divide by the workers before the sum and use a GradScaler"

Numbers = npt.NDArray[np.float64]

Transform = Callable[[Tensor, nn.Parameter], Tensor]
"""Function that does to a reference what the script did to its gradient after the reduction."""


@dataclass(frozen=True, slots=True)
class Fit:
    """How gradients and a reference compare; arrays have a value for each parameter.

    A Fit over several workers is their mean, and equal on all of them.
    """

    own: Numbers
    """Squared lengths of the script's gradients."""

    product: Numbers
    """Products of the script's gradients with the references."""

    exact: Numbers
    """Squared lengths of the references."""

    lost: Numbers
    """Numbers of values that are zero, while those of the references are not."""

    nonzero: Numbers
    """Numbers of values of the references that are not zero."""

    @property
    def scale(self) -> float:
        """Factor by which the reference is multiplied for the least distance."""
        square = float(self.exact.sum())
        return float(self.product.sum()) / square if square else math.nan

    @property
    def cosine(self) -> float:
        """Cosine of the angle between gradient and reference; 1 if both are zero."""
        length = math.sqrt(float(self.own.sum()) * float(self.exact.sum()))
        if not length:
            return 1.0 if not self.own.sum() and not self.exact.sum() else 0.0
        return float(self.product.sum()) / length

    @property
    def residual(self) -> float:
        """Part of the gradient's length that no factor of the reference explains, 0 .. 1."""
        own, product, exact = (float(it.sum()) for it in (self.own, self.product, self.exact))
        if not exact:
            return float(own > 0)
        rest, largest = own - product**2 / exact, max(own, product**2 / exact)
        return math.sqrt(max(rest, 0.0) / largest) if largest else 0.0

    def names_of_unequal(
        self, names: Sequence[str], tolerance: float, *, scale: float = 1.0
    ) -> list[str]:
        """Return the names of the gradients that differ from `scale` times the references by this
        part or more, those that differ most first.
        """
        rest = self.own - 2 * scale * self.product + scale**2 * self.exact
        limit = tolerance**2 * np.maximum(self.own, 1e-12 * self.own.sum())
        order = np.argsort(-rest / np.maximum(limit, np.finfo(np.float64).tiny), kind="stable")
        return [names[place] for place in order if rest[place] > limit[place]]


def check_gradient(
    update: Update, parameters: Mapping[str, nn.Parameter], ranks: Ranks, *, most: int = 0
) -> list[Finding]:
    """Compare one update with that of one process; every worker calls this.

    `parameters` are those of the model that are trained, by name; `most` is the largest number of
    micro-batches of an update before this one.
    """

    def reference_of() -> Reference:
        if not isinstance(update.reference, Reference):
            raise update.reference
        return update.reference

    what = "the pass that is compared with"
    remedy = "loss_fn(model(images), labels) must run again on a half of a batch; or pass `forward`"
    reference = ranks.attempt("gradient scale", what, reference_of, remedy=remedy)
    counts = ranks.gather([it.samples for it in reference.passes])
    if not all(counts) or not sum(map(sum, counts)):
        text = "no forward pass of the model in training mode was seen before the update"
        remedy = "pass the model that the step trains, and call backward outside of a closure"
        return [unknown("gradient scale", text, remedy)]
    found = _check_places(update, [*parameters], ranks)
    passes = [it.gradients for it in reference.passes]
    for gradients in (update.gradients, *passes, *reference.hooked):
        for place in set(range(len(gradients))) - update.places:
            gradients[place] = None
    return found + _Comparison(update, reference, parameters, ranks, counts, most=most).findings()


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


class _Comparison:
    """The comparisons of one update; every method that compares is called by all workers."""

    def __init__(
        self,
        update: Update,
        reference: Reference,
        named: Mapping[str, nn.Parameter],
        ranks: Ranks,
        counts: list[list[float]],
        *,
        most: int,
    ) -> None:
        self.update, self.reference, self.ranks = update, reference, ranks
        self.names, self.parameters = [*named], [*named.values()]
        self.counts, self.micros = counts, max(map(len, counts))
        self.most = max(most, self.micros)
        self.samples = math.fsum(map(math.fsum, counts))
        losses = [it.own_loss for it in reference.passes if it.own_loss]
        seen = sum(scale for scale, _ in losses) / max(1, len(losses))
        facts = ranks.gather([seen, min((cosine for _, cosine in losses), default=1.0)])
        self.loss_scales = [it[0] for it in facts]
        self.loss_cosine = min(it[1] for it in facts)
        self.loss_scale = sum(self.loss_scales) / len(facts) / update.loss_scale or math.nan
        """Factor of the script's loss to the mean loss of a micro-batch; NaN if not seen."""

        self.passes = [it.gradients for it in reference.passes]
        self.total = weighted(self.passes, counts[ranks.rank])
        self.unclipped = self._fit(self.total, self.samples)

    def findings(self) -> list[Finding]:
        """Return the findings on precision, clipping, scale and direction."""
        if broken := self._not_finite():
            return broken
        before = self._clipped_before()
        if self.loss_cosine < _OTHER_LOSS:
            text = f"the step's loss is not loss_fn (cosine {self.loss_cosine:.3f} on the logits)"
            return [*before, unknown("gradient direction", text, "pass the step's own loss")]
        exact = self._fit(self.total, self.samples, transform=self._clip)
        lost = self._underflow(exact)
        if before := before or self._unequal():
            return [*lost, *before]
        found = [*lost, *self._clipping()]
        if any(it.level == "fault" for it in found):
            return found
        if _is_same(exact):
            few, number = len(self.update.places), len(self.names)
            text = f"{exact.scale:.4f} times that of one process with all {self.samples:,.0f} "
            text += "samples" + f", of {few} of {number} tensors" * (few < number)
            scale = fine("gradient scale", text, figure=exact.scale)
            cosine = fine("gradient direction", f"cosine {exact.cosine:.6f}", figure=exact.cosine)
            return [*found, scale, cosine]
        other = self._left_or_zeroed(exact) or self._by_hooks(exact)
        if other is None and exact.residual > SAME:
            other = self._direction(exact)
        return [*found, other or self._scale(exact)]

    def _fit(self, parts: Gradients, divisor: float, *, transform: Transform | None = None) -> Fit:
        """Compare the workers' gradients with the sum of their parts over `divisor`."""
        rows = []
        triples = zip(self.update.gradients, parts, self.parameters, strict=True)
        for gradient, part, parameter in triples:
            own, exact = _filled(gradient, parameter), self.ranks.sum(_filled(part, parameter))
            exact = transform(exact / divisor, parameter) if transform else exact / divisor
            lost = ((exact != 0) & (own == 0)).sum()
            row = [own @ own, own @ exact, exact @ exact, lost, (exact != 0).sum()]
            rows.append(torch.stack(row).double())
        table = self.ranks.sum(torch.stack(rows, 1)) / self.ranks.size
        return Fit(*table.cpu().numpy())  # sync: in an audit only

    def _clip(self, exact: Tensor, parameter: nn.Parameter) -> Tensor:
        for clip in (it for it in self.update.clips if id(parameter) in it.lengths):
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
        got = [it for it in self.update.gradients if it is not None]
        bad = sum(int((~it.isfinite()).sum()) for it in got)
        values = [it for gradients in self.passes for it in gradients if it is not None]
        is_finite = all(bool(it.isfinite().all()) for it in values)
        facts = self.ranks.gather([bad, sum(it.numel() for it in got), is_finite])
        if not any(it[0] for it in facts) and all(it[2] for it in facts):
            return []
        number, of, _ = max(facts, key=lambda it: it[0])
        where = [str(rank) for rank, it in enumerate(facts) if not it[2]]
        text, remedy = f"{number:,} of {of:,} values of the gradient are infinite or NaN", _FLOAT16
        if where:
            text += f", and the exact ones too, on worker {shorten(where)}"
            remedy = "look for the cause in the data or the rate: it is not in the reduction"
        return [fault("precision", text, remedy, number)]

    def _underflow(self, exact: Fit) -> list[Finding]:
        """Return a fault if values became zero in float16; other types do not underflow."""
        share = float(exact.lost.sum()) / max(1.0, float(exact.nonzero.sum()))
        types = {it.dtype for it in self.update.gradients if it is not None}
        is_float16 = self.update.may_be_float16 or torch.float16 in types
        if share <= _LOST or not any(self.ranks.gather(is_float16)):
            return []
        text = f"{100 * share:.1f} % of the values that are not zero in one process arrived as zero"
        return [fault("precision", text, _FLOAT16, share)]

    def _unequal(self) -> list[Finding]:
        mean = self._fit(self.update.gradients, self.ranks.size)
        unequal = mean.names_of_unequal(self.names, _EQUAL)
        if not unequal:
            return []
        weights = dict(zip(self.names, self.parameters, strict=True))
        if self.update.rate and not differences("weights", weights, self.ranks, when=""):
            text = "gradients differ between workers, weights do not: they are averaged or sent"
            remedy = "nothing if weights are averaged on purpose (local SGD)"
            return [unknown("gradient direction", text, remedy)]
        exact, what = self.unclipped, "every worker uses its own gradient"
        remedy = "average the gradients before each update: call the DistributedDataParallel "
        remedy += "model, not its module, and leave no_sync on the last micro-batch"
        if len(unequal) < (exact.exact > 0).sum():
            what = f"{len(unequal)} of {len(self.names)} gradients differ between workers "
            what += f"({shorten(unequal, most=3)})"
        text = f"{what}: cosine {exact.cosine:.3f} with that of one process"
        return [fault("gradient direction", text, remedy, exact.cosine)]

    def _clipped_before(self) -> list[Finding]:
        """Return a fault if workers clipped gradients with different norms, or in other ways."""
        own = [[it.norm, it.most, it.factor] for it in self.update.clips if it.norm is not None]
        for each in zip_longest(*self.ranks.gather(own), fillvalue=[0.0, math.inf, 1.0]):
            norms, limits, factors = (list(it) for it in zip(*each, strict=True))
            if min(factors) == 1.0:
                continue
            if len(set(limits)) > 1:
                ratio = min(factors) / max(factors)  # without clipping the limit is infinite
                text = f"workers clip to norms from {min(limits):g} to {max(limits):g}: lengths of "
                text += f"gradients differ {three_digits(ratio)} times"
                remedy = "clip on every worker, with the same maximum"
                return [fault("clipping", text, remedy, ratio)]
            if max(norms) - min(norms) <= _EQUAL * max(norms):
                continue
            exact = self.unclipped
            length, most = math.sqrt(exact.exact.sum()), limits[0]
            ratio = math.sqrt(exact.own.sum()) / (length * min(1.0, most / (length + 1e-6)))
            text = f"each worker clips its own gradient to {most:g} before the average, which is "
            text += f"{three_digits(ratio)} times as long as if clipped after"
            remedy = "call clip_grad_norm_ after the gradients are averaged"
            return [fault("clipping", text, remedy, ratio)]
        return []

    def _clipping(self) -> list[Finding]:
        """Return how gradients were clipped: with their loss scale, too often, or well."""
        scaled = self.ranks.gather([self._scale_in(it.lengths) for it in self.update.clips])
        clips, scale = self.update.clips, self.update.loss_scale
        for clip, ratio in zip(clips, scaled[0], strict=False):
            if scale > 2 and clip.factor < 1 and _is(ratio, scale):
                text = f"gradients are clipped to {clip.most:g} with their loss scale, {scale:g}"
                remedy = "call scaler.unscale_(optimizer) before clipping"
                return [fault("clipping", text, remedy, ratio)]
        times = sum(it.lengths.keys() == clips[0].lengths.keys() for it in clips)
        if 1 < times == self.micros and any(it.factor < 1 for it in clips):
            text = f"gradients are clipped {times} times, in each of the micro-batches of an update"
            remedy = "clip once, when the gradients of all of them are summed"
            return [fault("clipping", text, remedy, float(times))]
        norms = [it for it in clips if it.norm is not None]
        if not norms:
            return []
        text = f"norm {three_digits(norms[0].norm or 0)}, maximum {norms[0].most:g}, equal on all "
        return [fine("clipping", f"{text}workers", figure=norms[0].norm)]

    def _scale_in(self, lengths: dict[int, float]) -> float:
        """Return how long gradients were before clipping, over the exact lengths."""
        places = [at for at, it in enumerate(self.parameters) if id(it) in lengths]
        before = math.hypot(*(lengths[id(self.parameters[at])] for at in places))
        length = math.sqrt(self.unclipped.exact[places].sum())
        return before / length if length else 1.0

    def _left_or_zeroed(self, exact: Fit) -> Finding | None:
        """Return a fault if `zero_grad` was called too late, too early or never."""
        if exact.exact.any() and not exact.own.any():
            text = "the gradients are zero at the update: no backward comes after zero_grad"
            return fault("gradient scale", text, "call zero_grad after the update", 0.0)
        everyone = self.ranks.gather(sorted(self.update.held & self.update.places))
        held = sorted(set().union(*everyone))
        if not held:
            return None
        names = shorten([self.names[place] for place in held], most=3)
        text = f"{len(held)} of {len(self.names)} gradients ({names}) were not cleared: "
        text += _likeness(exact)
        remedy = "call zero_grad once per update, for all parameters"
        if exact.residual > SAME:
            return fault("gradient direction", text, remedy, exact.cosine)
        return fault("gradient scale", text, remedy, exact.scale)

    def _by_hooks(self, exact: Fit) -> Finding | None:
        """Return a note if hooks explain the gradient, which may be meant."""
        has_hooks = bool(self.reference.hooked) or any(it._backward_hooks for it in self.parameters)
        if exact.residual <= SAME or not any(self.ranks.gather(has_hooks)):
            return None
        hooked = weighted(self.reference.hooked or self.passes, self.counts[self.ranks.rank])
        if not _is_same(self._fit(hooked, self.samples, transform=self._changed)):
            return None
        names = exact.names_of_unequal(self.names, SAME)
        text = f"hooks change {len(names)} of {len(self.names)} gradients "
        text += f"({shorten(names, most=3)}): {_likeness(exact)}"
        remedy = "nothing if that is meant: one process with these hooks computes the same"
        return note("gradient direction", text, remedy, exact.cosine)

    def _direction(self, exact: Fit) -> Finding:
        """Name what was computed instead of the exact gradient."""
        size, limit, cosine = self.ranks.size, max(_EXPLAINED * exact.residual, 1e-4), exact.cosine
        passes, few = self.passes, f"{self.micros} micro-batches"
        mean = weighted(passes, [1 / len(passes)] * len(passes))
        own = [
            None if it is None else self._changed(it, at)
            for it, at in zip(mean, self.parameters, strict=True)
        ]
        has_weights = self.reference.has_weights
        after, each = self._clip, [count for counts in self.counts for count in counts]
        tries: list[tuple[Gradients, Transform | None, str, str]] = []
        if len(set(each)) > 1:
            text = f"a mean of the means of {min(each):g} to {max(each):g} samples"
            remedy = "sum the losses, and divide by the samples of all workers and micro-batches"
            if has_weights:
                text = "a mean of means of which each has its own sum of class weights"
                remedy = f"nothing, it is usual with class weights; to be exact, {remedy}"
            tries += [(mean, after, text, remedy)]
        if self.micros > 1:
            text, remedy = f"only the last of {few} counts", "call zero_grad once per update"
            tries += [(passes[-1], after, text, remedy)]
            text = f"gradients are summed over {size} workers after each of {few}"
            remedy = "sum gradients over workers once per update, after the last micro-batch"
            reduced = weighted(passes, [size ** -float(it) for it in range(len(passes))])
            tries += [(reduced, after, text, remedy)]
        text = "each worker changes its own gradient before the average, by a hook or clipping"
        remedy = "change gradients after they are averaged, equally on all workers"
        tries += [(own, None, text, remedy)]
        for parts, transform, text, remedy in tries:
            if self._fit(parts, size, transform=transform).residual <= limit:
                whole = f"{text}: {_likeness(exact)}"
                if parts is own and self.update.clips:
                    return fault("clipping", whole, remedy, self.update.clips[0].most)
                level = note if has_weights and parts is mean else fault
                return level("gradient direction", whole, remedy, cosine)
        if some := self._of_some_tensors(exact):
            return some
        if max(self.loss_scales) > (1 + _NAMED_SCALE) * min(self.loss_scales):
            scales = shorten([f"{it:.4g}" for it in self.loss_scales])
            text = f"the workers' losses are {scales} times loss_fn: {_likeness(exact)}"
            remedy = "multiply the loss by the same factor on every worker"
            return fault("gradient direction", text, remedy, cosine)
        names = exact.names_of_unequal(self.names, SAME, scale=exact.scale)
        text = f"{_likeness(exact)}, equal on all workers, most in {shorten(names, most=3)}: a "
        text += "fault, a term of the loss that loss_fn has not, or a step that changes weights"
        remedy = "for the audit leave such terms out of the step; what then remains is a fault"
        return unknown("gradient direction", text, remedy, cosine)

    def _of_some_tensors(self, exact: Fit) -> Finding | None:
        """Return a fault if some tensors are right, and others a factor of the workers off."""
        wrong = exact.names_of_unequal(self.names, SAME)
        for factor in (self.ranks.size, 1 / self.ranks.size):
            others = exact.names_of_unequal(self.names, SAME, scale=factor)
            if len(wrong) < (exact.exact > 0).sum() and not set(wrong) & set(others):
                text = f"{len(wrong)} of {len(self.names)} gradients are {three_digits(factor)} "
                text += f"times those of one process ({shorten(wrong, most=3)}), the others right"
                remedy = "divide every gradient by the workers once"
                return fault("gradient direction", text, remedy, factor)
        return None

    def _scale(self, exact: Fit) -> Finding:
        causes = self._causes(exact.scale)
        why = " and ".join(text for text, _ in causes)
        text = f"{three_digits(exact.scale)} times that of one process with all "
        text += f"{self.samples:,.0f} samples: {why or 'no factor of the script explains it'}"
        remedy = "; ".join(it for _, it in causes) or "look for a factor in the loss"
        if any(self.ranks.gather(self.reference.repeats_samples)):
            text += "; the step passes each sample more than once"
            remedy = "leave the other passes out of the step for the audit"
            return unknown("gradient scale", text, remedy, exact.scale)
        if exact.scale < 1 and why.startswith("a factor"):
            remedy = "clip with torch.nn.utils.clip_grad_norm_, which is checked; else " + remedy
            return unknown("gradient scale", text, remedy, exact.scale)
        return fault("gradient scale", text, remedy, exact.scale)

    def _causes(self, scale: float) -> list[tuple[str, str]]:
        """Return the causes of a wrong scale, each with its remedy: of the loss, then of the rest.

        If the script's loss was not seen, its factor is taken to be right.
        """
        workers, micros = self.ranks.size, self.micros
        in_loss = 1.0 if math.isnan(self.loss_scale) else self.loss_scale * micros
        removed = in_loss * self.update.loss_scale
        if removed >= _LEAST_LOSS_SCALE and _is(scale, 1 / removed):
            text = f"gradients are divided by the loss scale {removed:g} twice"
            return [(text, "unscale once: scaler.step does it unless unscale_ was called")]
        batch, few = self.samples / sum(map(len, self.counts)), f"{micros} micro-batches"
        factor = (f"the loss is {three_digits(in_loss)} times loss_fn", "remove the factor")
        power = math.log2(in_loss)
        if in_loss >= _LEAST_LOSS_SCALE and _is(power, round(power), 1e-6):
            text = f"the gradient still has the loss scale {in_loss:g}"
            factor = (text, "call scaler.step(optimizer), or scaler.unscale_ before the update")
        short = f"the last {micros} micro-batches of an epoch are divided by {self.most}"
        of_loss = [
            (1, "", ""),
            (micros / self.most, short, "divide by the micro-batches that the update has"),
            (micros, f"the losses of {few} are added, not averaged", "divide each by their number"),
            (1 / micros, f"the loss is divided by {few} twice", "divide it once"),
            (batch, f"the loss is a sum over {batch:g} samples, not a mean", "take their mean"),
            (in_loss, *factor),
        ]
        rest, many = scale / in_loss, plural(workers, "worker")
        averaged = "divide once: DistributedDataParallel and Horovod average already"
        of_rest = [
            (1, "", ""),
            (workers, f"gradients are summed over {many}, not averaged", "divide by them once"),
            (1 / workers, f"gradients are divided by {many} twice", averaged),
            (rest, f"a factor {three_digits(rest)} after the loss", "look for it after backward"),
        ]
        first = next(it[1:] for it in of_loss if _is(in_loss, it[0]))
        last = next(it[1:] for it in of_rest if _is(rest, it[0]))
        return [cause for cause in (first, last) if cause[0]]


def _is(value: float, expected: float, tolerance: float = _NAMED_SCALE) -> bool:
    return abs(value / expected - 1) <= tolerance


def _is_same(fit: Fit) -> bool:
    return fit.residual <= SAME and abs(fit.scale - 1) <= _SAME_SCALE


def _likeness(exact: Fit) -> str:
    text = f"cosine {exact.cosine:.3f} with that of one process"
    if abs(exact.scale - 1) <= _SAME_SCALE:
        return text
    return f"{text}, and {three_digits(exact.scale)} times as long along it"


def _filled(gradient: Tensor | None, parameter: nn.Parameter) -> Tensor:
    if gradient is None:
        return torch.zeros(parameter.numel(), dtype=torch.float64, device=parameter.device)
    return gradient.to_dense().flatten().double()
