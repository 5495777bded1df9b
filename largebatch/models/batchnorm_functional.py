"""Normalise groups of samples by their own moments, forward and backward.

A group is either a contiguous part of the batch (ghost batches, Hoffer et al. 2017,
arXiv:1705.08741, section 4), which PyTorch's batch_norm normalises, or the batches of several
workers, which exchange two numbers per channel forward and two backward.

With y = (x - mean) / std over the n values that a channel has in a group, the gradient is
dx = weight / std * (dy - mean(dy) - y * mean(dy * y)) (Ioffe and Szegedy 2015, arXiv:1502.03167,
section 3), so backward needs only two sums from the other workers.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from largebatch.distributed.backend import Group

_aten = torch.ops.aten


class MeanAndVariance(NamedTuple):
    """Mean and variance of every channel, in float32 or longer."""

    mean: Tensor
    variance: Tensor
    """Unbiased variance, as in PyTorch's running_var."""


def normalise(  # noqa: PLR0913 -- what batch_norm takes, and the groups
    images: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    eps: float,
    span: int,
    group: Group | None = None,
    sums: Tensor | None = None,
    is_zero: bool = False,
) -> Tensor:
    """Return N x C x ... images, each group normalised by its own moments.

    Without a `group` of workers, groups are `span` consecutive samples; the last may be smaller.
    With one, its workers together hold a single span, each the same number of samples of any image
    size, and all must call this; it cannot be differentiated twice.

    The mean and the unbiased variance of every group are added to `sums`, 2 x C, in place; they are
    computed in float32 or longer for images of any type. `is_zero` saves the addition.

    Raises ValueError if a channel has a single value, or if the number of samples is not this
    worker's part of the span.
    """
    check(images, span=span, group=group)
    exact = exact_type(images)  # PyTorch's kernels take weights of the type of the moments
    weight = None if weight is None else weight.to(exact)
    bias = None if bias is None else bias.to(exact)
    # PyTorch's kernels write moments, and do not add them: only sums that are still zero can be
    # written in place.
    own_sums = sums
    if sums is not None and not (is_zero and sums.dtype == exact):
        own_sums = torch.zeros(sums.shape, dtype=exact, device=sums.device)
    parts = images.split(span) if group is None else (images,)
    if group is not None:
        moments = None if own_sums is None else MeanAndVariance(*own_sums)
        out: Tensor = _OverWorkers.apply(images, weight, bias, eps, group, moments)  # type: ignore[no-untyped-call]  # torch's
    else:
        gains = _for_each(parts, weight)
        offsets = _for_each(parts, bias)
        outs = []
        for num_before, part in enumerate(parts):
            mean = None
            variance = None
            if own_sums is not None:
                # Autograd saves these, and would raise an error when the next part changes them:
                # tensors of `.data` have their own version counters.
                mean, variance = own_sums.data.unbind()
            # This momentum makes the running statistics the mean over the groups so far.
            momentum = 1 / (num_before + 1)
            outs.append(
                F.batch_norm(
                    part,
                    mean,
                    variance,
                    gains[num_before],
                    offsets[num_before],
                    training=True,
                    momentum=momentum,
                    eps=eps,
                )
            )
        out = torch.cat(outs) if len(outs) > 1 else outs[0]
    if own_sums is not None and len(parts) > 1:
        own_sums.mul_(len(parts))  # it was the mean over the groups
    if sums is not None and own_sums is not None and own_sums is not sums:
        with torch.no_grad():
            sums.add_(own_sums)
    return out


def _for_each(parts: Sequence[Tensor], values: Tensor | None) -> Sequence[Tensor | None]:
    """Return the scale or shift once for each part, as views whose gradients are summed at once."""
    if values is None or len(parts) == 1:
        return [values] * len(parts)
    return values.expand(len(parts), -1).unbind()


def check(images: Tensor, *, span: int, group: Group | None) -> None:
    """Raise ValueError if the images are not whole groups, or a channel has a single value."""
    samples = len(images) % span or span
    if group is not None:
        if len(images) * group.world_size != span:
            raise ValueError(
                f"{group.world_size} workers share a BatchNorm span of {span} samples, so each "
                f"holds {span // group.world_size} of them; this one was given {len(images)}"
            )
        samples = span
    if samples * math.prod(images.shape[2:]) < 2:
        raise ValueError(
            f"one value per channel has no variance: a group of {samples} samples of shape "
            f"{tuple(images.shape[1:])}; give whole spans, or one sample more or less"
        )


class _OverWorkers(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0913 -- PyTorch takes no keywords here
        ctx: Any,  # noqa: ANN401 -- PyTorch's, untyped
        images: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        group: Group,
        moments: MeanAndVariance | None,
    ) -> Tensor:
        out, new, mean_and_inverse, num = _over_workers(
            images, (weight, bias), eps=eps, group=group
        )
        if moments is not None:
            moments.mean.copy_(new.mean)
            moments.variance.copy_(new.variance)
        ctx.save_for_backward(images, weight, mean_and_inverse, num)
        ctx.group = group
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401 -- PyTorch's, untyped
        images, weight, (mean, inverse), num = ctx.saved_tensors
        sums = _sums(images, grad, mean, inverse)
        # Scale and shift get this worker's sums, which the reducer adds up later with all other
        # gradients; only the images' gradient needs the sums over the span now.
        by_bias, by_weight = sums.clone()
        result = None
        if ctx.needs_input_grad[0]:
            ctx.group.all_reduce(sums).wait()
            gain = inverse if weight is None else inverse * weight
            shift, slope = -gain * sums / num
            nothing = mean.new_empty(0)
            result = torch.empty_like(images)
            # dx = gain (dy - mean(dy) - y mean(dy y)). The terms of the images are a scale and a
            # shift for each channel, which the kernel applies in one pass in evaluation mode.
            _aten.native_batch_norm.out(
                images,
                slope * inverse,
                shift,
                mean,
                torch.ones_like(mean),
                training=False,
                momentum=0.0,
                eps=0.0,
                out=result,
                save_mean=nothing,
                save_invstd=nothing,
            )
            result.addcmul_(grad, gain.view(-1, *[1] * (images.ndim - 2)))
        needs = ctx.needs_input_grad
        affine = by_weight if needs[1] else None, by_bias if needs[2] else None
        return result, *affine, None, None, None


def _over_workers(
    images: Tensor, affine: tuple[Tensor | None, Tensor | None], *, eps: float, group: Group
) -> tuple[Tensor, MeanAndVariance, Tensor, Tensor]:
    """Normalise one span over the workers of a group.

    Each worker computes its mean and squared deviations, which are then merged (Chan, Golub and
    LeVeque 1983, equation 2.1): sums of squares would cancel if the mean is large. Workers are
    weighted by their number of values per channel, because image sizes may differ.

    Returns the result, the moments, 2 x C mean and 1 / std, and the number of values over all
    workers, 0-d.
    """
    zeros = torch.zeros(images.shape[1], dtype=exact_type(images), device=images.device)
    # The buffers only tell PyTorch's kernel the type to compute in.
    local = _aten.batch_norm_update_stats(images, zeros, zeros.clone(), 0.0)
    count = zeros.new_full((1,), images.numel() // len(zeros))  # no copy from the host
    gathered = group.all_gather(torch.cat([*local, count]))  # world_size x (C + C + 1)
    means, variances, counts = gathered.split([len(zeros), len(zeros), 1], dim=1)
    num = counts.sum()
    shares = counts / num
    mean = (shares * means).sum(0)
    var = (shares * (variances + (means - mean).square())).sum(0)
    out, _, _ = _aten.native_batch_norm(
        images, *affine, mean, var, training=False, momentum=0.0, eps=eps
    )
    unbiased = MeanAndVariance(mean, var * (num / (num - 1)))
    return out, unbiased, torch.stack([mean, (var + eps).rsqrt()]), num


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


def exact_type(images: Tensor) -> torch.dtype:
    """Return the type of the moments: at least float32."""
    return torch.promote_types(images.dtype, torch.float32)
