"""Types shared by the modules of data/ and by training: requests, views and batches."""

from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from largebatch.recipe.data import Interpolation, Order, Triple

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]
Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


class Batch(NamedTuple):
    """One device batch, on the worker's device."""

    images: Tensor  # N x C x H x W, normalised, in the type of the view
    labels: Tensor
    """Class numbers, int64, N; of a batch with mixed images the share of each class in each image,
    of a floating type, N x K. F.cross_entropy takes both."""


Batches = Generator[Batch, None, None]
"""Batches for the model; closing the generator releases threads, files and device memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operations:
    """Operations on the pixels of a batch of N images, L for each, applied one after the other."""

    kinds: IntArray  # values of operations.Operation, N x L
    strengths: FloatArray  # in the unit of the operation, N x L
    filters: IntArray  # values of operations.Filter, N x L; geometry uses them
    centers: FloatArray  # centres of cut-out squares, down and right, in pixels, N x L x 2
    fill: tuple[int, int, int]  # colour of pixels from outside of the image, 0 .. 255
    shear_axis: float  # row or column, in pixels, that a shear leaves in its place
    view: "View"  # of the model: the images are normalised for it after their operations


class Erasures(NamedTuple):
    """Boxes to erase in the images of a batch: `erasing.erase` fills them.

    Images have different numbers of boxes, so each box names its row of the batch.
    """

    rows: IntArray  # row of the batch, K
    boxes: FloatArray
    """Height and width as parts of the image's side; top and left as parts of what they leave of
    the side, K x 4."""

    keys: IntArray | None
    """Two 32-bit keys of the noise in each box, K x 2; None: the mean colour."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedPairs:
    """The numbers that mix the pairs of a batch: images 2k and 2k + 1 with each other."""

    shares: FloatArray
    """Drawn share of an image in its own place, N / 2; 1 for a pair that is not mixed. The box of
    CutMix is cut off at the border, so fewer pixels than that may be exchanged."""

    is_cut: BoolArray
    """True for a pair that exchanges a box (CutMix), False for a blended one (Mixup), N / 2."""

    centers: FloatArray
    """Centre of the box from the top and the left, in parts of height and width, N / 2 x 2."""

    classes: int
    """Number of classes, K."""


@dataclass(frozen=True, slots=True, eq=False)
class TrainingOrder:
    """What the order of training depends on, for one host."""

    seed: int
    num_samples: int  # length of the index
    trained: IntArray | None  # rows that are trained on; None for all
    repeats: int
    order: Order | None
    """Chunks and windows of the recipe; None for none."""

    device_batch: int
    ranks: range
    """Workers of this host among `workers`."""

    workers: int

    @property
    def num_trained(self) -> int:
        """Length of an epoch without repeats."""
        return self.num_samples if self.trained is None else len(self.trained)

    def is_own(self, positions: IntArray) -> BoolArray:
        """Return True for the positions of this host's workers.

        With repeats, and in a schedule of batches, this is an estimate: all or nearly all.
        """
        if self.repeats > 1 or len(self.ranks) == self.workers:
            return np.ones(len(positions), dtype=np.bool_)
        worker = positions // self.device_batch % self.workers
        own: BoolArray = (worker >= self.ranks.start) & (worker < self.ranks.stop)
        return own


@dataclass(frozen=True, slots=True)
class HostCache:
    """Where a host keeps what it has read from a bucket."""

    folder: Path
    share: int | None  # bytes that one worker may keep; None: no limit
    worker: int  # number of this worker on its host
    workers: int  # number of workers on the host
    order: TrainingOrder | None = None
    """Order in which images of the index are trained on; None: not known."""


@dataclass(frozen=True, slots=True)
class Request:
    """One device batch for a decoder: the images, and the numbers drawn for each of them.

    A decoder applies samples, boxes and flips and decides nothing itself, so all decoders, on any
    number of workers, show the model the same pixels. It yields the request with its batch:
    `augment.augment` applies the other numbers on the device.
    """

    samples: IntArray  # rows of the index, N
    boxes: IntArray  # top, left, height and width of the part to resize, in source pixels, N x 4
    flips: BoolArray  # True if an image is mirrored left to right after resizing, N
    shifts: IntArray | None = None
    """Pixels by which the decoded images are moved down and right, N x 2; None: not moved."""

    operations: Operations | None = None
    """Operations on the pixels of the decoded images, which then are bytes and are normalised
    afterwards; None: the decoder has normalised them."""

    erasures: Erasures | None = None
    """Boxes that are erased; None: none in any image."""

    mix: MixedPairs | None = None
    """How the images of each pair are mixed; None: no image is, and labels are class numbers."""

    start: int | None = None
    """Position in the run of the first image; None for clean images."""


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """How the requested part of an image becomes the model's input."""

    image_size: int  # side of the square input in pixels
    mean: Triple
    std: Triple  # mean and standard deviation of red, green and blue on the scale 0 .. 1
    interpolation: Interpolation

    channels_last: bool = False  # True for torch's channels_last memory format
    dtype: torch.dtype = torch.float32
    """Type of the images. Pixels are computed in float32 and rounded once at the end. uint8: whole
    numbers from 0 to 255, which are not normalised; `mean` is 0 and `std` 1 / 255."""

    def of_bytes(self) -> "View":
        """Return the view whose images are normalised later."""
        return replace(
            self,
            mean=(0.0, 0.0, 0.0),
            std=(1 / 255, 1 / 255, 1 / 255),
            channels_last=True,  # the order that Pillow and the threads of decoders use
            dtype=torch.uint8,
        )

    def pixel_scale(self) -> Tensor:
        """Return the mean and the deviation of pixels of 0 .. 255: 2 x 3 x 1 x 1."""
        return torch.tensor([self.mean, self.std]).mul_(255).view(2, 3, 1, 1)


class Resources(NamedTuple):
    """Device, threads and limits that a worker decodes with."""

    device: torch.device  # device of the batches
    threads: int  # number of decoding threads
    batch_size: int  # number of images in the largest request
    reads: int = 8  # maximum number of images read at the same time


DecodedBatches = Generator[tuple[Request, Batch], None, None]
"""Batches of a decoder, each with its request, less the numbers that the decoder has applied.

The decoder does not read a batch again: `augment` changes its images in place.

A batch never parts from its request: decoders and prefetchers work several batches ahead, and a
list beside them would have to count along.
"""

Decode = Callable[[Iterable[Request]], DecodedBatches]
"""Decodes the requests in order. It can be called again once all are consumed."""
