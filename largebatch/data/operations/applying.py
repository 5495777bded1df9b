"""Where the operations of a batch are applied: on the host image by image, on a device together."""

from concurrent.futures import Executor
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from largebatch import accelerator
from largebatch.data.decoders.prefetch import Transfer
from largebatch.data.operations import batched, pillow
from largebatch.data.types import Operations, View

AT_A_TIME = 4  # number of images in one thread's task; one takes about a millisecond


def operate(images: Tensor, operations: Operations, pool: Executor | None = None) -> Tensor:
    """Return N x 3 x H x W bytes after their operations, normalised for the model.

    On the host the threads of `pool` share the images.
    """
    view = operations.view
    order = torch.channels_last if view.channels_last else torch.contiguous_format
    center, spread = _scale(view, images.device)
    if accelerator.is_remote(images.device):
        normalised = batched.apply(images, operations).sub(center).div_(spread)  # in float32
        return normalised.to(view.dtype).contiguous(memory_format=order)
    result = torch.empty(images.shape, memory_format=order)
    source = images.permute(0, 2, 3, 1).contiguous().numpy()  # as Pillow has them: N x H x W x 3
    target = result.numpy()
    means = center.flatten().tolist()
    deviations = spread.flatten().tolist()
    changes = pillow.Changes(operations, height=images.shape[2], width=images.shape[3])

    def change(first: int) -> None:
        for row in range(first, min(first + AT_A_TIME, len(images))):
            changed = changes.apply(source[row], row)
            # By channel: an inner loop over three of them would take several times as long.
            for channel, plane in enumerate(target[row]):
                np.subtract(changed[..., channel], np.float32(means[channel]), out=plane)
                np.divide(plane, np.float32(deviations[channel]), out=plane)

    firsts = range(0, len(images), AT_A_TIME)
    if pool is None:
        for first in firsts:
            change(first)
    else:
        list(pool.map(change, firsts))  # raises the error of a thread
    return result.to(view.dtype)


@lru_cache(maxsize=8)
def _scale(view: View, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the mean and the deviation of values from 0 to 255 on a device, 3 x 1 x 1 each."""
    (scale,) = Transfer(device).send(view.pixel_scale())
    center, spread = scale
    return center, spread
