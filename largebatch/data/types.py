"""What the modules of data/ meet through, and training with them: requests and batches."""

from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from largebatch.recipe.data import Interpolation, Triple

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


class Batch(NamedTuple):
    """One device batch, on the worker's device."""

    images: Tensor
    """float32, N x C x H x W, normalised; or words, int64, N x T."""

    labels: Tensor
    """int64, N; of words N x T."""


Batches = Generator[Batch, None, None]
"""What a decoder gives; closing it releases threads, files and device memory."""


@dataclass(frozen=True, slots=True)
class Request:
    """One device batch that a decoder is asked for: which images, and which part of each.

    A decoder applies these numbers and decides nothing itself, so two decoders, or one decoder on
    any number of workers, show the model the same pixels.
    """

    samples: IntArray
    """N rows of the index."""

    boxes: IntArray
    """N x 4: top, left, height, width of the part to resize, in source pixels."""

    flips: BoolArray
    """N: mirror left to right after resizing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """How the part of an image that a request names becomes what the model sees."""

    image_size: int
    """Side of the square it is resized to."""

    mean: Triple
    std: Triple
    """Of red, green and blue on the scale 0 .. 1."""

    interpolation: Interpolation

    channels_last: bool = False
    """True if the channels of a pixel lie beside each other in memory, as torch's channels_last."""


class Resources(NamedTuple):
    """The means of a worker to decode."""

    device: torch.device
    """Where batches are used."""

    threads: int
    """Number of threads that decode."""

    batch_size: int
    """Number of images in the largest request."""

    reads: int = 8
    """Number of images read at a time, at most."""


Decode = Callable[[Iterable[Request]], Batches]
"""Gives one batch for each request, in order. It can be called again when all of them are used."""
