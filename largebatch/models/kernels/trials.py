"""Trials of BatchNorm's kernels: every use of a model, beside PyTorch's operations."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from largebatch import accelerator
from largebatch.distributed.serial import Serial
from largebatch.models import kernels
from largebatch.models.batchnorm_functional import normalise
from largebatch.models.kernels import Use
from largebatch.proof import BATCHNORM, Trial, Trials


def trials(device: torch.device, _: Mapping[str, object]) -> Trials:
    """Return trials for any model: each type, with and without a sum, in parts and whole spans."""
    is_gpu = device.type == accelerator.CUDA
    # On a GPU the last span is smaller, its parts have several steps, and the second shape's spans
    # stay in the cache of an H100.
    shapes = [(6, 40, 100, 100), (512, 512, 7, 7)] if is_gpu else [(6, 40, 2, 2)]
    uses: Counter[Use] = Counter()
    for shape in shapes:
        for dtype in ("bfloat16", "float16", "float32"):
            for adds in (False, True):
                use = Use(
                    shape=shape,
                    dtype=dtype,
                    span=4 if shape[0] == 6 else 16,
                    eps=1e-5,
                    adds=adds,
                    relu=True,
                    affine=True,
                    counts=True,
                    shares=False,
                )
                uses[use] += 1
    return {BATCHNORM: partial(trials_of, uses, device)}


def trials_of(uses: Counter[Use], device: torch.device) -> Iterator[Trial]:
    """Yield the trials of a model's uses, and of the moments of their batches for polishing."""
    for use, count in uses.items():
        arguments = _draw(use, device)
        yield Trial(
            name=_describe(use),
            ours=arguments.by_kernels,
            theirs=arguments.by_torch,
            exact=arguments.exactly,
            count=count,
        )
    for shape, dtype in dict.fromkeys((use.shape, use.dtype) for use in uses):
        images = _images(shape, getattr(torch, dtype), device)
        yield Trial(
            name=f"moments of {dtype} {_sizes(shape)}",
            ours=partial(_moments_by_kernels, images),
            theirs=partial(_moments, images, torch.float32),
            exact=partial(_moments, images, torch.float64),
            count=0,
        )


def _describe(use: Use) -> str:
    words = [f"{use.dtype} {_sizes(use.shape)} in spans of {use.span}"]
    if use.adds:
        words.append("with a sum")
    if use.relu:
        words.append("with ReLU")
    if not use.affine:
        words.append("without scale and shift")
    if use.shares:
        words.append("over workers")
    return ", ".join(words)


def _sizes(shape: Iterable[int]) -> str:
    return " x ".join(map(str, shape))


def _images(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return random images in channels-last memory, whose channels have different means."""
    samples, channels, *area = shape
    rows = torch.randn(samples, *area, channels, device=device)
    rows = rows + torch.linspace(-3, 3, channels, device=device)
    return rows.to(dtype).movedim(-1, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Arguments:
    """Tensors of a use: images, what is added, scale and shift, and the gradient of the result."""

    use: Use
    images: Tensor
    other: Tensor | None
    affine: Tensor | None
    dy: Tensor

    def by_kernels(self) -> list[Tensor]:
        """Compute the result and the gradients by the kernels."""
        use = self.use
        leaves = self._leaves(None)
        sums = torch.zeros(2, use.shape[1], device=self.images.device) if use.counts else None
        group = Serial(self.images.device) if use.shares else None
        out, _ = kernels.batchnorm().normalise(
            leaves[0],
            leaves[1] if use.adds else None,
            *(leaves[-2:] if use.affine else (None, None)),
            eps=use.eps,
            span=use.span,
            relu=use.relu,
            group=group,
            sums=sums,
        )
        return self._with_gradients(out, leaves, sums)

    def by_torch(self) -> list[Tensor]:
        """Compute them by PyTorch's operations."""
        return self._by_operations(None)

    def exactly(self) -> list[Tensor]:
        """Compute them by PyTorch's operations in a longer type."""
        is_short = self.images.dtype != torch.float32
        return self._by_operations(torch.float32 if is_short else torch.float64)

    def pre_activation(self, dtype: torch.dtype) -> Tensor:
        """Return the result before the ReLU."""
        out, _ = self._normalised(self._leaves(dtype))
        return out.detach()

    def _leaves(self, dtype: torch.dtype | None) -> list[Tensor]:
        tensors = [self.images]
        if self.other is not None:
            tensors.append(self.other)
        if self.affine is not None:
            tensors += self.affine.unbind()
        return [tensor.detach().to(dtype or tensor.dtype).requires_grad_() for tensor in tensors]

    def _normalised(self, leaves: list[Tensor]) -> tuple[Tensor, Tensor | None]:
        use = self.use
        exact = torch.promote_types(leaves[0].dtype, torch.float32)
        sums = torch.zeros(2, use.shape[1], dtype=exact, device=leaves[0].device)
        out = normalise(
            leaves[0],
            *(leaves[-2:] if use.affine else (None, None)),
            eps=use.eps,
            span=use.span,
            group=Serial(self.images.device) if use.shares else None,
            sums=sums if use.counts else None,
        )
        if use.adds:
            out = out + leaves[1]
        return out, sums if use.counts else None

    def _by_operations(self, dtype: torch.dtype | None) -> list[Tensor]:
        leaves = self._leaves(dtype)
        out, sums = self._normalised(leaves)
        if self.use.relu:
            out = F.relu(out)
        return self._with_gradients(out, leaves, sums)

    def _with_gradients(
        self, out: Tensor, leaves: list[Tensor], sums: Tensor | None
    ) -> list[Tensor]:
        grads = torch.autograd.grad(out, leaves, self.dy.to(out.dtype))
        results = [out.detach(), *grads]
        return results if sums is None else [*results, sums]


def _draw(use: Use, device: torch.device) -> _Arguments:
    dtype = getattr(torch, use.dtype)
    accelerator.seed(0, device)
    images = _images(use.shape, dtype, device)
    scales = torch.rand(2, use.shape[1], device=device) + 0.5
    arguments = _Arguments(
        use=use,
        images=images,
        other=_images(use.shape, dtype, device) if use.adds else None,
        affine=scales if use.affine else None,
        dy=images,
    )
    # The gradient is zero where the ReLU bends: rounding decides on which side a number lies.
    dy = arguments.pre_activation(torch.float32) * torch.randn_like(images, dtype=torch.float32)
    return _Arguments(
        use=use,
        images=images,
        other=arguments.other,
        affine=arguments.affine,
        dy=dy.to(dtype),
    )


def _moments_by_kernels(images: Tensor) -> list[Tensor]:
    mean, variance, _ = kernels.batchnorm().moments(images, len(images))[0]
    return [mean, variance]


def _moments(images: Tensor, dtype: torch.dtype) -> list[Tensor]:
    wide = images.to(dtype).movedim(1, -1).flatten(0, -2)
    variance, mean = torch.var_mean(wide, 0, correction=0)
    return [mean, variance]
