"""Mixup and CutMix of pairs: pure functions of the seed and of the pair's number in the run.

The images at positions 2k and 2k + 1 of the run are pair k. Both have the same share and box, as
with timm's `mixup_mode: pair`: whether and how they are mixed does not depend on the batch that
they are in, so not on the number of workers. timm's own partners are mirrored places of a device
batch, which change with its size.

`draw_pairs` draws on the host, `mix` applies on the device of the batch. Beta's distribution is
computed by a formula from two uniform numbers: a rejection method takes an unknown number of them,
and NumPy does not guarantee those of `Generator.beta` between versions.
"""

import numpy as np
import torch
from torch import Tensor

from largebatch import accelerator
from largebatch.data.decoders.prefetch import Transfer
from largebatch.data.order import Stream, random_words, uniform
from largebatch.data.types import Batch, FloatArray, IntArray, MixedPairs
from largebatch.recipe.data import Mix


def draw_pairs(section: Mix, positions: range, *, seed: int, classes: int) -> MixedPairs:
    """Return the numbers of the pairs at these positions of the run.

    Raises ValueError if the positions are not whole pairs.
    """
    if positions.start % 2 or len(positions) % 2:
        raise ValueError(
            f"positions {positions.start} to {positions.stop} are not whole pairs of images: a "
            "batch of mixed images begins at an even position and has an even size"
        )
    first = positions.start // 2
    num_pairs = len(positions) // 2
    # A block of four words for each pair, used or not: a pair finds its own block.
    words = random_words(seed, Stream.MIX, block=first, num_blocks=num_pairs)
    u_mixed, u_kind, u_radius, u_angle = uniform(words).T
    is_cut = u_kind < section.cutmix_part
    concentration = np.where(is_cut, section.cutmix or 1.0, section.mixup or 1.0)
    shares = symmetric_beta(concentration, u_radius, u_angle)
    words = random_words(seed, Stream.MIX_BOX, block=first, num_blocks=num_pairs)
    return MixedPairs(
        shares=np.where(u_mixed < section.probability, shares, 1.0),
        is_cut=is_cut,
        centers=uniform(words)[:, :2],
        classes=classes,
    )


def symmetric_beta(concentration: FloatArray, u: FloatArray, v: FloatArray) -> FloatArray:
    """Return numbers distributed as Beta(a, a), from uniform ones in [0, 1), for any a > 0.

    With 2a degrees of freedom, sqrt(2a (u^(-1/a) - 1)) cos(2 pi v) has Student's t distribution
    (Bailey 1994, Mathematics of Computation 62, p. 779), and then (1 + t / sqrt(2a + t^2)) / 2 has
    this one (Devroye 1996, "Random variate generation in one line of code"). Written in u^(1/a)
    nothing overflows for a small a. Results are multiples of 1e-16: smaller ones are 0.

    >>> symmetric_beta(np.array([1.0, 0.2]), np.array([0.75, 0.75]), np.array([0.0, 0.5]))
    array([9.33012702e-01, 2.44200259e-04])
    """
    power = (1 - u) ** (1 / concentration)  # 1 - u is never 0
    cosine = np.cos(2 * np.pi * v)
    squared = (1 - power) * cosine**2
    distances: FloatArray = np.sqrt(squared / (power + squared))  # from the middle, 0 to 1
    return (1 + np.copysign(distances, cosine)) / 2


def boxes_of(pairs: MixedPairs, *, height: int, width: int) -> IntArray:
    """Return top, left, bottom and right of the pixels that each pair exchanges, N / 2 x 4.

    The box has the shape of the image, its centre is uniform over the image, and what is outside is
    cut off (Yun et al. 2019, arXiv:1905.04899, section 3.1; rounded as timm does). It is empty for
    a pair that exchanges no pixels.
    """
    parts = np.where(pairs.is_cut, np.sqrt(1 - pairs.shares), 0.0)
    edges = []
    for axis, side in enumerate((height, width)):
        lengths = (side * parts).astype(np.int64)
        centers = (side * pairs.centers[:, axis]).astype(np.int64)
        begins = np.clip(centers - lengths // 2, 0, side)
        ends = np.clip(centers + (lengths + 1) // 2, 0, side)
        edges.append((begins, ends))
    (tops, bottoms), (lefts, rights) = edges
    return np.stack([tops, lefts, bottoms, rights], axis=-1)


def shares_of(pairs: MixedPairs, *, height: int, width: int) -> FloatArray:
    """Return the share of an image in its own place, N / 2: that of its class in its label.

    For CutMix it is the part of the pixels that are not exchanged.
    """
    tops, lefts, bottoms, rights = boxes_of(pairs, height=height, width=width).T
    areas = (bottoms - tops) * (rights - lefts)
    return np.where(pairs.is_cut, 1 - areas / (height * width), pairs.shares)


def mix(batch: Batch, pairs: MixedPairs) -> Batch:
    """Mix the images of a batch in place; return them with the shares of the classes as labels.

    Pixels that are exchanged are copied. Blended ones and the shares are computed in float32, or in
    the type of the images if that is longer, and pixels are then rounded once. The host does not
    wait for a device, whose pixels have the same bits.
    """
    images = batch.images
    device = images.device
    height, width = images.shape[-2:]
    shares = shares_of(pairs, height=height, width=width)
    # What an image gets of its partner. Nothing where a box is exchanged: each keeps its own rest.
    parts = np.where(pairs.is_cut, 0.0, 1 - shares)
    boxes = boxes_of(pairs, height=height, width=width)
    dtype = torch.promote_types(images.dtype, torch.float32)
    # One copy for all numbers of the batch; those of a box are whole, and exact in both types.
    table = torch.from_numpy(np.column_stack([shares, parts, boxes])).to(dtype)
    (sent,) = Transfer(device).send(table)
    first = images[0::2]
    second = images[1::2]
    if accelerator.is_remote(device):
        if parts.any():
            _blend(first, second, sent[:, 1].view(-1, 1, 1, 1), dtype)
        if pairs.is_cut.any():
            inside = _inside(sent[:, 2:], height=height, width=width)
            exchanged = torch.where(inside, second, first)
            torch.where(inside, first, second, out=second)
            first.copy_(exchanged)
    else:
        # Pair by pair a processor touches no other pixels, and those of a pair stay in its cache.
        for pair, (part, box) in enumerate(zip(parts.tolist(), boxes.tolist(), strict=True)):
            if part:
                _blend(first[pair], second[pair], part, dtype)
            top, left, bottom, right = box
            if bottom > top and right > left:
                there = (slice(None), slice(top, bottom), slice(left, right))
                replaced = first[pair][there].clone()
                first[pair][there] = second[pair][there]
                second[pair][there] = replaced
    return Batch(images, shares_of_classes(batch.labels, sent[:, 0], classes=pairs.classes))


def _blend(first: Tensor, second: Tensor, part: Tensor | float, dtype: torch.dtype) -> None:
    """Replace this part of each image by its partner, in place."""
    # Not by torch.lerp, whose kernels round differently for other shapes: the same pair would
    # differ in its last bits between device batches. A sum with a longer type is rounded once.
    change = (second.to(dtype) - first).mul_(part)
    first += change
    second -= change


def shares_of_classes(labels: Tensor, shares: Tensor, *, classes: int) -> Tensor:
    """Return the share of each class in each image, N x K, for class numbers and shares of pairs.

    >>> shares_of_classes(torch.tensor([0, 2]), torch.tensor([0.75]), classes=3).tolist()
    [[0.75, 0.0, 0.25], [0.25, 0.0, 0.75]]
    """
    own = shares.repeat_interleave(2)[:, None]
    # Comparisons, because F.one_hot makes the host wait for a GPU, which it asks for the largest
    # label; and a scatter of two shares of one class would add them in any order.
    is_label = labels[:, None] == torch.arange(classes, device=labels.device)
    is_partners = is_label.unflatten(0, (-1, 2)).flip(1).flatten(0, 1)
    rows: Tensor = own * is_label + (1 - own) * is_partners
    return rows


def _inside(boxes: Tensor, *, height: int, width: int) -> Tensor:
    """Return which pixels are in the boxes, N / 2 x 1 x H x W."""
    tops, lefts, bottoms, rights = boxes.view(-1, 4, 1, 1, 1).unbind(1)
    rows = torch.arange(height, device=boxes.device).view(-1, 1)
    columns = torch.arange(width, device=boxes.device)
    return (tops <= rows) & (rows < bottoms) & (lefts <= columns) & (columns < rights)
