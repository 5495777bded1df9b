"""Translation of decoded images, on the device, after any decoder."""

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import closing

import torch
from torch import Tensor

from largebatch.data.transfer import Transfer
from largebatch.data.types import Batches, Decode, IntArray, Request


def translated(decode: Decode, requests: Iterable[Request]) -> Batches:
    """Yield the batches of the requests, with their images moved by `Request.shifts`."""
    shifts: deque[IntArray | None] = deque()  # of the requests that the decoder reads ahead

    def noted() -> Iterator[Request]:
        for request in requests:
            shifts.append(request.shifts)
            yield request

    with closing(decode(noted())) as batches:
        for batch in batches:
            shift = shifts.popleft()
            if shift is None:
                yield batch
            else:
                (moves,) = Transfer(batch.images.device).send(torch.from_numpy(shift))
                yield batch._replace(images=translate(batch.images, moves))


def translate(images: Tensor, shifts: Tensor) -> Tensor:
    """Return N x C x H x W images moved down and right by `shifts`, N x 2, filled by reflection.

    >>> image = torch.arange(4.0).view(1, 1, 1, 4)
    >>> translate(image, torch.tensor([[0, 1]])).flatten().tolist()
    [1.0, 0.0, 1.0, 2.0]
    """
    channels_last = images.is_contiguous(memory_format=torch.channels_last)
    order = torch.channels_last if channels_last else torch.contiguous_format
    rows = _sources(shifts[:, 0], num_pixels=images.shape[2])[:, None, :, None]
    columns = _sources(shifts[:, 1], num_pixels=images.shape[3])[:, None, None, :]
    numbers = torch.arange(len(images), device=images.device).view(-1, 1, 1, 1)
    channels = torch.arange(images.shape[1], device=images.device).view(1, -1, 1, 1)
    return images[numbers, channels, rows, columns].contiguous(memory_format=order)


def _sources(shifts: Tensor, *, num_pixels: int) -> Tensor:
    """Return N x num_pixels places to read from, reflected at the first and the last pixel."""
    last = num_pixels - 1
    places = torch.arange(num_pixels, device=shifts.device) - shifts[:, None]
    return last - (last - places.abs()).abs()
