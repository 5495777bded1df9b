"""The kernel of `pixel_cache.decode_on_device`, in Triton."""

import triton
import triton.language as tl


@triton.jit
def _reflected(place, size):
    """Return places reflected at the first and the last pixel, as `augment.reflected`."""
    return size - 1 - tl.abs(size - 1 - tl.abs(place))


@triton.jit
def cut_out(
    out, pixels, numbers, scale, height, width, size, num,
    CHANNELS_LAST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write parts of images, mirrored, moved and normalised: num x 3 x size x size.

    They are computed in float32 and rounded to the type of `out`.

    `pixels` are images x height x width x 3 bytes. `numbers` are rows of `num` numbers: image, top,
    left, height and width, mirrored, moved down and right; `scale` three means, then deviations.
    """
    which = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < 3 * size * size
    if CHANNELS_LAST:
        channel, place = at % 3, at // 3
    else:
        channel, place = at // (size * size), at % (size * size)
    numbers += which
    image, top, left = tl.load(numbers), tl.load(numbers + num), tl.load(numbers + 2 * num)
    flip, down, right = (
        tl.load(numbers + 5 * num), tl.load(numbers + 6 * num), tl.load(numbers + 7 * num)
    )  # fmt: skip
    # Where the output pixel comes from: moved back, reflected at the edges, then mirrored.
    row = _reflected(place // size - down, size)
    column = _reflected(place % size - right, size)
    column = tl.where(flip > 0, size - 1 - column, column)
    source = ((image * height + top + row) * width + left + column) * 3 + channel
    value = tl.load(pixels + source, mask=inside, other=0).to(tl.float32)
    value -= tl.load(scale + channel, mask=inside, other=0.0)
    # Rounded division, as PyTorch's; Triton's own is approximate.
    value = tl.div_rn(value, tl.load(scale + 3 + channel, mask=inside, other=1.0))
    tl.store(out + which.to(tl.int64) * 3 * size * size + at, value, mask=inside)
