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


class _LaunchShape(NamedTuple):
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
    def of(
        cls, x: Tensor, span: int, *, tensors: int = 1, in_parts: bool = False
    ) -> "_LaunchShape":
        """Return the numbers for N x C x ... images with spans of `span` samples.

        `tensors` of this shape are read, twice if a part may be a whole span.
        """
        # In a dynamic graph of torch.compile these are symbols until they are converted.
        samples = int(x.shape[0])
        channels = int(x.shape[1])
        area = int(x.numel()) // (samples * channels)
        size = x.element_size()
        spans = _cdiv(samples, span)
        rows = min(span, samples) * area

        # A program of a whole span reads 64 bytes of each row, two sectors of memory: narrow blocks
        # make many programs, each with few bytes that must stay in the cache.
        cols = min(64 // size, _power_of_2(channels))
        programs = spans * _cdiv(channels, cols)
        whole = False
        if not in_parts:
            stays = _stays(programs, tensors, rows * cols * size, x.device)
            whole = stays if WHOLE is None else WHOLE
        parts = 1
        if not whole:
            # Otherwise 128 bytes, a line of the cache, and as many parts as programs are left.
            cols = min(128 // size, _power_of_2(channels))
            parts = max(1, PARTS // (spans * _cdiv(channels, cols)))

        # A step reads a whole part if TILE allows it, and not less than an eighth of TILE: small
        # loads would wait for memory. Sizes are powers of 2, as Triton wants them.
        most = max(1, TILE // (cols * size))
        tile = max(most // 8, _power_of_2(_cdiv(rows, parts)))
        tile = min(tile, _power_of_2(rows))
        # Of two tensors a step holds half as many rows each; a third one is read after their use.
        tile = max(1, min(tile, most // min(tensors, 2)))
        # Parts of whole steps: only the last step of a span is masked.
        per = _cdiv(_cdiv(rows, parts), tile) * tile
        return cls(
            spans=spans,
            rows=rows,
            last=samples * area - (spans - 1) * rows,
            channels=channels,
            cols=cols,
            tile=tile,
            parts=_cdiv(rows, per),
            per=per,
            whole=whole,
        )

    @property
    def grid(self) -> tuple[int, int, int]:
        """Return the number of programs: by part, block of channels and span."""
        return self.parts, _cdiv(self.channels, self.cols), self.spans

    @property
    def sizes(self) -> tuple[int, int, int]:
        return self.rows, self.last, self.per

    @property
    def unit(self) -> int:
        """Largest divisor of the number of channels that Triton can use."""
        return math.gcd(self.channels, 16)

    @property
    def units(self) -> int:
        """Number of channels in these units: what a kernel multiplies them by is a constant."""
        return self.channels // self.unit

    @property
    def tiles(self) -> dict[str, int]:
        """Return the constants of a kernel."""
        return {"ROWS": self.tile, "COLS": self.cols, "UNIT": self.unit}


class NormSettings(NamedTuple):
    """How a layer normalises its images."""

    eps: float
    span: int
    """Number of samples; with a group, those that its workers hold together."""

    relu: bool
    group: Group | None = None
    """Workers that share a span."""


Affine = tuple[Tensor | None, Tensor | None]
"""Scale and shift of each channel; both are None in a layer without them."""


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
        # Kernels read them by their addresses, with a stride of 1.
        weight, bias = weight.contiguous(), bias.contiguous()
    for tensor, shape in ((weight, (channels,)), (bias, (channels,)), (sums, (2, channels))):
        if tensor is not None and (tensor.shape != shape or tensor.device != x.device):
            raise ValueError(
                f"a BatchNorm of {tensor.shape[-1]} channels on {tensor.device} was given images "
                f"of {plural(channels, 'channel')} on {x.device}"
            )
    if _is_traced():
        y, stat = _normalise_in_graph(x, other, weight, bias, eps, span, relu)
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
    # With a group a worker holds a part of one span.
    settings = NormSettings(eps, span if group is None else len(x), relu, group)
    return _apply(x, other, weight, bias, sums, settings=settings, is_traced=False)


def _apply(
    *tensors: Tensor | None, settings: NormSettings, is_traced: bool
) -> tuple[Tensor, Tensor]:
    """Call `_Normalise`, which takes no keywords."""
    result: tuple[Tensor, Tensor] = _Normalise.apply(*tensors, settings, is_traced)  # type: ignore[no-untyped-call]  # torch's
    return result


@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]  # torch's
def _normalise_in_graph(  # noqa: PLR0913 -- a graph of torch.compile has no tuples
    x: Tensor,
    other: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    span: int,
    relu: bool,  # noqa: FBT001 -- as above
) -> tuple[Tensor, Tensor]:
    """Normalise where operations are traced.

    torch.compile's first stage does not look inside. The next one runs it, and records what it
    calls forward and backward.
    """
    settings = NormSettings(eps, span, relu)
    return _apply(x, other, weight, bias, None, settings=settings, is_traced=True)


def _is_traced() -> bool:
    """Return True if operations are recorded or have no numbers, so that kernels cannot run."""
    if torch.compiler.is_compiling():
        return True
    keys = torch._C._TorchDispatchModeKey
    # make_fx has a mode of the second kind.
    return any(torch._C._get_dispatch_mode(key) is not None for key in (keys.FAKE, keys.PROXY))


class _Normalise(torch.autograd.Function):
    """The only way to autograd, for launches and for the operators that are traced.

    An operator cannot have its own: torch takes no formula for one that adds to `sums`, in the
    launch that has the moments, and no argument for a group of any backend.
    """

    @staticmethod
    def forward(  # noqa: PLR0913 -- PyTorch takes no keywords here
        ctx: Any,  # noqa: ANN401 -- PyTorch's, untyped
        x: Tensor,
        other: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        sums: Tensor | None,
        settings: NormSettings,
        is_traced: bool,  # noqa: FBT001 -- as above
    ) -> tuple[Tensor, Tensor]:
        if is_traced:
            y, stat = _forward_operator(x, other, weight, bias, *settings[:3])
        else:
            y, stat = _forward(x, other, (weight, bias), sums, settings, accelerator.launch)
        ctx.settings = settings
        ctx.is_traced = is_traced
        ctx.adds = other is not None
        # Without a sum, what was before the ReLU is computed again from x.
        ctx.save_for_backward(x, y if settings.relu and ctx.adds else None, weight, bias, stat)
        ctx.mark_non_differentiable(stat)
        ctx.set_materialize_grads(False)  # zeros for the moments, in each pass
        return y, stat

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, _: None) -> tuple[Tensor | None, ...]:  # noqa: ANN401 -- PyTorch's, untyped
        if dy is None:
            return (None,) * 7
        x, y, weight, bias, stat = ctx.saved_tensors
        if ctx.is_traced:
            dx, grads, *dzs = _backward_operator(dy, x, y, weight, bias, stat, *ctx.settings[:3])
            dz = dzs[0] if dzs else dy
        else:
            dx, dz, grads = _backward(
                dy, x, y, (weight, bias), stat, ctx.settings, accelerator.launch
            )
        by_weight = None if weight is None else grads[1].to(weight.dtype)
        by_bias = None if bias is None else grads[0].to(bias.dtype)
        return dx, dz if ctx.adds else None, by_weight, by_bias, None, None, None


def _forward(
    x: Tensor,
    other: Tensor | None,
    affine: Affine,
    sums: Tensor | None,
    settings: NormSettings,
    launch: Launch,
) -> tuple[Tensor, Tensor]:
    shape = _LaunchShape.of(x, settings.span, in_parts=settings.group is not None)
    parts = shape.parts
    if shape.whole:
        # The moments of each span, which PyTorch adds up below.
        part = x.new_empty(shape.spans, 2, shape.channels, dtype=torch.float32)
    else:
        part = _partial_moments(x, shape, launch)
    if settings.group is not None:
        part = _over_workers(part, shape, settings.group, launch)
        parts = settings.group.world_size
    y = torch.empty_like(x)
    stat = part.new_empty(shape.spans, 3, shape.channels)
    launch(
        kernels.normalise_rows,
        shape.grid,
        *_present([x, other, y, part, stat, sums, *affine], instead=part),
        *shape.sizes,
        parts,
        shape.units,
        settings.eps,
        SUM=other is not None,
        RELU=settings.relu,
        AFFINE=affine[0] is not None,
        COUNT=sums is not None,
        WHOLE=shape.whole,
        CHUNK=CHUNK,
        **shape.tiles,
    )
    if sums is not None and shape.whole:
        sums += part.sum(0)
    return y, stat


def _backward(  # noqa: PLR0913 -- the tensors of a layer
    dy: Tensor,
    x: Tensor,
    y: Tensor | None,
    affine: Affine,
    stat: Tensor,
    settings: NormSettings,
    launch: Launch,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x and of the tensor that was added, and of bias and weight: 2 x C.

    `y` is the result if there were a sum and a ReLU, else None: then the gradient of what was added
    is dy.
    """
    group = settings.group
    num_tensors = 2 if y is None else 3
    shape = _LaunchShape.of(x, settings.span, tensors=num_tensors, in_parts=group is not None)
    dy = dy.to(x.dtype).movedim(1, -1).contiguous().movedim(-1, 1)  # rows x channels in memory
    dz = None if y is None else torch.empty_like(x)
    part = stat.new_empty(shape.spans, shape.parts, 2, shape.channels)
    constants = {"AFFINE": affine[0] is not None, **shape.tiles}

    # What the second launch reads: the gradient, and whether it is masked by the ReLU there.
    grad = dy
    result = y
    masks = settings.relu
    written = dz
    if not shape.whole:
        launch(
            kernels.gradient_sums,
            shape.grid,
            *_present([dy, x, y, dz, part, stat, *affine], instead=stat),
            *shape.sizes,
            shape.units,
            settings.eps,
            SUM=y is not None,
            RELU=settings.relu,
            **constants,
        )
        if dz is not None:
            # The first launch has masked the gradient: nobody reads dy and y a second time.
            grad = dz
            result = None
            masks = False
            written = None

    dx = torch.empty_like(x)
    grads = stat.new_empty(2, shape.channels)  # of bias and weight
    parts = shape.parts
    if group is not None:
        # Bias and weight get this worker's gradient, which the reducer adds up with the others; dx
        # needs the sums over the span.
        grads = part.sum((0, 1))
        part = grads.clone()
        parts = 1
        group.all_reduce(part).wait()
    launch(
        kernels.gradient_rows,
        shape.grid,
        *_present([grad, x, result, written, dx, part, stat, *affine, grads], instead=stat),
        *shape.sizes,
        parts,
        shape.units,
        settings.eps,
        SUM=result is not None,
        RELU=masks,
        COUNT=group is None and not shape.whole,
        WHOLE=shape.whole,
        CHUNK=CHUNK,
        **constants,
    )
    if shape.whole:
        grads = part.sum((0, 1))
    return dx, dy if dz is None else dz, grads


def _present(tensors: list[Tensor | None], *, instead: Tensor) -> list[Tensor]:
    """Replace None, which Triton does not take; a kernel does not read what stands there.

    Not by an output of the kernel: inductor may copy an argument for each place where it is passed.
    """
    return [instead if tensor is None else tensor for tensor in tensors]


def _partial_moments(x: Tensor, shape: _LaunchShape, launch: Launch) -> Tensor:
    """Return mean and deviations of each part of the spans, and behind them the numbers of rows."""
    size = shape.spans * shape.parts * (2 * shape.channels + 1)
    part = torch.empty(size, dtype=torch.float32, device=x.device)
    launch(kernels.statistics, shape.grid, x, part, *shape.sizes, shape.units, **shape.tiles)
    return part


def _merged(part: Tensor, shape: _LaunchShape, launch: Launch) -> Tensor:
    """Return the moments of each span from those of its parts."""
    stat = part.new_empty(shape.spans, 3, shape.channels)
    _, *grid = shape.grid  # a program merges all parts
    constants = {"COLS": shape.cols, "UNIT": shape.unit, "CHUNK": CHUNK}
    launch(kernels.merge_spans, tuple(grid), part, stat, shape.parts, shape.units, **constants)
    return stat


def moments(x: Tensor, span: int) -> Tensor:
    """Return mean, biased variance and number of values of each span: G x 3 x C, float32."""
    shape = _LaunchShape.of(x, span, in_parts=True)
    part = _partial_moments(x, shape, accelerator.launch)
    return _merged(part, shape, accelerator.launch)


def _over_workers(part: Tensor, shape: _LaunchShape, group: Group, launch: Launch) -> Tensor:
    """Return the moments of each worker, as parts of the span that they share."""
    mean, variance, count = _merged(part, shape, launch)[0]
    # The same numbers as in `batchnorm_functional`, which another worker may use.
    gathered = group.all_gather(torch.cat([mean, variance, count[:1]]))
    counts = gathered[:, -1]
    # Kernels merge squared deviations: variances times numbers.
    gathered[:, len(mean) : -1] *= counts.unsqueeze(1)
    return torch.cat([gathered[:, :-1].flatten(), counts])


# The operators that stand for the launches where they are traced. They take no tuples.


def _launch_in_operator(
    kernel: Any,  # noqa: ANN401 -- Triton is untyped
    grid: tuple[int, ...],
    *args: object,
    **constants: object,
) -> None:
    wrap_triton(kernel)[grid](*args, num_warps=8, **constants)


@triton_op("largebatch::span_batchnorm", mutates_args=())
def _forward_operator(  # noqa: PLR0913 -- as above
    x: Tensor,
    other: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    span: int,
    relu: bool,  # noqa: FBT001 -- as above
) -> tuple[Tensor, Tensor]:
    settings = NormSettings(eps, span, relu)
    return _forward(x, other, (weight, bias), None, settings, _launch_in_operator)


@_forward_operator.register_fake  # type: ignore[untyped-decorator]  # torch's
def _(x: Tensor, *args: object) -> tuple[Tensor, Tensor]:
    spans = -(-len(x) // int(args[4]))  # type: ignore[call-overload]  # the span
    return torch.empty_like(x), x.new_empty(spans, 3, x.shape[1], dtype=torch.float32)


@triton_op("largebatch::span_batchnorm_backward", mutates_args=())
def _backward_operator(  # noqa: PLR0913 -- as above
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
    """Return the gradients of x, of bias and weight, and of what was added, unless that is dy.

    An operator may not return what it was given.
    """
    settings = NormSettings(eps, span, relu)
    dx, dz, grads = _backward(dy, x, y, (weight, bias), stat, settings, _launch_in_operator)
    return [dx, grads] if y is None else [dx, grads, dz]


@_backward_operator.register_fake  # type: ignore[untyped-decorator]  # torch's
def _(_: Tensor, x: Tensor, y: Tensor | None, *args: object) -> list[Tensor]:  # noqa: ARG001 -- the operator's
    grads = x.new_empty(2, x.shape[1], dtype=torch.float32)
    results = [torch.empty_like(x), grads]
    return results if y is None else [*results, torch.empty_like(x)]
