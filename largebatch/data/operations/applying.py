"""Where the operations of a batch are applied: on the host image by image, on a device together."""

from concurrent.futures import Executor
from dataclasses import replace
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from largebatch import accelerator
from largebatch.data.decoders.prefetch import Transfer
from largebatch.data.operations import batched, pillow
from largebatch.data.types import Bytes, Floats, Operations, View
from largebatch.recipe.data import Triple

AT_A_TIME = 4  # number of images in one thread's task; one takes about a millisecond


def of_values(view: View) -> View:
    """Return the view with whose decoders images are values from 0 to 255, as `operate` needs."""
    return replace(view, mean=(0.0, 0.0, 0.0), std=(1 / 255, 1 / 255, 1 / 255))


def operate(images: Tensor, operations: Operations, pool: Executor | None = None) -> Tensor:
    """Return N x 3 x H x W images after their operations, normalised.

    `images` are whole numbers from 0 to 255 of a floating type, which holds them exactly; the
    result has that type and its order of memory. On the host the threads of `pool` share the
    images.
    """
    if accelerator.is_remote(images.device):
        changed = batched.apply(images.round().to(torch.uint8), operations)
        center, spread = _scale(operations.mean, operations.std, images.device)
        result = changed.sub(center).div_(spread)  # in float32
    else:
        result = _on_host(images, operations, pool)
    channels_last = images.is_contiguous(memory_format=torch.channels_last)
    order = torch.channels_last if channels_last else torch.contiguous_format
    return result.to(images.dtype).contiguous(memory_format=order)


def _on_host(images: Tensor, operations: Operations, pool: Executor | None) -> Tensor:
    result = torch.empty_like(images, dtype=torch.float32)
    scale = _scale(operations.mean, operations.std, images.device)
    center, spread = (numbers.numpy() for numbers in scale)
    source = images.float().numpy()
    target = result.numpy()

    def change(rows: range) -> None:
        for row in rows:
            changed = pillow.apply(_bytes(source[row]), operations, row)
            np.subtract(changed.transpose(2, 0, 1), center, out=target[row])
            np.divide(target[row], spread, out=target[row])

    firsts = range(0, len(images), AT_A_TIME)
    parts = [range(first, min(first + AT_A_TIME, len(images))) for first in firsts]
    if pool is None:
        change(range(len(images)))
    else:
        for _ in pool.map(change, parts):
            pass  # raises the error of a thread
    return result


def _bytes(image: Floats) -> Bytes:
    pixels = np.empty((*image.shape[1:], 3), dtype=np.uint8)
    np.copyto(pixels, np.rint(image.transpose(1, 2, 0)), casting="unsafe")
    return pixels


@lru_cache(maxsize=8)
def _scale(mean: Triple, std: Triple, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the mean and the deviation of values from 0 to 255 on a device, 3 x 1 x 1 each."""
    view = View(image_size=1, mean=mean, std=std, interpolation="bilinear")
    (scale,) = Transfer(device).send(view.pixel_scale())
    center, spread = scale
    return center, spread
