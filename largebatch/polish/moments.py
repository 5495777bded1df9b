"""Exact moments per channel: of a batch, of many batches, of all workers.

PyTorch's are not precise enough: on a CPU its kernel sums channels-last values one by one in
float32, and in any layout it rounds the mean to float32. Here values are centred before they are
squared, sums over parts of a batch are added in float64, and parts are merged by equation 2.1 of
Chan, Golub and LeVeque (1983).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, groupby
from typing import Self

import torch
from torch import Tensor

from largebatch.distributed.backend import Backend, sum_over_workers
from largebatch.models import kernels

_PART = 2**17
"""Values per part of a batch: small enough to stay in the cache for the second pass over it. A part
needs the same memory again, so this is less than batchnorm_functional's part of a gradient."""

_UNLIKE = 9.0
"""Squared distance, in variances, from which an origin is too far for sums in float32."""

_FAR = 8.0
"""Distance of a mean from zero, in standard deviations, from which rounding it to float32 changes
the variance by more than 1e-6, if batches differ as much as samples do."""

TOGETHER = 32
"""Batches that are merged together on a GPU, because launching the kernels of a merge takes longer
than running them."""

_LOSSY = 1e4
"""Squared distance, in variances, of an origin from which sums of squares keep only 12 digits."""


_Spans = tuple[list[int], Tensor, Tensor]
"""Counts, means and (biased) variances of the spans of a batch: G, G x C, G x C."""


@dataclass(slots=True)
class Moments:
    """Count, mean and sum of squared deviations from the mean, per channel, in float64."""

    count: float
    mean: Tensor
    deviations: Tensor
    _far: Tensor | None = None
    """Channels that a GPU measures twice, see in_one."""

    _pending: list[_Spans] = field(default_factory=list)
    """Batches that are to be merged."""

    def to(self, device: torch.device) -> Self:
        """Return the moments on a device, with all batches; not a copy if they are there."""
        self.merge()
        return replace(self, mean=self.mean.to(device), deviations=self.deviations.to(device))

    @property
    def variance(self) -> Tensor:
        """Unbiased variance, as in PyTorch's running_var."""
        return self.deviations / (self.count - 1)

    def add(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add N x C x ... values and return their own mean and (biased) variance.

        On a GPU the sums include them after `merge`.
        """
        count = values.numel() // len(self.mean)
        if values.device.type == "cpu":
            mean, deviations = self.in_parts(values)
            self._merge(count, mean, deviations)
            return mean, deviations / count
        mean, var = self.in_one(values)
        self.add_later([count], mean[None], var[None])
        return mean, var

    def add_spans(self, values: Tensor, stat: Tensor, *, span: int) -> None:
        """Add values like `add`, given mean and (biased) variance of each span: G x 3 x C.

        They are not read again, but for the first batch and where channels are far from zero.
        """
        if self._far is None or len(self._far):
            self.add(values)
            return
        mean, var, _ = stat.unbind(1)
        area = values.numel() // (len(values) * len(self.mean))
        counts = [area * min(span, len(values) - start) for start in range(0, len(values), span)]
        self.add_later(counts, mean, var)

    def add_later(self, counts: list[int], means: Tensor, variances: Tensor) -> None:
        """Add the moments of spans, G x C, merged with others."""
        self._pending.append((counts, means, variances))
        if len(self._pending) == TOGETHER:
            self.merge()

    def swap_pending(self, pending: list[_Spans]) -> list[_Spans]:
        """Replace the batches that are to be merged, and return them."""
        before = self._pending
        self._pending = pending
        return before

    def merge(self) -> None:
        """Add the batches that are pending."""
        if not self._pending:
            return
        counts_of_batches, means, variances = zip(*self._pending, strict=True)
        self._pending.clear()
        counts = list(chain(*counts_of_batches))
        span_means = torch.cat(means).double()
        count = sum(counts)
        mean = _weighted_sum(span_means, [part / count for part in counts])
        # The deviations of all values are those within spans and those between spans.
        within = _weighted_sum(torch.cat(variances).double(), counts)
        between = _weighted_sum((span_means - mean).square_(), counts)
        self._merge(count, mean, within + between)

    def _merge(self, count: int, mean: Tensor, deviations: Tensor) -> None:
        # Equation 2.1 of Chan, Golub and LeVeque (1983).
        total = self.count + count
        shift = mean - self.mean
        self.deviations += deviations
        self.deviations.addcmul_(shift, shift, value=self.count * count / total)
        self.mean.add_(shift, alpha=count / total)
        self.count = total

    def in_parts(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and squared deviations, part by part: faster than PyTorch's kernel for NCHW.

        Values are centred by the mean so far, and by their own only where they differ much from it.
        """
        if self.count:
            # One pass less than with their own mean: batches of one data set have close means.
            mean, deviations = _about(self.mean, values)
            shift = mean - self.mean
            if (deviations >= shift.square_() * (values.numel() / len(mean) / _UNLIKE)).all():
                return mean, deviations
        parts = [_sum(part) for part in _parts(values)]
        own = torch.stack(parts).sum(0) * (values.shape[1] / values.numel())
        return _about(own, values)

    def in_one(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and (biased) variance by a kernel that reads the values once.

        Channels whose mean is far from zero in the first batch are measured again, centred; the
        host waits for a GPU only to learn which these are.
        """
        mean, var = _kernel(values)
        if self._far is None:
            far = mean.abs() > _FAR * var.sqrt()
            self._far = far.nonzero().flatten()  # sync: its size; once per layer
        if not len(self._far):
            return mean, var
        near = mean[self._far]
        centred = values.index_select(1, self._far) - near.view(-1, *[1] * (values.ndim - 2))
        rest, var[self._far] = _kernel(centred)
        exact = mean.double()
        exact[self._far] += rest
        return exact, var


def pool(parts: Sequence[Moments], *, backend: Backend) -> list[Moments]:
    """Return the moments of each part over all workers, on the first part's device.

    Sums of squares can be added only about one origin, at first zero. If a mean is so far from it
    that digits are lost, all workers see that in the sums and sum again about these means.
    """
    parts = [part.to(parts[0].mean.device) for part in parts]
    pooled, lossy = _pool_about(parts, [part.mean.new_zeros(1) for part in parts], backend)
    if lossy:
        pooled, _ = _pool_about(parts, [part.mean for part in pooled], backend)
    return pooled


def _pool_about(
    parts: Sequence[Moments], origins: Sequence[Tensor], backend: Backend
) -> tuple[list[Moments], bool]:
    """Return the moments over all workers, and True if far origins cost digits."""
    sizes = [len(part.mean) for part in parts]
    counts = parts[0].mean.new_tensor([part.count for part in parts])
    sums = torch.cat([counts, counts.new_empty(2 * sum(sizes))])
    # One buffer, so that all layers take one collective: counts, then two sums of each layer.
    lengths = [len(parts)]
    for size in sizes:
        lengths += [size, size]
    fields = sums.split(lengths)[1:]
    firsts = fields[::2]
    seconds = fields[1::2]
    for part, origin, first, second in zip(parts, origins, firsts, seconds, strict=True):
        shift = part.mean - origin
        torch.mul(shift, part.count, out=first)
        torch.addcmul(part.deviations, first, shift, out=second)
    sum_over_workers(sums, backend)
    pooled = []
    lossy = []
    totals = sums[: len(parts)].tolist()  # sync: once for all layers
    for total, origin, first, second in zip(totals, origins, firsts, seconds, strict=True):
        shift = first / max(total, 1)
        # Sums about an origin hold the distance to the mean too; subtracting it costs digits.
        excess = shift.square() * total
        second.sub_(excess)
        lossy.append((excess > _LOSSY * second).any())
        torch.add(shift, origin, out=first)  # in place, to save memory
        pooled.append(Moments(total, first, second.clamp_(min=0)))
    return pooled, bool(torch.stack(lossy).any())  # sync: whether to sum again


def _about(origin: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and squared deviations, from sums about an origin near the mean."""
    first = torch.zeros_like(origin)
    second = torch.zeros_like(origin)
    near = origin.to(torch.promote_types(values.dtype, torch.float32))
    per_channel = near.view(-1, *[1] * (values.ndim - 2))
    room = None  # shared by all parts: allocating memory costs more than the arithmetic
    for part in _parts(values):
        if room is None:
            room = torch.empty_like(part, dtype=near.dtype)
        centred = torch.sub(part, per_channel, out=room[: len(part)])
        first += _sum(centred)
        second += _sum(centred.square_())
    count = values.numel() // len(origin)
    shift = first / count
    return near + shift, (second - shift * first).clamp_(min=0)


def _parts(values: Tensor) -> Iterator[Tensor]:
    yield from values.split(max(1, _PART * len(values) // values.numel()))


def _kernel(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and (biased) variance, at least in float32."""
    if kernels.take(values, span=len(values)):
        mean, var, _ = kernels.batchnorm().moments(values, len(values))[0]
        return mean, var
    dtype = torch.promote_types(values.dtype, torch.float32)
    # The buffers only tell PyTorch's kernel the type to compute in.
    unused = torch.empty(2, values.shape[1], dtype=dtype, device=values.device)
    mean, var = torch.ops.aten.batch_norm_update_stats(values, *unused, 0.0)
    return mean, var


def _weighted_sum(rows: Tensor, weights: Sequence[float]) -> Tensor:
    """Return the sum of rows times weights, which need no copy to a GPU."""
    if len(weights) > TOGETHER:  # of spans: nearly all are equal
        runs = [(weight, len([*run])) for weight, run in groupby(weights)]
        rows = torch.stack([part.sum(0) for part in rows.split([num for _, num in runs])])
        weights = [weight for weight, _ in runs]
    return torch.stack(torch._foreach_mul(rows.unbind(), weights)).sum(0)


def _sum(values: Tensor) -> Tensor:
    """Return the sum per channel: at least float32 within a sample, float64 over samples."""
    if values.ndim > 2:
        dtype = torch.promote_types(values.dtype, torch.float32)
        values = values.sum(list(range(2, values.ndim)), dtype=dtype)
    return values.sum(0, dtype=torch.float64)
