"""Measure whether an update's gradient is that of one process with the whole global batch.

The gradient is compared with the exact one: the sum over all samples on all workers of the
gradients of their losses, over the number of samples. If the direction is the same, the scale
names the cause. If not, what people compute instead is tried: each worker's own gradient, the mean
of unequal means, the last micro-batch, gradients clipped before they are averaged. What the numbers
mean is in `rules/gradient.py`.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from largebatch.audit.ranks import Ranks, StoppedError, unable
from largebatch.audit.recording import Clip, ScriptUpdate
from largebatch.audit.reference import Gradients, Reference, weighted
from largebatch.audit.replicas import measure_difference
from largebatch.audit.rules import gradient as rules
from largebatch.audit.subject import NoLossError
from largebatch.rules import Finding, decide, examine

_EXPLAINED = 0.1
"""An alternative explains a direction if its residual is this part of the exact one's, or less."""

_UNCLIPPED = (0.0, math.inf, 1.0)
"""Norm, maximum and factor of a worker that does not make a call that others make."""

FloatArray = npt.NDArray[np.float64]

Transform = Callable[[Tensor, nn.Parameter], Tensor]
"""Function that does to a reference what the script did to its gradient after the reduction."""


@dataclass(frozen=True, slots=True)
class Fit:
    """How gradients and a reference compare; arrays have a value for each parameter.

    A Fit over several workers is their mean, and equal on all of them.
    """

    own: FloatArray
    """Squared lengths of the script's gradients."""

    product: FloatArray
    """Products of the script's gradients with the references."""

    exact: FloatArray
    """Squared lengths of the references."""

    lost: FloatArray
    """Numbers of values that are zero, while those of the references are not."""

    nonzero: FloatArray
    """Numbers of values of the references that are not zero."""

    @property
    def likeness(self) -> rules.Likeness:
        """Scale, cosine and residual over all parameters."""
        own = float(self.own.sum())
        product = float(self.product.sum())
        exact = float(self.exact.sum())
        if not exact or not own:
            is_equal = not own and not exact
            scale = product / exact if exact else math.nan
            return rules.Likeness(scale, cosine=float(is_equal), residual=float(own > 0))
        along = product**2 / exact
        # Rounding can make the rest negative, or the part along the reference the larger one.
        rest = max(own - along, 0.0) / max(own, along)
        return rules.Likeness(product / exact, product / math.sqrt(own * exact), math.sqrt(rest))

    def names_of_unequal(
        self, names: Sequence[str], tolerance: float, *, scale: float = 1.0
    ) -> tuple[str, ...]:
        """Return the names of the gradients that differ from `scale` times the references by this
        part or more, those that differ most first.
        """
        rest = self.own - 2 * scale * self.product + scale**2 * self.exact
        # A gradient of nearly no length, as of a bias before BatchNorm, is all rounding.
        limit = tolerance**2 * np.maximum(self.own, 1e-12 * self.own.sum())
        order = np.argsort(-rest / np.maximum(limit, np.finfo(np.float64).tiny), kind="stable")
        return tuple(names[place] for place in order if rest[place] > limit[place])


def check_gradient(
    update: ScriptUpdate,
    parameters: Mapping[str, nn.Parameter],
    ranks: Ranks,
    *,
    most: int = 0,
    is_evaluated: bool = False,
) -> list[Finding]:
    """Compare one update with that of one process; every worker calls this.

    `parameters` are those of the model that are trained, by name; `most` is the largest number of
    micro-batches of an update before this one. `is_evaluated` is true if the model was in
    evaluation mode in some pass with gradients.
    """
    try:
        reference = _reference_of(update, ranks)
    except StoppedError as stopped:
        # A step may change which tensors are trained, so that these are not those of the update.
        shapes = [len(update.gradients), *(list(it.shape) for it in parameters.values())]
        of_workers = ranks.gather(shapes)
        if len(update.gradients) != len(parameters) or any(it != shapes for it in of_workers):
            raise
        # Whether workers use equal gradients is seen without a reference.
        unequal = decide(_measure_unequal(update, parameters, ranks), rules.UNEQUAL)
        if not any(it.level == "fault" for it in unequal):
            raise
        return [*unequal, stopped.finding]
    counts = ranks.gather([it.samples for it in reference.passes])
    if not all(counts) or not sum(map(sum, counts)):
        in_evaluation = any(ranks.gather(is_evaluated))
        return decide(rules.NoPass(in_evaluation), rules.NO_PASS)
    findings = decide(_measure_optimized(update, [*parameters], ranks), rules.OPTIMIZED)
    passes = [it.gradients for it in reference.passes]
    for gradients in (update.gradients, *passes, *reference.hooked):
        for place in set(range(len(gradients))) - update.places:
            gradients[place] = None
    comparison = _GradientComparison(update, reference, parameters, ranks, counts, most=most)
    return findings + comparison.findings()


def _reference_of(update: ScriptUpdate, ranks: Ranks) -> Reference:
    """Return the update's reference; raise StoppedError on all workers if one has none."""
    reason = None
    if isinstance(update.reference, NoLossError):
        reason = str(update.reference), update.reference.remedy
    reasons = [it for it in ranks.gather(reason) if it is not None]
    if reasons:
        raise StoppedError(unable("gradient scale", *reasons[0]))

    def reference_of() -> Reference:
        if not isinstance(update.reference, Reference):
            raise update.reference
        return update.reference

    what = "the pass that is compared with"
    remedy = "loss_fn(model(images), labels) must run again on a half of a batch; or pass `forward`"
    return ranks.attempt("gradient scale", what, reference_of, remedy=remedy)


def _measure_unequal(
    update: ScriptUpdate,
    parameters: Mapping[str, nn.Parameter],
    ranks: Ranks,
    unclipped: Fit | None = None,
) -> rules.Unequal | None:
    """Find the gradients that differ between workers; None if none does.

    `unclipped` compares them, before clipping, with the exact ones; None without exact ones.
    """
    mean = _fit(update.gradients, update.gradients, [*parameters.values()], ranks, ranks.size)
    names = mean.names_of_unequal([*parameters], rules.EQUAL)
    if not names:
        return None
    of_process = mean if unclipped is None else unclipped
    # At rate 0, as without an optimizer, weights are equal whatever the gradients are.
    has_rate = bool(update.rate)
    return rules.Unequal(
        names=names,
        number=len(parameters),
        nonzero=int((of_process.exact > 0).sum()),
        cosine=math.nan if unclipped is None else unclipped.likeness.cosine,
        has_equal_weights=has_rate and not measure_difference(parameters, ranks),
    )


def _measure_optimized(update: ScriptUpdate, names: Sequence[str], ranks: Ranks) -> rules.Optimized:
    """Find the tensors that not all optimizers have; only the others are compared from here on."""
    of_workers = [set(places) for places in ranks.gather(sorted(update.places))]
    of_any = set.union(*of_workers)
    update.places = set.intersection(*of_workers)
    with_gradient = {place for place, it in enumerate(update.gradients) if it is not None}
    return rules.Optimized(
        of_some=tuple(names[place] for place in sorted(of_any - update.places)),
        of_none=tuple(names[place] for place in sorted(with_gradient - of_any)),
        number=len(names),
        strangers=update.strangers,
    )


class _GradientComparison:
    """The comparisons of one update; every method that compares is called by all workers."""

    def __init__(
        self,
        update: ScriptUpdate,
        reference: Reference,
        named: Mapping[str, nn.Parameter],
        ranks: Ranks,
        counts: list[list[float]],
        *,
        most: int,
    ) -> None:
        self.update = update
        self.reference = reference
        self.ranks = ranks
        self.names = [*named]
        self.parameters = [*named.values()]
        self.counts = counts
        """Numbers of samples, by worker and micro-batch."""

        self.micros = max(map(len, counts))
        self.most_micros = max(most, self.micros)
        self.samples = math.fsum(map(math.fsum, counts))
        losses = [it.own_loss for it in reference.passes if it.own_loss]
        mean_scale = sum(scale for scale, _ in losses) / max(1, len(losses))
        least_cosine = min((cosine for _, cosine in losses), default=1.0)
        of_workers = ranks.gather([mean_scale, least_cosine])
        self.loss_scales = tuple(scale for scale, _ in of_workers)
        self.loss_cosine = min(cosine for _, cosine in of_workers)
        self.loss_scale = sum(self.loss_scales) / ranks.size / update.loss_scale or math.nan
        """Factor of the script's loss to the mean loss of a micro-batch; NaN if not seen."""

        self.passes = [it.gradients for it in reference.passes]
        self.total = weighted(self.passes, counts[ranks.rank])
        self.unclipped = self._fit(self.total, self.samples)

    def findings(self) -> list[Finding]:
        """Return the findings on precision, clipping, scale and direction.

        What makes later numbers meaningless comes first: values that are not finite, clipping
        before the average, another loss, gradients that differ between workers.
        """
        if not_finite := decide(self._measure_finiteness(), rules.FINITENESS):
            return not_finite
        findings = self._examine_workers_clip()
        if other_loss := decide(rules.OtherLoss(self.loss_cosine), rules.LOSS):
            return findings + other_loss
        exact = self._fit(self.total, self.samples, transform=self._clip)
        lost = decide(self._measure_underflow(exact), rules.UNDERFLOW)
        if findings := findings or decide(self._measure_unequal(), rules.UNEQUAL):
            return lost + findings
        findings = lost + self._examine_clipping()
        if any(it.level == "fault" for it in findings):
            return findings
        return findings + self._examine_gradient(exact)

    def _examine_gradient(self, exact: Fit) -> list[Finding]:
        likeness = exact.likeness
        if likeness.is_same:
            evidence = rules.Exact(
                likeness=likeness,
                samples=self.samples,
                compared=len(self.update.places),
                number=len(self.names),
            )
            return [*examine(evidence, rules.EXACT)]
        if left := decide(self._measure_left(exact), rules.LEFT):
            return left
        if likeness.residual <= rules.SAME:
            return decide(self._measure_scale(likeness.scale), rules.SCALE)
        if hooked := decide(self._measure_hooked(exact), rules.HOOKED):
            return hooked
        return decide(self._measure_direction(exact), rules.DIRECTION)

    def _fit(self, parts: Gradients, divisor: float, *, transform: Transform | None = None) -> Fit:
        """Compare the workers' gradients with the sum of their parts over `divisor`."""
        own = self.update.gradients
        return _fit(own, parts, self.parameters, self.ranks, divisor, transform=transform)

    def _clip(self, exact: Tensor, parameter: nn.Parameter) -> Tensor:
        """Do to a reference what the script's calls did, from the norms that they had."""
        for clip in self.update.clips:
            if id(parameter) not in clip.lengths:
                continue
            is_of_values = clip.norm is None
            exact = exact.clamp(-clip.most, clip.most) if is_of_values else exact * clip.factor
        return exact

    def _changed(self, gradient: Tensor, parameter: nn.Parameter) -> Tensor:
        """Call a parameter's own hooks with a gradient, and clip it."""
        for hook in list((parameter._backward_hooks or {}).values()):
            shaped = gradient.reshape(parameter.shape).to(parameter.dtype)
            result = hook(shaped)
            gradient = shaped if result is None else result
        return self._clip(gradient.flatten().double(), parameter)

    def _measure_finiteness(self) -> rules.Finiteness:
        gradients = [it for it in self.update.gradients if it is not None]
        bad = sum(int((~it.isfinite()).sum()) for it in gradients)
        values = sum(it.numel() for it in gradients)
        references = [it for of_pass in self.passes for it in of_pass if it is not None]
        is_finite = all(bool(it.isfinite().all()) for it in references)
        of_workers = self.ranks.gather([bad, values, is_finite])
        worst = max(of_workers, key=lambda of_worker: of_worker[0])
        workers = tuple(str(rank) for rank, (*_, finite) in enumerate(of_workers) if not finite)
        return rules.Finiteness(bad=worst[0], values=worst[1], workers=workers)

    def _measure_underflow(self, exact: Fit) -> rules.Underflow:
        share = float(exact.lost.sum()) / max(1.0, float(exact.nonzero.sum()))
        types = {it.dtype for it in self.update.gradients if it is not None}
        in_float16 = self.update.may_be_float16 or torch.float16 in types
        return rules.Underflow(share, any(self.ranks.gather(in_float16)))

    def _measure_unequal(self) -> rules.Unequal | None:
        weights = dict(zip(self.names, self.parameters, strict=True))
        return _measure_unequal(self.update, weights, self.ranks, self.unclipped)

    def _examine_workers_clip(self) -> list[Finding]:
        """Compare each call that clips a norm over the workers; return the first fault."""
        calls = [[it.norm, it.most, it.factor] for it in self.update.clips if it.norm is not None]
        for call in zip_longest(*self.ranks.gather(calls), fillvalue=_UNCLIPPED):
            norms, limits, factors = zip(*call, strict=True)
            evidence = rules.WorkersClip(
                norms=norms,
                limits=limits,
                factors=factors,
                length=math.sqrt(self.unclipped.own.sum()),
                exact_length=math.sqrt(self.unclipped.exact.sum()),
            )
            if findings := decide(evidence, rules.WORKERS_CLIP):
                return findings
        return []

    def _examine_clipping(self) -> list[Finding]:
        """Return how gradients were clipped: with their loss scale, too often, or well."""
        clips = self.update.clips
        # Worker 0's lengths decide on all: rounding must not make two of them disagree.
        over_exact = self.ranks.gather([self._over_exact(clip) for clip in clips])[0]
        for clip, ratio in zip(clips, over_exact, strict=False):
            call = rules.ClipCall(
                most=clip.most,
                factor=clip.factor,
                over_exact=ratio,
                loss_scale=self.update.loss_scale,
            )
            if findings := decide(call, rules.CLIP_CALL):
                return findings
        of_norm = next((clip for clip in clips if clip.norm is not None), None)
        calls = rules.ClipCalls(
            times=sum(clip.lengths.keys() == clips[0].lengths.keys() for clip in clips),
            micros=self.micros,
            is_shorter=any(clip.factor < 1 for clip in clips),
            norm=math.nan if of_norm is None or of_norm.norm is None else of_norm.norm,
            most=math.nan if of_norm is None else of_norm.most,
        )
        return decide(calls, rules.CLIP_CALLS)

    def _over_exact(self, clip: Clip) -> float:
        """Return how long gradients were before clipping, over the exact lengths."""
        places = [place for place, it in enumerate(self.parameters) if id(it) in clip.lengths]
        before = math.hypot(*(clip.lengths[id(self.parameters[place])] for place in places))
        length = math.sqrt(self.unclipped.exact[places].sum())
        return before / length if length else 1.0

    def _measure_left(self, exact: Fit) -> rules.Left:
        of_workers = self.ranks.gather(sorted(self.update.held & self.update.places))
        places = sorted(set().union(*of_workers))
        return rules.Left(
            likeness=exact.likeness,
            is_zero=bool(exact.exact.any()) and not exact.own.any(),
            names=tuple(self.names[place] for place in places),
            number=len(self.names),
        )

    def _measure_hooked(self, exact: Fit) -> rules.Hooked | None:
        """Repeat what hooks did, which may be meant; None if that is not this gradient."""
        has_hooks = bool(self.reference.hooked) or any(it._backward_hooks for it in self.parameters)
        if not any(self.ranks.gather(has_hooks)):
            return None
        hooked = weighted(self.reference.hooked or self.passes, self.counts[self.ranks.rank])
        if not self._fit(hooked, self.samples, transform=self._changed).likeness.is_same:
            return None
        names = exact.names_of_unequal(self.names, rules.SAME)
        return rules.Hooked(likeness=exact.likeness, names=names, number=len(self.names))

    def _measure_direction(self, exact: Fit) -> rules.WrongDirection:
        likeness = exact.likeness
        sizes = [count for counts in self.counts for count in counts]
        clips = self.update.clips
        wrong = exact.names_of_unequal(self.names, rules.SAME)
        return rules.WrongDirection(
            likeness=likeness,
            alternative=self._find_alternative(likeness.residual),
            sizes=(min(sizes), max(sizes)),
            has_class_weights=self.reference.has_weights,
            workers=self.ranks.size,
            micros=self.micros,
            clipped_to=clips[0].most if clips else math.nan,
            wrong=wrong,
            number=len(self.names),
            factor=self._factor_of(wrong, exact),
            loss_scales=self.loss_scales,
            most_unequal=exact.names_of_unequal(self.names, rules.SAME, scale=likeness.scale),
        )

    def _find_alternative(self, residual: float) -> rules.Alternative:
        """Return the first computation that explains a gradient with this residual."""
        limit = max(_EXPLAINED * residual, 1e-4)
        for name, parts, transform in self._alternatives():
            if self._fit(parts, self.ranks.size, transform=transform).likeness.residual <= limit:
                return name
        return ""

    def _alternatives(self) -> Iterator[tuple[rules.Alternative, Gradients, Transform | None]]:
        """Yield what a worker may compute instead, and what it does to the average of that."""
        number = len(self.passes)
        mean = weighted(self.passes, [1 / number] * number)
        if len({count for counts in self.counts for count in counts}) > 1:
            yield "mean of means", mean, self._clip
        if self.micros > 1:
            yield "last micro-batch", self.passes[-1], self._clip
            # The sum of the first k micro-batches is summed over the workers again k times.
            powers = [self.ranks.size ** -float(place) for place in range(number)]
            yield "summed early", weighted(self.passes, powers), self._clip
        changed = [
            None if gradient is None else self._changed(gradient, parameter)
            for gradient, parameter in zip(mean, self.parameters, strict=True)
        ]
        yield "changed early", changed, None

    def _factor_of(self, wrong: Sequence[str], exact: Fit) -> float:
        """Return the workers or their inverse if all wrong gradients, not all, are off by it."""
        if len(wrong) >= (exact.exact > 0).sum():
            return math.nan
        for factor in (self.ranks.size, 1 / self.ranks.size):
            off = exact.names_of_unequal(self.names, rules.SAME, scale=factor)
            if set(wrong).isdisjoint(off):
                return factor
        return math.nan

    def _measure_scale(self, scale: float) -> rules.Scale:
        # If the script's loss was not seen, its factor is taken to be right.
        of_loss = 1.0 if math.isnan(self.loss_scale) else self.loss_scale * self.micros
        factors = rules.Factors(
            scale=scale,
            of_loss=of_loss,
            loss_scale=self.update.loss_scale,
            workers=self.ranks.size,
            micros=self.micros,
            most_micros=self.most_micros,
            batch=self.samples / sum(map(len, self.counts)),
        )
        named = decide(factors, rules.IN_LOSS) + decide(factors, rules.AFTER_LOSS)
        return rules.Scale(
            scale=scale,
            samples=self.samples,
            causes=tuple(cause for cause in named if cause.text),
            repeats_samples=any(self.ranks.gather(self.reference.repeats_samples)),
        )


def _fit(
    gradients: Gradients,
    parts: Gradients,
    parameters: Sequence[nn.Parameter],
    ranks: Ranks,
    divisor: float,
    *,
    transform: Transform | None = None,
) -> Fit:
    """Compare the workers' gradients with the sum of their parts over `divisor`."""
    rows = []
    for gradient, part, parameter in zip(gradients, parts, parameters, strict=True):
        own = _filled(gradient, parameter)
        exact = ranks.sum(_filled(part, parameter)) / divisor
        if transform is not None:
            exact = transform(exact, parameter)
        lost = ((exact != 0) & (own == 0)).sum()
        row = [own @ own, own @ exact, exact @ exact, lost, (exact != 0).sum()]
        rows.append(torch.stack(row).double())
    table = ranks.sum(torch.stack(rows, 1)) / ranks.size
    return Fit(*table.cpu().numpy())  # sync: in an audit only


def _filled(gradient: Tensor | None, parameter: nn.Parameter) -> Tensor:
    if gradient is None:
        return torch.zeros(parameter.numel(), dtype=torch.float64, device=parameter.device)
    return gradient.to_dense().flatten().double()
