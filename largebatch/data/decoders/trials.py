"""Trials of the kernel that crops cached images: the same bits as PyTorch's operations."""

from collections.abc import Collection, Iterator, Mapping
from functools import partial

import numpy as np
import torch
from torch import Tensor

from largebatch import accelerator
from largebatch.data.decoders.pixel_cache import Uploaded, decode_on_device
from largebatch.data.types import Request, View
from largebatch.proof import CROPS, Trial, Trials, deciding

_KINDS = ((False, torch.float32), (True, torch.float32), (True, torch.uint8))
"""Memory format, True for channels last, and type of the images; bytes are for operations."""

_IMAGES = 64  # cached images, of which each batch has some several times


def trials(device: torch.device, _: Mapping[str, object]) -> Trials:
    """Return trials for images of any data set: two sizes, in both orders of memory, and bytes."""

    def make() -> Iterator[Trial]:
        for channels_last, dtype in _KINDS:
            yield from trials_of(
                (40, 36),
                {(32, 28), (32, 32)},
                device,
                channels_last=channels_last,
                dtype=dtype,
            )

    return {CROPS: make}


def trials_of(
    pixels: tuple[int, int],
    batches: Collection[tuple[int, int]],
    device: torch.device,
    *,
    channels_last: bool,
    dtype: torch.dtype,
) -> Iterator[Trial]:
    """Yield a trial for each batch, a number of images and their side, of images of `pixels`.

    A batch whose images are not cut out of the cached ones, but resized, has no kernel.
    """
    height, width = pixels
    accelerator.seed(0, device)
    content = torch.randint(256, (_IMAGES, height, width, 3), device=device, dtype=torch.uint8)
    uploaded = Uploaded(np.zeros(_IMAGES, dtype=np.int64), content)
    draws = np.random.default_rng(0)
    for num, side in sorted(batches):
        if side > min(height, width):
            continue
        view = View(
            image_size=side,
            mean=(0.4, 0.5, 0.6),
            std=(0.2, 0.25, 0.3),
            interpolation="bilinear",
            channels_last=channels_last,
            dtype=dtype,
        )
        if dtype == torch.uint8:
            view = view.of_bytes()
        # Every corner that fits, so that the last rows and columns are read, too.
        corners = draws.integers(0, [height - side + 1, width - side + 1], (num, 2))
        request = Request(
            draws.integers(0, _IMAGES, num),
            np.concatenate([corners, np.full((num, 2), side)], axis=1),
            draws.integers(0, 2, num).astype(np.bool_),
            draws.integers(-min(4, side - 1), min(4, side - 1) + 1, (num, 2)),
        )
        crop = partial(_cropped, uploaded, view, request, device)
        order = "channels last" if channels_last else "channels first"
        kind = "bytes, " if dtype == torch.uint8 else ""
        yield Trial(
            name=f"{num} images of {side} x {side}, {kind}{order}",
            ours=partial(crop, None),
            theirs=partial(crop, "PyTorch's"),
        )


def _cropped(
    uploaded: Uploaded, view: View, request: Request, device: torch.device, refusal: str | None
) -> list[Tensor]:
    with deciding(device, {CROPS: refusal}):
        ((_, batch),) = decode_on_device(uploaded, view, [request])
    return [batch.images]
