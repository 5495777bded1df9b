"""Exact moments per channel: of a batch, of many batches, of all workers.

PyTorch's own moments are not enough. On the CPU its BatchNorm kernel sums channels-last values one
after the other in float32 (a variance is wrong by 1e-4 over 600,000 values), and in any layout it
rounds the mean to float32, so that the variance of several batches loses digits where the mean is
many standard deviations. Here values are centred before they are squared, sums of part of a batch
are added in float64, and parts are merged as Chan, Golub and LeVeque (1983) do, equation 2.1.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from largebatch.distributed.backend import Backend, sum_over_workers

_PART = 2**17
"""Values of a part of a batch that the processor's cache still holds for the second look at it. A
part needs as much memory again, which keeps this below what norm_functions takes for gradients."""

_UNLIKE = 9.0
"""Squared distance, in variances, of an origin that is not near enough for sums in float32."""

_FAR = 8.0
"""Standard deviations from zero to a mean beyond which rounding it to float32 costs the variance
more than 1e-6, when batches differ from each other as much as samples do."""

_LOSSY = 1e4
"""Squared distance, in variances, of an origin whose sums of squares keep only 12 digits."""


@dataclass(slots=True)
class Moments:
    """Count, mean and sum of squared deviations from it, per channel, in float64."""

    count: float
    mean: Tensor
    deviations: Tensor
    _far: Tensor | None = None
    """The channels that a GPU measures twice: see in_one."""

    @classmethod
    def of_nothing(cls, channels: int, *, device: torch.device) -> Self:
        """Return the moments before any value was added."""
        zeros = torch.zeros(channels, dtype=torch.float64, device=device)
        return cls(0.0, zeros, zeros.clone())

    @property
    def variance(self) -> Tensor:
        """With Bessel's correction, as PyTorch keeps it."""
        return self.deviations / (self.count - 1)

    def add(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Take in N x C x ... values and return their own mean and variance (uncorrected)."""
        if values.device.type == "cpu":
            mean, deviations = self.in_parts(values)
        else:
            mean, deviations = self.in_one(values)
        count = values.numel() // len(mean)
        total = self.count + count
        shift = mean - self.mean
        self.deviations += deviations
        self.deviations.addcmul_(shift, shift, value=self.count * count / total)
        self.mean.add_(shift, alpha=count / total)
        self.count = total
        return mean, deviations / count

    def in_parts(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and squared deviations, part by part: faster than PyTorch's kernel for NCHW.

        The mean so far is a good origin to centre by, and their own mean, which costs another look,
        is needed only for the first values and for such as are unlike those before.
        """
        if self.count:
            mean, deviations = _about(self.mean, values)
            shift = mean - self.mean
            if (deviations >= shift.square_() * (values.numel() / len(mean) / _UNLIKE)).all():
                return mean, deviations
        parts = [_sum(part) for part in _parts(values)]
        own = torch.stack(parts).sum(0) * (values.shape[1] / values.numel())
        return _about(own, values)

    def in_one(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and squared deviations by PyTorch's kernel, which reads the values once.

        Channels whose mean is far from zero are measured again, centred: which ones is decided by
        the first batch, so that a GPU is waited for only then. Where all batches together have a
        far mean, the first has one too, or is so unlike the rest that their variance is large.
        """
        mean, var = _kernel(values)
        if self._far is None:
            far = mean.abs() > _FAR * var.sqrt()
            self._far = far.nonzero().flatten()  # sync: its size; once per layer
        exact = mean.double()
        if len(self._far):
            near = mean[self._far]
            centred = values.index_select(1, self._far) - near.view(-1, *[1] * (values.ndim - 2))
            rest, var[self._far] = _kernel(centred)
            exact[self._far] += rest
        return exact, var.double() * (values.numel() // len(mean))


def pool(
    parts: Sequence[Moments], *, dtypes: Sequence[torch.dtype], backend: Backend
) -> list[Moments]:
    """Return the moments of each part over all workers, after one all-reduce for all parts.

    Sums of squares add up only about origins that all workers share; zero is one that needs no
    agreement. Where a mean is so far from it that digits are lost, all workers see that in the sums
    and sum once more, about the means that they have just found, as numbers of `dtypes` and at
    least float32.
    """
    pooled, lossy = _pool_about(parts, [part.mean.new_zeros(1) for part in parts], backend)
    if lossy:
        # In the layers' type the new origins are near enough, and memory stays below a megabyte.
        kinds = [torch.promote_types(dtype, torch.float32) for dtype in dtypes]
        means = [part.mean.to(kind) for part, kind in zip(pooled, kinds, strict=True)]
        del pooled
        pooled, _ = _pool_about(parts, means, backend)
    return pooled


def _pool_about(
    parts: Sequence[Moments], origins: Sequence[Tensor], backend: Backend
) -> tuple[list[Moments], bool]:
    """Return the moments over all workers, and whether origins so far off cost them digits."""
    sizes = [len(part.mean) for part in parts]
    counts = parts[0].mean.new_tensor([part.count for part in parts])
    sums = torch.cat([counts, counts.new_empty(2 * sum(sizes))])
    fields = sums.split([len(parts), *(size for size in sizes for _ in "ab")])[1:]
    firsts, seconds = fields[::2], fields[1::2]
    for part, origin, first, second in zip(parts, origins, firsts, seconds, strict=True):
        shift = part.mean - origin
        torch.mul(shift, part.count, out=first)
        torch.addcmul(part.deviations, first, shift, out=second)
    sum_over_workers(sums, backend)
    pooled, lossy = [], []
    totals = sums[: len(parts)].tolist()  # sync: once for all layers
    for total, origin, first, second in zip(totals, origins, firsts, seconds, strict=True):
        shift = first / max(total, 1)
        excess = shift.square() * total
        second.sub_(excess)
        lossy.append((excess > _LOSSY * second).any())
        torch.add(shift, origin, out=first)  # in place: memory for one copy
        pooled.append(Moments(total, first, second.clamp_(min=0)))
    return pooled, bool(torch.stack(lossy).any())  # sync: whether to sum again


def _about(origin: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and squared deviations, from sums about an origin that is near the mean."""
    first, second = torch.zeros_like(origin), torch.zeros_like(origin)
    near = origin.to(torch.promote_types(values.dtype, torch.float32))
    per_channel = near.view(-1, *[1] * (values.ndim - 2))
    room = None  # for all parts: memory that is new costs more than what is done in it
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
    """Divide the batch into parts that fit into the processor's cache."""
    yield from values.split(max(1, _PART * len(values) // values.numel()))


def _kernel(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and variance (uncorrected), at least in float32."""
    dtype = torch.promote_types(values.dtype, torch.float32)
    # The buffers only tell PyTorch's kernel the type to compute in.
    unused = torch.zeros(2, values.shape[1], dtype=dtype, device=values.device)
    mean, var = torch.ops.aten.batch_norm_update_stats(values, *unused, 0.0)
    return mean, var


def _sum(values: Tensor) -> Tensor:
    """Return the sum per channel: at least float32 within a sample, float64 over samples."""
    if values.ndim > 2:
        dtype = torch.promote_types(values.dtype, torch.float32)
        values = values.sum(list(range(2, values.ndim)), dtype=dtype)
    return values.sum(0, dtype=torch.float64)
