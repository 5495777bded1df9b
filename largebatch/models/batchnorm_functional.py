"""Normalise groups of samples by their own moments, forward and backward, without extra copies.

Splitting a batch and joining the parts again would copy it twice forward and twice backward, which
costs as much as BatchNorm itself. Here PyTorch's kernels write each group into its place in one
output. A group is either a contiguous part of the batch (ghost batches, Hoffer et al. 2017,
arXiv:1705.08741, section 4), or the batches of several workers together, who then exchange two
numbers per channel forward and two backward.

With y = (x - mean) / std over the n values that a channel has in a group, the gradient is
dx = weight / std * (dy - mean(dy) - y * mean(dy * y)) (Ioffe and Szegedy 2015, arXiv:1502.03167,
section 3), so backward needs no more of the other workers than two sums.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from largebatch.distributed.backend import Group

_GRADIENT_PART = 2**18
"""Values of a part of the gradient that the processor's cache still holds in the second of the two
passes over it. A GPU's parts are whole groups: there, launching a kernel costs more."""

_aten = torch.ops.aten


def normalise(
    images: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    eps: float,
    span: int,
    group: Group | None,
) -> tuple[Tensor, Tensor]:
    """Return normalised N x C x ... images, and S x 2 x C: the S groups' means and variances.

    Without a `group` of workers, groups are `span` samples that lie side by side; the last may be
    smaller. With one, its workers together hold a single span, each an equal number of samples of
    any size, and all call this alike. Variances have Bessel's correction, as PyTorch keeps them.
    Moments are float32 or longer, whatever the images are. Cannot be differentiated twice.

    Raises ValueError where a channel has a single value, or a worker not its part of the span.
    """
    samples = len(images) % span or span
    if group is not None:
        if len(images) * group.world_size != span:
            raise ValueError(
                f"{group.world_size} workers share a BatchNorm span of {span} samples, so each "
                f"holds {span // group.world_size} of them; this one was given {len(images)}"
            )
        samples = span
    if samples * _area(images) < 2:
        raise ValueError(
            f"one value per channel has no variance: a group of {samples} samples of shape "
            f"{tuple(images.shape[1:])}; give whole spans, or one sample more or less"
        )
    found: tuple[Tensor, Tensor] = _Normalise.apply(images, weight, bias, eps, span, group)  # type: ignore[no-untyped-call]  # torch's
    return found


class _Normalise(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0913 -- PyTorch takes no keywords here
        ctx: Any,  # noqa: ANN401 -- PyTorch's, untyped
        images: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        span: int,
        group: Group | None,
    ) -> tuple[Tensor, Tensor]:
        exact = _exact(images)  # PyTorch's kernels take weights of the type of the moments
        weight = weight if weight is None else weight.to(exact)
        bias = bias if bias is None else bias.to(exact)
        if group is None:
            out, found, saved = _over_parts(images, (weight, bias), eps=eps, span=span)
            shared = None
        else:
            out, found, saved, shared = _over_workers(images, (weight, bias), eps=eps, group=group)
        ctx.save_for_backward(images, weight, saved, shared)
        ctx.span, ctx.group = span, group
        ctx.mark_non_differentiable(found)
        return out, found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401 -- PyTorch's, untyped
        images, weight, saved, shared = ctx.saved_tensors
        with_images, with_weight, with_bias = ctx.needs_input_grad[:3]
        result = torch.empty_like(images) if with_images else None
        totals = torch.zeros_like(saved[0])
        for start, (mean, inverse) in zip(range(0, len(images), ctx.span), saved, strict=True):
            part = slice(start, start + ctx.span)
            sums = _sums(images[part], grad[part], mean, inverse)
            totals += sums
            if result is None:
                continue
            num = images[part].numel() // len(mean) if shared is None else shared
            if ctx.group is not None:
                ctx.group.all_reduce(sums).wait()
            gain = inverse if weight is None else inverse * weight
            shift, slope = -gain * sums / num
            _input_gradient(
                result[part], images[part], grad[part], mean, (gain, slope * inverse, shift)
            )
        by_bias, by_weight = totals
        return (
            result,
            by_weight if with_weight else None,
            by_bias if with_bias else None,
            *(None, None, None),
        )


def _over_parts(
    images: Tensor, affine: tuple[Tensor | None, Tensor | None], *, eps: float, span: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the result, the groups' means and variances, and their means and 1 / std."""
    out = torch.empty_like(images)
    shape = (-(-len(images) // span), 2, images.shape[1])
    found = torch.zeros(shape, dtype=_exact(images), device=images.device)
    saved = torch.empty_like(found)
    for start, (mean, var), (same, inverse) in zip(
        range(0, len(images), span), found, saved, strict=True
    ):
        part = slice(start, start + span)
        # Momentum 1 makes PyTorch's kernel hand out the moments it normalises with.
        _aten.native_batch_norm.out(
            images[part],
            *affine,
            mean,
            var,
            training=True,
            momentum=1.0,
            eps=eps,
            out=out[part],
            save_mean=same,
            save_invstd=inverse,
        )
    return out, found, saved


def _over_workers(
    images: Tensor, affine: tuple[Tensor | None, Tensor | None], *, eps: float, group: Group
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As _over_parts, for one span that the workers of the group hold parts of.

    Each finds its own mean and squared deviations from that, which then are merged (Chan, Golub
    and LeVeque 1983, equation 2.1): sums of squares would cancel where the mean is large. Workers
    weigh by the values that a channel has there, for images may differ in size. Also returns their
    number, over all workers, 0-d.
    """
    zeros = torch.zeros(images.shape[1], dtype=_exact(images), device=images.device)
    # The buffers only tell PyTorch's kernel the type to compute in.
    local = _aten.batch_norm_update_stats(images, zeros, zeros.clone(), 0.0)
    count = zeros.new_tensor([images.numel() // len(zeros)])
    gathered = group.all_gather(torch.cat([*local, count]))  # world_size x (C + C + 1)
    means, variances, counts = gathered.split([len(zeros), len(zeros), 1], dim=1)
    num = counts.sum()
    shares = counts / num
    mean = (shares * means).sum(0)
    var = (shares * (variances + (means - mean).square())).sum(0)
    out, _, _ = _aten.native_batch_norm(
        images, *affine, mean, var, training=False, momentum=0.0, eps=eps
    )
    found = torch.stack([mean, var * (num / (num - 1))])
    saved = torch.stack([mean, (var + eps).rsqrt()])
    return out, found.unsqueeze(0), saved.unsqueeze(0), num


def _sums(images: Tensor, grad: Tensor, mean: Tensor, inverse: Tensor) -> Tensor:
    """Return 2 x C: the sums of dy and of dy * y."""
    ones = torch.ones_like(mean)  # the kernel's type for sums is the weight's
    _, by_weight, by_bias = _aten.native_batch_norm_backward(
        grad,
        images,
        ones,
        None,
        None,
        mean,
        inverse,
        train=True,
        eps=0.0,
        output_mask=[False, True, True],
    )
    return torch.stack([by_bias, by_weight])


def _input_gradient(
    result: Tensor,
    images: Tensor,
    grad: Tensor,
    mean: Tensor,
    factors: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Fill `result` with gain * grad + slope * (images - mean) + shift, the factors by channel."""
    gain, slope, shift = factors
    gain = gain.view(-1, *[1] * (images.ndim - 2))
    size = len(images)
    if images.device.type == "cpu":
        size = max(1, _GRADIENT_PART * size // images.numel())
    one, nothing = torch.ones_like(mean), mean.new_empty(0)
    for start in range(0, len(images), size):
        part = slice(start, start + size)
        # In evaluation mode the kernel is a scale and a shift in one pass.
        _aten.native_batch_norm.out(
            images[part],
            slope,
            shift,
            mean,
            one,
            training=False,
            momentum=0.0,
            eps=0.0,
            out=result[part],
            save_mean=nothing,
            save_invstd=nothing,
        )
        result[part].addcmul_(grad[part], gain)


def _area(images: Tensor) -> int:
    """Return how many values a channel has in one sample."""
    return math.prod(images.shape[2:])


def _exact(images: Tensor) -> torch.dtype:
    """Return the type of the moments: at least float32."""
    return torch.promote_types(images.dtype, torch.float32)
