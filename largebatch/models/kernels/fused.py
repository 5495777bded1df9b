"""BatchNorm over spans of a channels-last batch, with the sum and the ReLU behind it.

Seen as rows x channels, a channels-last batch with spans of S samples is a stack of matrices, and
BatchNorm normalises the columns of each. Both directions take two launches for any number of spans:
one reduces parts of the rows to partial sums, the next merges the partial sums of its span and
writes the result. Every program of the second launch merges for itself, in a fixed order: no
program waits for another or counts arrivals, so that there is no race, nothing to reset, and the
same input gives the same bits.

Where a span's values stay in the cache (`_stays`), one program reduces all rows of a span, for a
few channels, and reads them again for the result: memory is read once. PyTorch then adds up the few
numbers of all spans.

PyTorch's kernels for bf16 in this memory format load two bytes per thread, and read and write the
batch again for the sum and for the ReLU.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.library import triton_op, wrap_triton

from largebatch import accelerator
from largebatch.distributed.backend import Group
from largebatch.formatting import plural
from largebatch.models.kernels import Use, note_use
from largebatch.models.kernels import triton_batchnorm as kernels

Launch = Callable[..., None]
"""Launches a kernel: kernel, grid, arguments, and named constants."""

PARTS = 264
"""Parts of all spans and blocks of channels together: two for each multiprocessor of an H100. More
would cost time in merging, which each program of the second launch does for its span."""

TILE = 32_768
"""Most bytes that a program loads at a time. Two programs of a multiprocessor then wait for as many
as an H200 delivers in its latency of 1.2 microseconds (Little's law)."""

CHUNK = 32
"""Partial sums per step of a merge."""

WHOLE: bool | None = None
"""True or False to give a program a whole span always or never; None to decide by `_stays`."""


def _cdiv(number: int, divisor: int) -> int:
    return -(-number // divisor)


def _power_of_2(number: int) -> int:
    return 1 << (number - 1).bit_length()


def _stays(programs: int, tensors: int, bytes_of_each: int, device: torch.device) -> bool:
    """Return True if what each program reads stays in the cache until it reads it again.

    There must be programs for every multiprocessor, and those that run at the same time may read
    half of the L2 cache: their results need the other half. Their number follows from registers:
    on an H100 a thread takes 128, so two programs run together, but 156 backward with a sum.

    Forward a whole span costs one launch more: 4 microseconds, in which an H200 reads 16 MB.
    """
    num, cache = accelerator.multiprocessors(device)
    running = num * (2 if tensors < 3 else 1)
    saves = tensors > 1 or programs * bytes_of_each >= 2**24
    return saves and programs >= running > 0 and running * tensors * bytes_of_each <= cache / 2


class _Shape(NamedTuple):
    """Numbers of a launch: rows x channels are divided into spans, parts and blocks of channels."""

    spans: int
    rows: int
    last: int
    """Rows of the last span."""

    channels: int
    cols: int
    """Channels of a block."""

    tile: int
    """Rows per step."""

    parts: int
    per: int
    """Rows of a part."""

    whole: bool
    """True if a part is a whole span, which its program reads twice."""

    @classmethod
    def of(cls, x: Tensor, span: int, *, tensors: int = 1, in_parts: bool = False) -> "_Shape":
        """Return the numbers for N x C x ... images with spans of `span` samples.

        `tensors` of this shape are read, twice if a part may be a whole span.
        """
        samples, channels = int(x.shape[0]), int(x.shape[1])  # numbers, in a dynamic graph too
        area, spans = int(x.numel()) // (samples * channels), -(-samples // span)
        rows, size = min(span, samples) * area, x.element_size()
        cols = min(64 // size, _power_of_2(channels))
        programs = spans * _cdiv(channels, cols)
        whole = not in_parts and (
            _stays(programs, tensors, rows * cols * size, x.device) if WHOLE is None else WHOLE
        )
        if not whole:
            cols = min(128 // size, _power_of_2(channels))
        parts = 1 if whole else max(1, PARTS // (spans * _cdiv(channels, cols)))
        most = max(1, TILE // (cols * size))
        tile = min(_power_of_2(rows), max(most // 8, _power_of_2(_cdiv(rows, parts))))
        tile = max(1, min(tile, most // min(tensors, 2)))
        per = _cdiv(_cdiv(rows, parts), tile) * tile
        last = samples * area - (spans - 1) * rows
        return cls(spans, rows, last, channels, cols, tile, _cdiv(rows, per), per, whole)

    @property
    def grid(self) -> tuple[int, int, int]:
        return self.parts, _cdiv(self.channels, self.cols), self.spans

    @property
    def sizes(self) -> tuple[int, int, int]:
        return self.rows, self.last, self.per

    @property
    def unit(self) -> int:
        """Largest divisor of the number of channels that Triton can use."""
        return math.gcd(self.channels, 16)

    @property
    def tiles(self) -> dict[str, int]:
        return {"ROWS": self.tile, "COLS": self.cols, "UNIT": self.unit}


def _launch_in_graph(
    kernel: Any,  # noqa: ANN401 -- Triton is untyped
    grid: tuple[int, ...],
    *args: object,
    **constants: object,
) -> None:
    wrap_triton(kernel)[grid](*args, num_warps=8, **constants)


def normalise(  # noqa: PLR0913 -- what batch_norm takes, and the groups
    x: Tensor,
    other: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    eps: float,
    span: int,
    relu: bool,
    group: Group | None = None,
    sums: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return N x C x ... images, each span normalised by its own moments, and these moments.

    `other` is added to the result, and `relu` applied to the sum. The moments are mean, biased
    variance and number of values of each span: G x 3 x C, float32. The sums over spans of the mean
    and of the unbiased variance are added to `sums` (2 C numbers) in place.

    Arguments are those that `kernels.take` returns True for. Without a `group` of workers the last
    span may be smaller. With one, its workers together hold a single span.
    """
    channels = x.shape[1]
    if weight is not None or bias is not None:
        weight = x.new_ones(channels, dtype=torch.float32) if weight is None else weight
        bias = torch.zeros_like(weight) if bias is None else bias
        weight, bias = weight.contiguous(), bias.contiguous()
    for each, shape in ((weight, (channels,)), (bias, (channels,)), (sums, (2, channels))):
        if each is not None and (each.shape != shape or each.device != x.device):
            raise ValueError(
                f"a BatchNorm of {each.shape[-1]} channels on {each.device} was given images of "
                f"{plural(channels, 'channel')} on {x.device}"
            )
    keys = torch._C._TorchDispatchModeKey
    modes = map(torch._C._get_dispatch_mode, (keys.FAKE, keys.PROXY))  # make_fx has the second
    if torch.compiler.is_compiling() or any(mode is not None for mode in modes):
        y, stat = _in_graph(x, other, weight, bias, eps, span, relu)
        if sums is not None:
            mean, variance, count = stat.unbind(1)
            sums += torch.stack([mean.sum(0), (variance * (count / (count - 1))).sum(0)])
        return y, stat
    note_use(
        lambda: Use(
            shape=tuple(x.shape),
            dtype=str(x.dtype).removeprefix("torch."),
            span=span,
            eps=eps,
            adds=other is not None,
            relu=relu,
            affine=weight is not None,
            counts=sums is not None,
            shares=group is not None,
        )
    )
    result: tuple[Tensor, Tensor] = _Normalise.apply(  # type: ignore[no-untyped-call]  # torch's
        x, other, weight, bias, sums, eps, span, relu, group
    )
    return result


class _Normalise(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0913 -- PyTorch takes no keywords here
        ctx: Any,  # noqa: ANN401 -- PyTorch's, untyped
        x: Tensor,
        other: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        sums: Tensor | None,
        eps: float,
        span: int,
        relu: bool,  # noqa: FBT001 -- as above
        group: Group | None,
    ) -> tuple[Tensor, Tensor]:
        span = span if group is None else len(x)
        settings = eps, span, relu, group, accelerator.launch
        result = _forward(x, other, (weight, bias), sums, *settings)
        _save(ctx, (x, other, weight, bias, *settings), result)
        ctx.set_materialize_grads(False)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, _: None) -> tuple[Tensor | None, ...]:  # noqa: ANN401 -- PyTorch's, untyped
        if dy is None:
            return (None,) * 9
        x, y, weight, bias, stat = ctx.saved_tensors
        dx, dz, grads = _backward(dy, x, y, (weight, bias), stat, *ctx.settings)
        affine = _of_affine(grads, (weight, bias))
        return dx, dz if ctx.adds else None, *affine, None, None, None, None, None


def _forward(  # noqa: PLR0913 -- both ways to call it pass all of them
    x: Tensor,
    other: Tensor | None,
    affine: tuple[Tensor | None, Tensor | None],
    sums: Tensor | None,
    eps: float,
    span: int,
    relu: bool,  # noqa: FBT001 -- as above
    group: Group | None,
    launch: Launch,
) -> tuple[Tensor, Tensor]:
    shape = _Shape.of(x, span, in_parts=group is not None)
    if shape.whole:
        part = x.new_empty(shape.spans, 2, shape.channels, dtype=torch.float32)
    else:
        part = _partial_moments(x, shape, launch)
    parts = shape.parts
    if group is not None:
        part, parts = _over_workers(part, shape, group, launch), group.world_size
    y = torch.empty_like(x)
    stat = part.new_empty(shape.spans, 3, shape.channels)
    tensors = [x, other, y, part, stat, sums, *affine]
    launch(
        kernels.normalise_rows,
        shape.grid,
        *(part if tensor is None else tensor for tensor in tensors),  # see _backward
        *(*shape.sizes, parts, shape.channels // shape.unit, eps),
        SUM=other is not None,
        RELU=relu,
        AFFINE=affine[0] is not None,
        COUNT=sums is not None,
        WHOLE=shape.whole,
        CHUNK=CHUNK,
        **shape.tiles,
    )
    if sums is not None and shape.whole:
        sums += part.sum(0)
    return y, stat


def _backward(  # noqa: PLR0913 -- both ways to call it pass all of them
    dy: Tensor,
    x: Tensor,
    y: Tensor | None,
    affine: tuple[Tensor | None, Tensor | None],
    stat: Tensor,
    eps: float,
    span: int,
    relu: bool,  # noqa: FBT001 -- as above
    group: Group | None,
    launch: Launch,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x and of the tensor that was added, and of bias and weight: 2 x C."""
    shape = _Shape.of(x, span, tensors=2 if y is None else 3, in_parts=group is not None)
    dy = dy.to(x.dtype).movedim(1, -1).contiguous().movedim(-1, 1)  # rows x channels in memory
    dz = None if y is None else torch.empty_like(x)
    part = stat.new_empty(shape.spans, shape.parts, 2, shape.channels)
    constants = {"AFFINE": affine[0] is not None, **shape.tiles}
    grad, result = dy, y
    if not shape.whole:
        launch(
            kernels.gradient_sums,
            shape.grid,
            # inductor may copy an argument for each place where it is passed; not a kernel's output
            *(stat if tensor is None else tensor for tensor in [dy, x, y, dz, part, stat, *affine]),
            *(*shape.sizes, shape.channels // shape.unit, eps),
            SUM=y is not None,
            RELU=relu,
            **constants,
        )
        grad, result, relu = dy if dz is None else dz, None, relu and dz is None
    dx = torch.empty_like(x)
    grads = stat.new_empty(2, shape.channels)  # of bias and weight
    parts = shape.parts
    if group is not None:
        grads = part.sum((0, 1))
        part, parts = grads.clone(), 1
        group.all_reduce(part).wait()
    tensors = [grad, x, result, dz if shape.whole else None, dx, part, stat, *affine, grads]
    launch(
        kernels.gradient_rows,
        shape.grid,
        *(stat if tensor is None else tensor for tensor in tensors),
        *(*shape.sizes, parts, shape.channels // shape.unit, eps),
        SUM=result is not None,
        RELU=relu,
        COUNT=group is None and not shape.whole,
        WHOLE=shape.whole,
        CHUNK=CHUNK,
        **constants,
    )
    return dx, dy if dz is None else dz, part.sum((0, 1)) if shape.whole else grads


def _of_affine(
    grads: Tensor, affine: tuple[Tensor | None, Tensor | None]
) -> tuple[Tensor | None, Tensor | None]:
    weight, bias = affine
    if weight is None or bias is None:
        return None, None
    return grads[1].to(weight.dtype), grads[0].to(bias.dtype)


def _partial_moments(x: Tensor, shape: _Shape, launch: Launch) -> Tensor:
    size = shape.spans * shape.parts * (2 * shape.channels + 1)
    part = torch.empty(size, dtype=torch.float32, device=x.device)
    sizes = *shape.sizes, shape.channels // shape.unit
    launch(kernels.statistics, shape.grid, x, part, *sizes, **shape.tiles)
    return part


def _merged(part: Tensor, shape: _Shape, launch: Launch) -> Tensor:
    stat = part.new_empty(shape.spans, 3, shape.channels)
    grid = shape.grid[1:]
    constants = {"COLS": shape.cols, "UNIT": shape.unit, "CHUNK": CHUNK}
    sizes = shape.parts, shape.channels // shape.unit
    launch(kernels.merge_spans, grid, part, stat, *sizes, **constants)
    return stat


def moments(x: Tensor, span: int) -> Tensor:
    """Return mean, biased variance and number of values of each span: G x 3 x C, float32."""
    shape, launch = _Shape.of(x, span, in_parts=True), accelerator.launch
    return _merged(_partial_moments(x, shape, launch), shape, launch)


def _over_workers(part: Tensor, shape: _Shape, group: Group, launch: Launch) -> Tensor:
    mean, variance, count = _merged(part, shape, launch)[0]
    # As in `batchnorm_functional`, which another worker may use.
    gathered = group.all_gather(torch.cat([mean, variance, count[:1]]))
    counts = gathered[:, -1]
    gathered[:, len(mean) : -1] *= counts.unsqueeze(1)
    return torch.cat([gathered[:, :-1].flatten(), counts])


@triton_op("largebatch::span_batchnorm", mutates_args=())
def _in_graph(  # noqa: PLR0913 -- operators take no keywords
    x: Tensor,
    other: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    span: int,
    relu: bool,  # noqa: FBT001 -- as above
) -> tuple[Tensor, Tensor]:
    return _forward(x, other, (weight, bias), None, eps, span, relu, None, _launch_in_graph)


@_in_graph.register_fake  # type: ignore[untyped-decorator]  # torch's
def _(x: Tensor, *args: object) -> tuple[Tensor, Tensor]:
    spans = -(-len(x) // int(args[4]))  # type: ignore[call-overload]  # the span
    return torch.empty_like(x), x.new_empty(spans, 3, x.shape[1], dtype=torch.float32)


@triton_op("largebatch::span_batchnorm_backward", mutates_args=())
def _backward_in_graph(  # noqa: PLR0913 -- operators take no keywords
    dy: Tensor,
    x: Tensor,
    y: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    stat: Tensor,
    eps: float,
    span: int,
    relu: bool,  # noqa: FBT001 -- as above
) -> list[Tensor]:
    settings = eps, span, relu, None, _launch_in_graph
    dx, dz, grads = _backward(dy, x, y, (weight, bias), stat, *settings)
    return [dx, grads] if y is None else [dx, grads, dz]


@_backward_in_graph.register_fake  # type: ignore[untyped-decorator]  # torch's
def _(_: Tensor, x: Tensor, y: Tensor | None, *args: object) -> list[Tensor]:  # noqa: ARG001 -- the operator's
    grads = x.new_empty(2, x.shape[1], dtype=torch.float32)
    return [torch.empty_like(x), grads] + ([] if y is None else [torch.empty_like(x)])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:  # noqa: ANN401 -- PyTorch's, untyped
    x, other, weight, bias, *settings = inputs
    y, stat = output
    relu, ctx.settings, ctx.adds = settings[2], settings, other is not None
    ctx.save_for_backward(x, y if relu and ctx.adds else None, weight, bias, stat)
    ctx.mark_non_differentiable(stat)


def _backward_of_graph(ctx: Any, dy: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401 -- PyTorch's, untyped
    x, y, weight, bias, stat = ctx.saved_tensors
    dx, grads, *dz = _backward_in_graph(dy, x, y, weight, bias, stat, *ctx.settings)
    other = (dz[0] if dz else dy) if ctx.adds else None
    return dx, other, *_of_affine(grads, (weight, bias)), None, None, None


_in_graph.register_autograd(_backward_of_graph, setup_context=_save)
