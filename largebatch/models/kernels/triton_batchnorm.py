"""The kernels of `batchnorm_launches`, in Triton.

Partial sums are a count, a mean and squared deviations from it, about the mean of the first rows of
a part, and are merged by equation 2.1 of Chan, Golub and LeVeque (1983): a mean that is far from
zero costs no digits. Sums are in float32.
"""

import triton
import triton.language as tl

_kernel = triton.jit(do_not_specialize=["rows", "last", "per", "splits", "C"])
"""Compiles a kernel once for all sizes. A launch has C * UNIT channels, so that Triton knows which
rows can be read by 16 bytes: of itself it sees only multiples of 16 channels."""


@triton.jit
def _wide(number):
    """Return an int64: a batch, and its partial sums, may have more than 2 ** 31 values."""
    return tl.zeros((), tl.int64) + number


@triton.jit
def _load(pointer, start, end, C, cols, ROWS: tl.constexpr):
    """Return ROWS x COLS values from row `start`, zero from row `end` on, and where they are."""
    row = tl.arange(0, ROWS)
    inside = (start + row < end)[:, None] & (cols < C)[None, :]
    at = pointer + start * _wide(C) + (row[:, None] * C + cols[None, :])
    return tl.load(at, mask=inside, other=0.0).to(tl.float32), inside


@triton.jit
def _store(pointer, values, start, C, cols, inside, ROWS: tl.constexpr):
    at = pointer + start * _wide(C) + (tl.arange(0, ROWS)[:, None] * C + cols[None, :])
    tl.store(at, values.to(pointer.dtype.element_ty), mask=inside)


@triton.jit
def _relu(values):
    """Return the positive part; NaN stays NaN."""
    return tl.maximum(values, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _fold(values, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Return 2,048 sums, which threads add up in their registers, or the values if fewer."""
    fold: tl.constexpr = ROWS if ROWS * COLS < 2048 else 2048 // COLS
    return tl.sum(tl.reshape(values, (ROWS // fold, fold, COLS)), 0)


@triton.jit
def _rows_of_span(span, rows, last):
    """Return the number of rows of a span; the last one may have fewer."""
    return tl.where(span == tl.num_programs(2) - 1, last, rows)


@triton.jit
def _moments(x, start, end, C, cols, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Return the number of rows, their mean and the sum of squared deviations from it."""
    count = tl.maximum(end - start, 0).to(tl.float32)
    # Sums are of distances from the mean of the first rows; see above.
    values, inside = _load(x, start, end, C, cols, ROWS)
    folded = _fold(values, ROWS, COLS)
    origin = tl.sum(folded, 0) / tl.maximum(tl.minimum(count, ROWS), 1.0)
    values = tl.where(inside, values - origin[None, :], 0.0)
    first = _fold(values, ROWS, COLS)
    second = _fold(values * values, ROWS, COLS)
    for row in range(start + ROWS, end, ROWS):
        values, inside = _load(x, row, end, C, cols, ROWS)
        values = tl.where(inside, values - origin[None, :], 0.0)
        first += _fold(values, ROWS, COLS)
        second += _fold(values * values, ROWS, COLS)
    total = tl.sum(first, 0)
    shift = total / tl.maximum(count, 1.0)
    return count, origin + shift, tl.sum(second, 0) - total * shift


@_kernel
def statistics(
    x, part, rows, last, per, C,
    ROWS: tl.constexpr, COLS: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Write the mean and deviations of `per` rows of a span, G x P x 2 x C, then counts, G x P."""
    C *= UNIT
    split = tl.program_id(0)
    block = tl.program_id(1)
    span = _wide(tl.program_id(2))
    cols = block * COLS + tl.arange(0, COLS)
    start = split * per
    end = tl.minimum(start + per, _rows_of_span(span, rows, last))
    count, mean, deviations = _moments(x + span * rows * C, start, end, C, cols, ROWS, COLS)
    which = span * tl.num_programs(0) + split
    at = part + which * 2 * C + cols
    tl.store(at, mean, mask=cols < C)
    tl.store(at + C, deviations, mask=cols < C)
    if block == 0:
        num = part + _wide(tl.num_programs(2)) * tl.num_programs(0) * 2 * C
        tl.store(num + which, count)


@triton.jit
def _merge(part, span, spans, splits, C, cols, SPANS: tl.constexpr, CHUNK: tl.constexpr):
    """Return count, mean and biased variance of spans from their partial moments: SPANS x COLS."""
    each = span + tl.arange(0, SPANS)
    which = tl.arange(0, CHUNK)
    known = (each < spans)[:, None] & (cols < C)[None, :]
    row = _wide(splits) * each
    # Behind the moments of all parts are their numbers of rows.
    num = part + _wide(spans) * splits * 2 * C + row[:, None] + which[None, :]
    origins = part + row[:, None] * 2 * C + cols[None, :]
    # Means are taken as distances from that of the first part: a mean far from zero would cost
    # digits of the variance.
    origin = tl.load(origins, mask=known, other=0.0)[:, None, :]
    at = origins[:, None, :] + (which * 2 * C)[None, :, None]
    count = tl.zeros((SPANS, CHUNK), tl.float32)
    first = tl.zeros((SPANS, CHUNK, cols.shape[0]), tl.float32)
    second = tl.zeros((SPANS, CHUNK, cols.shape[0]), tl.float32)
    for split in range(0, splits, CHUNK):
        left = (which < splits - split)[None, :]
        inside = left[:, :, None] & known[:, None, :]
        weight = tl.load(num + split, mask=left & (each < spans)[:, None], other=0.0)
        shift = tl.load(at + split * 2 * C, mask=inside, other=0.0) - origin
        # A part without rows has no mean: what is in its place must not count, not even NaN.
        shift = tl.where(weight[:, :, None] > 0.0, shift, 0.0)
        moved = weight[:, :, None] * shift
        count += weight
        first += moved
        second += tl.load(at + split * 2 * C + C, mask=inside, other=0.0) + moved * shift
    count = tl.sum(count, 1)[:, None]
    total = tl.sum(first, 1)
    shift = total / tl.maximum(count, 1.0)
    variance = (tl.sum(second, 1) - total * shift) / tl.maximum(count, 1.0)
    return count, tl.reshape(origin, shift.shape) + shift, _relu(variance)


@triton.jit
def _merge_one(part, span, spans, splits, C, cols, CHUNK: tl.constexpr):
    """Return count, mean and biased variance of a span from its partial moments."""
    count, mean, variance = _merge(part, span, spans, splits, C, cols, 1, CHUNK)
    return tl.sum(tl.sum(count, 1), 0), tl.sum(mean, 0), tl.sum(variance, 0)


@triton.jit
def _store_moments(stat, span, count, mean, variance, C, cols):
    at = stat + span * 3 * C + cols
    tl.store(at, mean, mask=cols < C)
    tl.store(at + C, variance, mask=cols < C)
    tl.store(at + 2 * C, tl.zeros_like(mean) + count, mask=cols < C)


@_kernel
def merge_spans(part, stat, splits, C, COLS: tl.constexpr, UNIT: tl.constexpr, CHUNK: tl.constexpr):
    """Write the mean, biased variance and count of each span: G x 3 x C."""
    C *= UNIT
    cols = tl.program_id(0) * COLS + tl.arange(0, COLS)
    span = _wide(tl.program_id(1))
    spans = tl.num_programs(1)
    count, mean, variance = _merge_one(part, span, spans, splits, C, cols, CHUNK)
    _store_moments(stat, span, count, mean, variance, C, cols)


@triton.jit
def _affine(inverse, weight, bias, C, cols, AFFINE: tl.constexpr):
    """Return gain and offset of x minus its mean."""
    gain = inverse
    offset = tl.zeros_like(inverse)
    if AFFINE:
        gain *= tl.load(weight + cols, mask=cols < C, other=0.0).to(tl.float32)
        offset = tl.load(bias + cols, mask=cols < C, other=0.0).to(tl.float32)
    return gain, offset


@_kernel
def normalise_rows(
    x, other, y, part, stat, sums, weight, bias,
    rows, last, per, splits, C, eps,
    SUM: tl.constexpr, RELU: tl.constexpr, AFFINE: tl.constexpr, COUNT: tl.constexpr,
    WHOLE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, UNIT: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Write y, and the mean, biased variance and count of each span: G x 3 x C.

    With COUNT the mean and unbiased variance of every span are added to `sums`, 2 x C. With WHOLE a
    program has all rows of its span and reads them twice, the second time backwards: the last ones
    are in the cache; COUNT then writes to `part`, G x 2 x C. Otherwise moments come from `part`.
    """
    C *= UNIT
    program = tl.program_id(0)
    block = tl.program_id(1)
    span = _wide(tl.program_id(2))
    cols = block * COLS + tl.arange(0, COLS)
    known = cols < C
    spans = tl.num_programs(2)
    base = span * rows * C
    start = program * per
    end = tl.minimum(start + per, _rows_of_span(span, rows, last))
    if WHOLE:
        count, mean, deviations = _moments(x + base, start, end, C, cols, ROWS, COLS)
        variance = _relu(deviations / count)
    else:
        count, mean, variance = _merge_one(part, span, spans, splits, C, cols, CHUNK)
    # Rounded to nearest, as in PyTorch; Triton's default square root is approximate.
    inverse = 1.0 / tl.sqrt_rn((variance + eps).to(tl.float32))
    # All programs of a span have the same moments; one writes them.
    if program == 0:
        _store_moments(stat, span, count, mean, variance, C, cols)
        if COUNT:
            mean_sum = mean
            variance_sum = variance * (count / (count - 1.0))
            if WHOLE:
                tl.store(part + span * 2 * C + cols, mean_sum, mask=known)
                tl.store(part + span * 2 * C + C + cols, variance_sum, mask=known)
            elif span == 0:
                # The first span adds up the moments of all, in their order: the same bits each
                # time.
                for other_span in range(1, spans, 4):
                    num_of, mean_of, variance_of = _merge(
                        part, other_span, spans, splits, C, cols, 4, CHUNK // 4
                    )
                    inside = (other_span + tl.arange(0, 4) < spans)[:, None]
                    mean_sum += tl.sum(tl.where(inside, mean_of, 0.0), 0)
                    variance_of *= num_of / (num_of - 1.0)
                    variance_sum += tl.sum(tl.where(inside, variance_of, 0.0), 0)
                mean_sum += tl.load(sums + cols, mask=known, other=0.0)
                tl.store(sums + cols, mean_sum, mask=known)
                variance_sum += tl.load(sums + C + cols, mask=known, other=0.0)
                tl.store(sums + C + cols, variance_sum, mask=known)
    gain, offset = _affine(inverse, weight, bias, C, cols, AFFINE)
    num_steps = tl.cdiv(end - start, ROWS)
    for step in range(num_steps):
        # Backwards: the rows that were read last are still in the cache.
        row = start + (num_steps - 1 - step) * ROWS
        values, inside = _load(x + base, row, end, C, cols, ROWS)
        values = (values - mean[None, :]) * gain[None, :] + offset[None, :]
        if SUM:
            shortcut, _ = _load(other + base, row, end, C, cols, ROWS)
            values += shortcut
        if RELU:
            values = _relu(values)
        _store(y + base, values, row, C, cols, inside, ROWS)


@triton.jit
def _scales(stat, span, weight, bias, C, cols, eps, AFFINE: tl.constexpr):
    """Return the mean of a span, one over its deviation, and gain and offset of its result."""
    mean = tl.load(stat + span * 3 * C + cols, mask=cols < C, other=0.0)
    variance = tl.load(stat + span * 3 * C + C + cols, mask=cols < C, other=0.0)
    inverse = 1.0 / tl.sqrt_rn((variance + eps).to(tl.float32))
    gain, offset = _affine(inverse, weight, bias, C, cols, AFFINE)
    return mean, inverse, gain, offset


@triton.jit
def _before_relu(
    dy, x, y, row, end, C, cols, mean, gain, offset,
    SUM: tl.constexpr, RELU: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Return dz, zero where the ReLU's result is, x minus its mean, and which rows are inside."""
    grad, inside = _load(dy, row, end, C, cols, ROWS)
    values, _ = _load(x, row, end, C, cols, ROWS)
    values -= mean[None, :]
    if RELU:
        # With a sum, x alone does not tell where the ReLU was 0. Without, it is computed again as
        # in the forward pass, which takes less time than reading y.
        if SUM:
            result, _ = _load(y, row, end, C, cols, ROWS)
        else:
            result = values * gain[None, :] + offset[None, :]
        grad = tl.where(result <= 0.0, 0.0, grad)  # that of a NaN stays
    return grad, values, inside


@triton.jit
def _gradient_sums(
    dy, x, y, dz, start, end, C, cols, mean, gain, offset,
    SUM: tl.constexpr, RELU: tl.constexpr, STORE: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Return the sums of dz and of dz times x minus its mean; with STORE write dz."""
    first = _fold(tl.zeros((ROWS, COLS), tl.float32), ROWS, COLS)
    second = _fold(tl.zeros((ROWS, COLS), tl.float32), ROWS, COLS)
    for row in range(start, end, ROWS):
        grad, values, inside = _before_relu(
            dy, x, y, row, end, C, cols, mean, gain, offset, SUM, RELU, ROWS
        )
        if STORE:
            _store(dz, grad, row, C, cols, inside, ROWS)
        first += _fold(grad, ROWS, COLS)
        second += _fold(grad * values, ROWS, COLS)
    return tl.sum(first, 0), tl.sum(second, 0)


@_kernel
def gradient_sums(
    dy, x, y, dz, part, stat, weight, bias,
    rows, last, per, C, eps,
    SUM: tl.constexpr, RELU: tl.constexpr, AFFINE: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Write the sums of dz and of dz times the normalised x, over `per` rows: G x P x 2 x C.

    dz is the gradient before the ReLU, which is zero where the result is. With SUM it is the
    gradient of the shortcut too, and is written.
    """
    C *= UNIT
    split = tl.program_id(0)
    block = tl.program_id(1)
    span = _wide(tl.program_id(2))
    cols = block * COLS + tl.arange(0, COLS)
    known = cols < C
    mean, inverse, gain, offset = _scales(stat, span, weight, bias, C, cols, eps, AFFINE)
    base = span * rows * C
    start = split * per
    end = tl.minimum(start + per, _rows_of_span(span, rows, last))
    first, second = _gradient_sums(
        dy + base, x + base, y + base, dz + base, start, end, C, cols, mean, gain, offset,
        SUM, RELU, SUM, ROWS, COLS,
    )  # fmt: skip
    part += (span * tl.num_programs(0) + split) * 2 * C + cols
    tl.store(part, first, mask=known)
    tl.store(part + C, second * inverse, mask=known)


@triton.jit
def _add(part, splits, C, cols, CHUNK: tl.constexpr):
    """Return two sums of `splits` partial sums each."""
    which = tl.arange(0, CHUNK)
    at = part + (which * 2 * C)[:, None] + cols[None, :]
    first = tl.zeros((CHUNK, cols.shape[0]), tl.float32)
    second = tl.zeros((CHUNK, cols.shape[0]), tl.float32)
    for split in range(0, splits, CHUNK):
        inside = (which < splits - split)[:, None] & (cols < C)[None, :]
        first += tl.load(at + _wide(split) * 2 * C, mask=inside, other=0.0)
        second += tl.load(at + _wide(split) * 2 * C + C, mask=inside, other=0.0)
    return tl.sum(first, 0), tl.sum(second, 0)


@_kernel
def gradient_rows(
    dy, x, y, dz, dx, part, stat, weight, bias, affine,
    rows, last, per, splits, C, eps,
    SUM: tl.constexpr, RELU: tl.constexpr, AFFINE: tl.constexpr, COUNT: tl.constexpr,
    WHOLE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, UNIT: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Write the gradient of x, and with COUNT those of bias and weight over all spans: 2 x C.

    With WHOLE a program has all rows of its span, writes its sums to `part`, G x 2 x C, and reads
    the rows again, backwards. Otherwise it adds the sums in `part`. With SUM dz is written too.
    """
    C *= UNIT
    program = tl.program_id(0)
    block = tl.program_id(1)
    span = _wide(tl.program_id(2))
    cols = block * COLS + tl.arange(0, COLS)
    known = cols < C
    mean, inverse, gain, offset = _scales(stat, span, weight, bias, C, cols, eps, AFFINE)
    count = tl.load(stat + span * 3 * C + 2 * C + cols, mask=known, other=1.0)
    base = span * rows * C
    start = program * per
    end = tl.minimum(start + per, _rows_of_span(span, rows, last))
    if WHOLE:
        first, second = _gradient_sums(
            dy + base, x + base, y + base, dz + base, start, end, C, cols, mean, gain, offset,
            SUM, RELU, STORE=False, ROWS=ROWS, COLS=COLS,
        )  # fmt: skip
        second *= inverse
        tl.store(part + span * 2 * C + cols, first, mask=known)
        tl.store(part + span * 2 * C + C + cols, second, mask=known)
    else:
        first, second = _add(part + span * splits * 2 * C, splits, C, cols, CHUNK)
    if COUNT:
        # The first program adds to its own span's sums those of all others.
        if (program == 0) & (span == 0):
            others = splits * (tl.num_programs(2) - 1)
            bias_grad, weight_grad = _add(part + splits * 2 * C, others, C, cols, CHUNK)
            tl.store(affine + cols, first + bias_grad, mask=known)
            tl.store(affine + C + cols, second + weight_grad, mask=known)
    # dx = gain (dz - mean(dz) - y mean(dz y)), with y = (x - mean) inverse (arXiv:1502.03167,
    # section 3), as one multiplication and addition for each value.
    slope = -gain * inverse * second / count
    level = -gain * first / count
    num_steps = tl.cdiv(end - start, ROWS)
    for step in range(num_steps):
        row = start + (num_steps - 1 - step) * ROWS
        grad, values, inside = _before_relu(
            dy + base, x + base, y + base, row, end, C, cols, mean, gain, offset, SUM, RELU, ROWS
        )
        if SUM:
            _store(dz + base, grad, row, C, cols, inside, ROWS)
        grad = grad * gain[None, :] + (values * slope[None, :] + level[None, :])
        _store(dx + base, grad, row, C, cols, inside, ROWS)
