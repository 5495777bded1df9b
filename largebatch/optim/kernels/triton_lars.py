"""The two kernels of `table`, in Triton.

Each program has a chunk of one tensor. The first kernel writes the sums of squares of the weight
and the gradient in it, in float64, where the square of any float32 number is normal; of a very
large tensor, every few chunks have one sum. In the second every program adds the sums of its
tensor, in a fixed order, and updates its chunk.
"""

import triton
import triton.language as tl


@triton.jit
def _pointer(addresses, which, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    pointer = tl.load(addresses + which).to(tl.pointer_type(dtype))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _chunk(chunks, tensors, ALIGNED: tl.constexpr, CHUNK: tl.constexpr):
    """Return the tensor of a program, the first element of its chunk, and the tensor's size."""
    which = tl.load(chunks + 2 * tl.program_id(0))
    start = tl.multiple_of(tl.load(chunks + 2 * tl.program_id(0) + 1), CHUNK)
    size = tl.load(tensors + 5 * which)
    if ALIGNED:
        size = tl.multiple_of(size, 8)
    return which, start, size


@triton.jit
def _load_short(addresses, which, kind, at, inside, ALIGNED: tl.constexpr):
    """Return elements of a float32 (kind 0), bfloat16 (1) or float16 (2) tensor, as float32."""
    if kind == 0:
        pointer = _pointer(addresses, which, tl.float32, ALIGNED)
        values = tl.load(pointer + at, mask=inside, other=0.0)
    elif kind == 1:
        brain = _pointer(addresses, which, tl.bfloat16, ALIGNED)
        values = tl.load(brain + at, mask=inside, other=0.0).to(tl.float32)
    else:
        half = _pointer(addresses, which, tl.float16, ALIGNED)
        values = tl.load(half + at, mask=inside, other=0.0).to(tl.float32)
    return values


@triton.jit
def _store_short(addresses, which, kind, at, values, inside, ALIGNED: tl.constexpr):
    if kind == 0:
        tl.store(_pointer(addresses, which, tl.float32, ALIGNED) + at, values, mask=inside)
    elif kind == 1:
        brain = _pointer(addresses, which, tl.bfloat16, ALIGNED)
        tl.store(brain + at, values.to(tl.bfloat16), mask=inside)
    else:
        half = _pointer(addresses, which, tl.float16, ALIGNED)
        tl.store(half + at, values.to(tl.float16), mask=inside)


@triton.jit
def norms(
    chunks, tensors, addresses, squares, num, scale,
    SCALED: tl.constexpr, ALIGNED: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Write the sums of squares of weight and gradient of some chunks."""
    which, start, size = _chunk(chunks, tensors, ALIGNED, CHUNK)
    steps = tl.load(tensors + 5 * which + 3)
    place = start // CHUNK
    if place % steps > 0:
        return
    kind = tl.load(tensors + 5 * which + 1)
    pointer = _pointer(addresses, which, tl.float32, ALIGNED)
    of_weight = tl.zeros((), tl.float64)
    of_grad = tl.zeros((), tl.float64)
    for step in range(steps):
        at = start + step * CHUNK + tl.arange(0, CHUNK)
        inside = at < size
        weight = tl.load(pointer + at, mask=inside, other=0.0).to(tl.float64)
        of_weight += tl.sum(weight * weight, 0)
        grad = _load_short(addresses + 3 * num, which, kind, at, inside, ALIGNED)
        if SCALED:
            grad = grad / tl.load(scale)
        grad = grad.to(tl.float64)
        of_grad += tl.sum(grad * grad, 0)
    at = 2 * (tl.load(tensors + 5 * which + 4) + place // steps)
    tl.store(squares + at, of_weight)
    tl.store(squares + at + 1, of_grad)


@triton.jit
def update(
    chunks, tensors, addresses, squares, num, scale, numbers, ratios, found_inf,
    SCALED: tl.constexpr, SKIPS: tl.constexpr, ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """Update weights and buffers, and write the ratio of each tensor."""
    which, start, size = _chunk(chunks, tensors, ALIGNED, CHUNK)
    kind = tl.load(tensors + 5 * which + 1)
    at = start + tl.arange(0, CHUNK)
    inside = at < size
    weights = _pointer(addresses, which, tl.float32, ALIGNED) + at
    buffers = _pointer(addresses + num, which, tl.float32, ALIGNED) + at
    weight = tl.load(weights, mask=inside, other=0.0)
    buffer = tl.load(buffers, mask=inside, other=0.0)
    grad = _load_short(addresses + 3 * num, which, kind, at, inside, ALIGNED)
    group = tl.load(tensors + 5 * which + 2)
    first = tl.load(tensors + 5 * which + 4)
    last = first + tl.cdiv(size, CHUNK * tl.load(tensors + 5 * which + 3))
    rule = numbers + 11 * group
    place = tl.load(rule + 7)
    ratio = tl.full((), 1.0, tl.float64)
    if place > 0.0:
        each = first + tl.arange(0, SUMS)
        of_weight = tl.load(squares + 2 * each, mask=each < last, other=0.0)
        of_grad = tl.load(squares + 2 * each + 1, mask=each < last, other=0.0)
        w, g = tl.sqrt(tl.sum(of_weight, 0)), tl.sqrt(tl.sum(of_grad, 0))
        ratio = tl.load(rule + 3) * w / (g + tl.load(rule + 2) * w + tl.load(rule + 4))
        ratio = tl.where((w > 0.0) & (g > 0.0), ratio, 1.0)
        limit = tl.load(rule + 8)
        ratio = tl.where(ratio > limit, limit, ratio)
    # All programs of a tensor have computed the same ratio; the first one writes it.
    if start == 0:
        tl.store(ratios + which, ratio)
    # GradScaler expects that the step leaves gradients without the scale.
    if SCALED:
        grad = grad / tl.load(scale)
        _store_short(addresses + 3 * num, which, kind, at, grad, inside, ALIGNED)
    direction = grad + tl.load(rule + 1).to(tl.float32) * weight
    limit = tl.load(rule + 9).to(tl.float32)
    direction = tl.where(direction > limit, limit, direction)
    direction = tl.where(direction < -limit, -limit, direction)
    into, out = tl.load(rule + 5), tl.load(rule + 6)
    if place == 1.0:
        into *= ratio
    if place == 2.0:
        out *= ratio
    buffer *= tl.load(rule).to(tl.float32)
    buffer += into.to(tl.float32) * direction
    step = buffer
    if tl.load(rule + 10) > 0.0:
        step = direction + tl.load(rule).to(tl.float32) * buffer
    weight -= out.to(tl.float32) * step
    # A skipped step stores nothing: the mask of every store below is then empty.
    if SKIPS:
        inside = at < tl.where(tl.load(found_inf) == 0.0, size, 0)
    tl.store(buffers, buffer, mask=inside)
    tl.store(weights, weight, mask=inside)
    if kind > 0:
        _store_short(addresses + 2 * num, which, kind, at, weight, inside, ALIGNED)
