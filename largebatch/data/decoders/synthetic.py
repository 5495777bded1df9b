"""Synthetic images: try a recipe, or time training, without any data.

An image is half its class's pattern and half its own noise, both a few random colours interpolated:
a pure function of its number, from which a model can learn the classes.
"""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from largebatch.data.decoders.prefetch import Transfer
from largebatch.data.index.index import Index
from largebatch.data.order import WORDS_PER_BLOCK, Stream, random_words
from largebatch.data.types import (
    Batch,
    Decode,
    DecodedBatches,
    IntArray,
    Request,
    Resources,
    View,
)

SIDE = 8  # side of the grid of colours that an image is interpolated from


def synthetic_index(num_samples: int, classes: int, image_size: int) -> Index:
    """Return an index of square images whose label is their number modulo the number of classes.

    Every worker holds the labels, 10 MB for ImageNet's number of images; nothing else grows.
    """
    sizes = np.broadcast_to(np.int64(image_size), num_samples)
    return Index(
        root=Path("synthetic"),
        classes=tuple(f"class {label}" for label in range(classes)),
        paths=["synthetic"] * num_samples,
        labels=np.arange(num_samples, dtype=np.int64) % classes,
        heights=sizes,
        widths=sizes,
    )


def open_decoder(index: Index, view: View, resources: Resources) -> AbstractContextManager[Decode]:
    """Return a decoder; there is nothing to close."""
    return nullcontext(partial(_decode, index, view, resources.device))


def _decode(
    index: Index, view: View, device: torch.device, requests: Iterable[Request]
) -> DecodedBatches:
    center = torch.tensor(view.mean, device=device).view(3, 1, 1)
    spread = torch.tensor(view.std, device=device).view(3, 1, 1)
    order = torch.channels_last if view.channels_last else torch.contiguous_format
    transfer = Transfer(device)
    for request in requests:
        labels = index.labels[request.samples]
        noise = _colours(Stream.NOISE, request.samples)
        pattern = _colours(Stream.PATTERN, labels)
        colours = torch.from_numpy((pattern + noise) / 2)
        on_host = colours, _placement(index, request), torch.from_numpy(labels)
        whole, placement, classes = transfer.send(*on_host)
        shape = [len(labels), 3, view.image_size, view.image_size]
        # The image is a smooth function, so a box of it is evaluated at the output's pixels;
        # nothing is resized.
        grid = F.affine_grid(placement, shape, align_corners=False)
        images = F.grid_sample(whole, grid, padding_mode="border", align_corners=False)
        images = images.sub_(center).div_(spread).contiguous(memory_format=order)
        yield request, Batch(images.to(view.dtype), classes)


def _colours(stream: Stream, numbers: IntArray) -> np.ndarray:
    """Return N x 3 x SIDE x SIDE values in [0, 1); each image depends on its number alone."""
    blocks = 3 * SIDE * SIDE // WORDS_PER_BLOCK
    words = [random_words(0, stream, block=n * blocks, num_blocks=blocks) for n in numbers.tolist()]
    return (np.stack(words).reshape(-1, 3, SIDE, SIDE) / 2.0**64).astype(np.float32)


def _placement(index: Index, request: Request) -> Tensor:
    """Return N x 2 x 3 matrices from output to image coordinates, both -1 .. 1 edge to edge."""
    sizes = np.stack([index.heights, index.widths], axis=-1)[request.samples]
    scale = request.boxes[:, 2:] / sizes
    shift = 2 * request.boxes[:, :2] / sizes + scale - 1
    scale[request.flips, 1] *= -1
    theta = torch.zeros(len(sizes), 2, 3)
    theta[:, 0, 0], theta[:, 1, 1] = torch.from_numpy(scale.T.astype(np.float32)).flip(0)
    theta[:, :, 2] = torch.from_numpy(shift.astype(np.float32)).flip(1)
    return theta
