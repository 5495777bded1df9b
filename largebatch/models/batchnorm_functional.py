"""Normalise groups of samples by their own moments, forward and backward.

A single group on one worker uses PyTorch's batch_norm. Outside of compiled graphs, several groups
are normalised one by one with its kernels, which write into one output. Their input gradients are
concatenated, which needs the memory of the largest of these tensors twice during a layer's backward
pass. A group is either a contiguous part of the batch (ghost batches, Hoffer et al. 2017,
arXiv:1705.08741, section 4), or the batches of several workers, which exchange two numbers per
channel forward and two backward.

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

_GRADIENT_PART = 2**18
"""Values per part of the gradient on a CPU: small enough to stay in the cache between the two
passes over it. On a GPU a part is a whole group, because launching a kernel costs more."""

_aten = torch.ops.aten


class Moments(NamedTuple):
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
    size, and all must call this.

    The mean and the unbiased variance of every group are added to `sums`, 2 x C, in place; they are
    computed in float32 or longer for images of any type. `is_zero` saves the addition. Several
    groups, and one over several workers, cannot be differentiated twice.

    Raises ValueError if a channel has a single value, or if the number of samples is not this
    worker's part of the span.
    """
    check(images, span=span, group=group)
    exact = exact_type(images)  # PyTorch's kernels take weights of the type of the moments
    weight, bias = (None if each is None else each.to(exact) for each in (weight, bias))
    if torch.compiler.is_compiling():
        return _in_graph(images, weight, bias, eps, span, sums)
    found, num = sums, 1 if group is not None else -(-len(images) // span)
    if sums is not None and not (is_zero and sums.dtype == exact):
        found = torch.zeros(sums.shape, dtype=exact, device=sums.device)
    mean, variance = (None, None) if found is None else found.unbind()
    if group is None and num <= 1:
        out = F.batch_norm(
            images, mean, variance, weight, bias, training=True, momentum=1.0, eps=eps
        )
    else:
        moments = None if mean is None or variance is None else Moments(mean, variance)
        out = _Normalise.apply(images, weight, bias, eps, span, group, moments)  # type: ignore[no-untyped-call]  # torch's
    if found is not None and num > 1:
        found.mul_(num)  # it was the mean over the groups
    if sums is not None and found is not None and found is not sums:
        sums.add_(found)
    return out


def _in_graph(
    images: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    span: int,
    sums: Tensor | None,
) -> Tensor:
    """Normalise like `normalise` without a group, with operations that torch.compile can trace.

    Images and their gradient keep their memory format: groups arranged as channels would not, and
    every convolution would copy a gradient.
    """
    found = torch.zeros(2, images.shape[1], dtype=exact_type(images), device=images.device)
    if len(images) <= span:
        mean, variance = found
        out = F.batch_norm(
            images, mean, variance, weight, bias, training=True, momentum=1.0, eps=eps
        )  # a momentum of 1 replaces the zeros by the moments
    else:
        outs = []
        whole = len(images) // span * span
        sizes = [whole, len(images) - whole] if whole < len(images) else [whole]
        for part in images.split(sizes):  # whole groups, and the rest
            values = part.unflatten(0, (-(-len(part) // span), -1)).to(found.dtype)
            dims = [1, *range(3, values.ndim)]
            num = values.shape[1] * _area(part)
            variance, mean = torch.var_mean(values, dims, correction=0, keepdim=True)
            out = (values - mean) * (variance + eps).rsqrt()
            per_channel = [-1, *[1] * (values.ndim - 3)]
            if weight is not None:
                out = out * weight.view(per_channel)
            if bias is not None:
                out = out + bias.view(per_channel)
            outs.append(out.to(images.dtype).flatten(0, 1))
            moments = torch.stack([mean, variance * (num / (num - 1))]).detach()
            found = found + moments.sum(1).flatten(1)
        out = torch.cat(outs) if len(outs) > 1 else outs[0]
    if sums is not None:
        with torch.no_grad():
            sums.add_(found)
    return out


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
    if samples * _area(images) < 2:
        raise ValueError(
            f"one value per channel has no variance: a group of {samples} samples of shape "
            f"{tuple(images.shape[1:])}; give whole spans, or one sample more or less"
        )


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
        moments: Moments | None,
    ) -> Tensor:
        if group is None:
            out, saved = _over_parts(images, (weight, bias), eps=eps, span=span, moments=moments)
            shared = None
        else:
            out, found, saved, shared = _over_workers(images, (weight, bias), eps=eps, group=group)
            if moments is not None:
                moments.mean.copy_(found.mean)
                moments.variance.copy_(found.variance)
        ctx.save_for_backward(images, weight, saved, shared)
        ctx.span, ctx.group, ctx.eps = span, group, eps
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401 -- PyTorch's, untyped
        images, weight, saved, shared = ctx.saved_tensors
        needs = ctx.needs_input_grad[:3]
        if ctx.group is None:
            found = _backward_over_parts(
                grad, images, weight, saved, eps=ctx.eps, span=ctx.span, needs=needs
            )
        else:
            found = _backward_over_workers(
                grad, images, weight, saved, num=shared, group=ctx.group, needs=needs
            )
        return (*found, None, None, None, None)


def _over_parts(
    images: Tensor,
    affine: tuple[Tensor | None, Tensor | None],
    *,
    eps: float,
    span: int,
    moments: Moments | None,
) -> tuple[Tensor, Tensor]:
    """Return the result, and 2 S x C: mean and 1 / std of each group in turn."""
    out = torch.empty_like(images)
    shape = (2 * -(-len(images) // span), images.shape[1])
    saved = torch.empty(shape, dtype=exact_type(images), device=images.device)
    running = moments or (None, None)
    rows = saved.unbind()
    parts = zip(images.split(span), out.split(span), rows[::2], rows[1::2], strict=True)
    for done, (part, result, mean, inverse) in enumerate(parts):
        # This momentum makes the running statistics the mean over the groups so far.
        _aten.native_batch_norm.out(
            part,
            *affine,
            *running,
            training=True,
            momentum=1 / (done + 1),
            eps=eps,
            out=result,
            save_mean=mean,
            save_invstd=inverse,
        )
    return out, saved


def _backward_over_parts(  # noqa: PLR0913 -- as PyTorch's own
    grad: Tensor,
    images: Tensor,
    weight: Tensor | None,
    saved: Tensor,
    *,
    eps: float,
    span: int,
    needs: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """Return the gradients of images, weight and bias, None for those not needed."""
    settings = {"train": True, "eps": eps, "output_mask": list(needs)}
    rows = saved.unbind()
    parts = [
        _aten.native_batch_norm_backward(*pair, weight, None, None, mean, inverse, **settings)
        for *pair, mean, inverse in zip(
            grad.split(span), images.split(span), rows[::2], rows[1::2], strict=True
        )
    ]
    by_images, by_weight, by_bias = zip(*parts, strict=True)
    image_grad = torch.cat(by_images) if needs[0] else None
    if not any(needs[1:]):
        return image_grad, None, None
    sums = torch.stack([by for by in by_weight + by_bias if by is not None])
    affine_grads = iter(sums.view(-1, len(parts), sums.shape[1]).sum(1))
    return image_grad, *(next(affine_grads) if need else None for need in needs[1:])


def _backward_over_workers(  # noqa: PLR0913 -- as PyTorch's own
    grad: Tensor,
    images: Tensor,
    weight: Tensor | None,
    saved: Tensor,
    *,
    num: Tensor,
    group: Group,
    needs: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """Return the gradients like _backward_over_parts, for one span of `num` values over workers."""
    mean, inverse = saved.unbind()
    sums = _sums(images, grad, mean, inverse)
    by_bias, by_weight = sums.clone()
    result = None
    if needs[0]:
        group.all_reduce(sums).wait()
        gain = inverse if weight is None else inverse * weight
        shift, slope = -gain * sums / num
        result = torch.empty_like(images)
        _input_gradient(result, images, grad, mean, (gain, slope * inverse, shift))
    return result, by_weight if needs[1] else None, by_bias if needs[2] else None


def _over_workers(
    images: Tensor, affine: tuple[Tensor | None, Tensor | None], *, eps: float, group: Group
) -> tuple[Tensor, Moments, Tensor, Tensor]:
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
    found = Moments(mean, var * (num / (num - 1)))
    return out, found, torch.stack([mean, (var + eps).rsqrt()]), num


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
    """Write gain * grad + slope * (images - mean) + shift to `result`; factors are per channel."""
    gain, slope, shift = factors
    gain = gain.view(-1, *[1] * (images.ndim - 2))
    size = len(images)
    if images.device.type == "cpu":
        size = max(1, _GRADIENT_PART * size // images.numel())
    one, nothing = torch.ones_like(mean), mean.new_empty(0)
    for start in range(0, len(images), size):
        part = slice(start, start + size)
        # In evaluation mode the kernel applies a scale and a shift in one pass.
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
    """Return the number of values per channel in one sample."""
    return math.prod(images.shape[2:])


def exact_type(images: Tensor) -> torch.dtype:
    """Return the type of the moments: at least float32."""
    return torch.promote_types(images.dtype, torch.float32)
