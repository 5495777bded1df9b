"""Small sets, decoded once: crops, flips and resizing from pixels that are kept as bytes.

The pixels are one file in the user's cache, which all workers of a machine map, so they are in
memory once however many workers there are, and at once the next time. Threads cut and resize them.
"""

import uuid
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from largebatch.contracts import Backend, Batches, IntArray, Request, View
from largebatch.data.filling import Filling, empty_pixels, fill_ahead, finisher
from largebatch.data.index import Index, user_cache
from largebatch.data.reading import open_reader
from largebatch.data.torchvision import start_reading, to_pillow
from largebatch.errors import DataError
from largebatch.pictures import Interpolation

Bytes = npt.NDArray[np.uint8]
Pixels = TypeVar("Pixels", Bytes, Tensor)

LIMIT = 16 * 2**30
"""The most bytes of pixels that one split of a data set may have to be kept."""

EACH = 32
"""How many pictures a thread makes at a time."""


@dataclass(frozen=True, slots=True)
class Kept(Generic[Pixels]):
    """The pixels of all pictures of an index: H x W x 3 bytes each, one after the other."""

    index: Index
    pixels: Pixels
    starts: IntArray
    """Where each picture begins."""

    alike: Pixels | None
    """The same bytes as N x H x W x 3 where all pictures have one size."""

    def part(self, sample: int, box: list[int]) -> Pixels:
        """Return the box of a picture, H x W x 3, without copying."""
        top, left, height, width = box
        if self.alike is not None:
            return self.alike[sample, top : top + height, left : left + width]
        high, wide = int(self.index.heights[sample]), int(self.index.widths[sample])
        start = int(self.starts[sample])
        whole = self.pixels[start : start + high * wide * 3].reshape(high, wide, 3)
        return whole[top : top + height, left : left + width]


def kept(index: Index, pixels: Pixels, starts: IntArray) -> Kept[Pixels]:
    """Put together what `Kept` holds."""
    high, wide = int(index.heights[0]), int(index.widths[0])
    one_size = bool((index.heights == high).all() and (index.widths == wide).all())
    return Kept(index, pixels, starts, pixels.reshape(-1, high, wide, 3) if one_size else None)


def keep(index: Index, *, backend: Backend, threads: int) -> Kept[Bytes]:
    """Decode every picture of an index, unless that has been done before, and map the pixels.

    The first worker of each machine writes the file. Raises DataError with the path of a picture
    that cannot be decoded, or if there are too many pixels to keep.
    """
    sizes = 3 * index.heights * index.widths
    starts = np.concatenate([[0], np.cumsum(sizes)])
    total = int(starts[-1])
    if total > LIMIT:
        raise DataError(
            f"{index.root}: {len(index)} decoded pictures are {total / 1e9:.1f} GB, and data.cache "
            f"keeps at most {LIMIT / 1e9:.1f} GB; decode them each time with data.cache: null, or "
            "make the pictures smaller"
        )
    assert index.digest, "an index that was read has a digest"
    path = user_cache() / "pixels" / f"{index.digest}.rgb"
    if backend.local_rank == 0 and not (path.is_file() and path.stat().st_size == total):
        _write(path, index, threads)
    backend.barrier()
    # Mapped as private, since torch warns of bytes that cannot be written to; nobody writes.
    pixels = np.asarray(np.memmap(path, mode="c", dtype=np.uint8, shape=(total,)))
    return kept(index, pixels, starts)


def _write(path: Path, index: Index, threads: int) -> None:
    """Write the pixels of all pictures to a file that is there whole or not at all."""
    partial = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file:
            for pixels in _decode_all(index, threads):
                file.write(pixels.data)
        partial.replace(path)
    except OSError as error:
        raise DataError(
            f"{path.parent}: decoded pictures cannot be kept there ({error.strerror}); set "
            "XDG_CACHE_HOME to a folder with room, or data.cache to null"
        ) from None
    finally:
        partial.unlink(missing_ok=True)


def _decode_all(index: Index, threads: int) -> Iterator[Bytes]:
    """Give the pixels of every picture in turn; some hundreds are under way at a time."""
    with open_reader() as reader, ThreadPoolExecutor(threads) as pool:

        def decode_one(sample: int) -> Bytes:
            return np.asarray(to_pillow(start_reading(index, sample, reader)))

        for start in range(0, len(index), 16 * EACH):
            samples = range(start, min(start + 16 * EACH, len(index)))
            yield from pool.map(decode_one, samples)


def decode(
    kept: Kept[Bytes],
    requests: Iterable[Request],
    view: View,
    *,
    device: torch.device,
    threads: int,
) -> Batches:
    """Return one batch for each request, in order; the threads end when it ends or is closed."""

    def start(pool: ThreadPoolExecutor, request: Request) -> Filling:
        pixels = empty_pixels(len(request.samples), view, device)
        rows = (slice(first, first + EACH) for first in range(0, len(pixels), EACH))
        to_fill = pixels.numpy()
        jobs = [pool.submit(_fill, kept, request, r, to_fill, view.interpolation) for r in rows]
        return Filling(jobs, pixels, kept.index.labels[request.samples])

    return fill_ahead(requests, start, finisher(view, device), threads=threads)


def _fill(
    kept: Kept[Bytes], request: Request, rows: slice, pixels: Bytes, interpolation: Interpolation
) -> None:
    """Write the parts that were asked for into these rows of `pixels`."""
    each = zip(
        request.samples[rows].tolist(),
        request.boxes[rows].tolist(),
        request.flips[rows].tolist(),
        pixels[rows],
        strict=True,
    )
    size = pixels.shape[1:3]
    for sample, box, flip, out in each:
        part = torch.from_numpy(kept.part(sample, box).transpose(2, 0, 1)[None])
        resized = F.interpolate(part, size=size, mode=interpolation, antialias=True)
        turned = resized.numpy()[0].transpose(1, 2, 0)
        out[:] = turned[:, ::-1] if flip else turned
