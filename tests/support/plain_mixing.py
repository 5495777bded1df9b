"""Mixup and CutMix with a loop over images, and numbers drawn one by one from Philox.

Nothing of largebatch is used here, so that one mistake cannot be on both sides of a comparison.
"""

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

MIXUP, CUTMIX, PROBABILITY, SWITCH = 0.4, 1.0, 0.9, 0.6
"""The keys of data.mix that are drawn for."""


class Pair(NamedTuple):
    """The numbers of a pair: its share, and the box that is exchanged or None."""

    share: float
    box: tuple[range, range] | None


class Label(NamedTuple):
    """What a mixed image shows: an image of one class in this share, and one of another class."""

    share: float
    own: int
    partners: int


def pair_by_hand(number: int, *, seed: int, height: int, width: int) -> Pair:
    """Draw a pair: four numbers from one block of words, and two of another for the box."""

    def numbers(stream: int) -> list[float]:
        philox = np.random.Philox(key=[seed, stream], counter=[number, 0, 0, 0])
        return [(int(philox.random_raw()) >> 11) / 2**53 for _ in range(4)]

    mixes, chooses, u, v = numbers(11)
    if mixes >= PROBABILITY:
        return Pair(1.0, None)
    is_cut = chooses < SWITCH
    a = CUTMIX if is_cut else MIXUP
    t = math.sqrt(2 * a * ((1 - u) ** (-1 / a) - 1)) * math.cos(2 * math.pi * v)
    share = (1 + t / math.sqrt(2 * a + t * t)) / 2
    if not is_cut:
        return Pair(share, None)
    down, right, *_ = numbers(12)
    sides = []
    for side, center in ((height, int(height * down)), (width, int(width * right))):
        length = int(side * math.sqrt(1 - share))
        inside = range(center - length // 2, center + (length + 1) // 2)
        sides.append(range(max(0, inside.start), min(side, inside.stop)))
    rows, columns = sides
    return Pair(1 - len(rows) * len(columns) / (height * width), (rows, columns))


def mixed_by_hand(
    images: Tensor,
    labels: Tensor,
    *,
    first: int,
    seed: int,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, list[Label]]:
    """Return the mixed images of the positions from `first` on, and their labels.

    Images are computed in `dtype`, and shares are rounded to it.
    """
    before = images.to(dtype)
    mixed = before.clone()
    shown = []
    height, width = images.shape[2:]
    for row in range(len(images)):
        position = first + row
        partner = row + 1 if position % 2 == 0 else row - 1
        pair = pair_by_hand(position // 2, seed=seed, height=height, width=width)
        share = torch.tensor(pair.share, dtype=dtype)
        if pair.box is not None:
            rows, columns = (slice(side.start, max(side.start, side.stop)) for side in pair.box)
            mixed[row, :, rows, columns] = before[partner, :, rows, columns]
        else:
            # In this order, which rounds in float32 as a run does.
            part = torch.tensor(1 - pair.share, dtype=dtype)
            mixed[row] = before[row] + (before[partner] - before[row]) * part
        shown.append(Label(share.item(), int(labels[row]), int(labels[partner])))
    return mixed, shown
