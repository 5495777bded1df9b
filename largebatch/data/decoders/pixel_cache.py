"""The decoded pixels of a small set, as one file in the user's cache that workers map.

All workers of a machine map it, so the pixels are in memory once however many workers there are,
and at once the next time.

A file holds the pixels of all images, then a checksum of them and of the file's name, which
says the index's digest, FORMAT and the version of Pillow. A run would train on what a disk damaged
and never know, so it reads a file through before it uses it (at 2.5 GB/s on one core, if the disk
is that fast: CIFAR-10 takes 0.1 s, the 16 GB of LIMIT 7 s); a damaged one is made anew. Files that
no run has used for UNUSED_DAYS are removed when another is made.
"""

import contextlib
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np
import PIL
from torch import Tensor

from largebatch.data.augment import clean_request
from largebatch.data.decoders.reader import open_reader, read_ahead
from largebatch.data.decoders.torchvision import Encoded, encoded_images, to_pillow
from largebatch.data.index.index import Index
from largebatch.data.types import Bytes, IntArray
from largebatch.distributed.backend import Backend
from largebatch.errors import DataError
from largebatch.storage import (
    CHECKSUM_BYTES,
    Mapped,
    Progress,
    checksum,
    is_undamaged,
    silent,
    user_cache,
    whole_file,
)

Pixels = TypeVar("Pixels", Bytes, Tensor)

LIMIT = 16 * 2**30
"""The most bytes of pixels that one split of a data set may have, to be cached."""

FORMAT = 1
"""Of the files, and of how images become bytes; files of another one are not used."""

UNUSED_DAYS = 30
"""After how many days without use a file of pixels is removed."""

EACH = 128
"""How many images a thread makes at a time."""

READS = 8
"""How many images are read at a time, at most."""


@dataclass(frozen=True, slots=True)
class PixelCache(Generic[Pixels]):
    """The pixels of all images of an index: H x W x 3 bytes each, one after the other."""

    index: Index
    pixels: Pixels
    starts: IntArray
    """Where each image begins."""

    alike: Pixels | None
    """The same bytes as N x H x W x 3 where all images have one size."""

    mapped: Mapped | None = None
    """The file that the pixels are mapped from; None: they are on a device."""

    def require_whole(self) -> None:
        """Raise DataError if the file that the pixels are mapped from was cut off."""
        if self.mapped is not None:
            self.mapped.require_whole()

    def part(self, sample: int, box: list[int]) -> Pixels:
        """Return the box of an image, H x W x 3, without copying."""
        top, left, height, width = box
        if self.alike is not None:
            return self.alike[sample, top : top + height, left : left + width]
        high, wide = int(self.index.heights[sample]), int(self.index.widths[sample])
        start = int(self.starts[sample])
        whole = self.pixels[start : start + high * wide * 3].reshape(high, wide, 3)
        return whole[top : top + height, left : left + width]


def make_cache(
    index: Index, pixels: Pixels, starts: IntArray, *, mapped: Mapped | None = None
) -> PixelCache[Pixels]:
    """Put together what a `PixelCache` holds."""
    high, wide = int(index.heights[0]), int(index.widths[0])
    one_size = bool((index.heights == high).all() and (index.widths == wide).all())
    alike = pixels.reshape(-1, high, wide, 3) if one_size else None
    return PixelCache(index, pixels, starts, alike, mapped)


def open_cache(
    index: Index, *, backend: Backend, threads: int, progress: Progress = silent
) -> PixelCache[Bytes]:
    """Decode every image of an index, unless that has been done before, and map the pixels.

    Worker 0 writes the file, then the first worker of each other machine that does not find it: in
    a folder that machines share, what others have mapped may not be replaced. Raises DataError with
    the path of an image that cannot be decoded, or if there are too many pixels to cache.
    """
    sizes = 3 * index.heights * index.widths
    starts = np.concatenate([[0], np.cumsum(sizes)])
    total = int(starts[-1])
    if total > LIMIT:
        raise DataError(
            f"{index.root}: {len(index)} decoded images are {total / 1e9:.1f} GB, and "
            f"execution.cache stores at most {LIMIT / 1e9:.1f} GB; decode them each time with "
            "execution.cache: null, or make the images smaller"
        )
    path = _place(index)
    for mine in (backend.rank == 0, backend.rank > 0 and backend.local_rank == 0):
        if mine and not _is_whole(path, total):
            _remove_unused(path.parent)
            _write(path, index, threads, progress)
        backend.barrier()
    try:
        mapped = Mapped.of(path)
        # Mapped as private, since torch warns of bytes that are read-only; nothing writes to them.
        pixels = np.asarray(np.memmap(path, mode="c", dtype=np.uint8, shape=(total,)))
    except (OSError, ValueError) as error:  # it is gone, or shorter
        raise DataError(
            f"{path}: {total:,} bytes of decoded images cannot be mapped from it ({error}); start "
            "again, and it is made anew"
        ) from None
    return make_cache(index, pixels, starts, mapped=mapped)


def _place(index: Index) -> Path:
    """Return the file of the pixels of an index, made by this version of what decodes them."""
    assert index.digest, "an index that was read has a digest"
    name = f"{index.digest}.{FORMAT}.pillow-{PIL.__version__}.pixels"
    return user_cache() / "pixels" / name


def _is_whole(path: Path, total: int) -> bool:
    """Return whether a file holds `total` bytes of pixels and their checksum, and note its use."""
    try:
        if path.stat().st_size != total + CHECKSUM_BYTES:
            return False
        whole = is_undamaged(path, begin=os.fsencode(path.name))
    except OSError:
        return False
    with contextlib.suppress(OSError):  # a cache that is only read has no need to be cleared
        os.utime(path)
    return whole


def _write(path: Path, index: Index, threads: int, progress: Progress) -> None:
    """Write the pixels of all images to a file that is there whole or not at all."""

    def written() -> Iterator[bytes | memoryview]:
        yield os.fsencode(path.name)  # so that the checksum is right under this name alone
        for done, pixels in enumerate(_decode_all(index, threads), start=1):
            file.write(pixels.data)
            yield pixels.data
            if done % EACH == 0 or done == len(index):
                progress(done, len(index))

    try:
        with whole_file(path) as file:
            file.write(checksum(written()))
    except OSError as error:
        size = int((3 * index.heights * index.widths).sum()) / 1e6
        raise DataError(
            f"{path.parent}: {size:,.1f} MB of decoded images cannot be written there "
            f"({error.strerror or error}); set XDG_CACHE_HOME to a folder that can be written to "
            "and has room for them, or decode them each time with --set execution.cache=null"
        ) from None


def _remove_unused(folder: Path) -> None:
    """Remove what no run has used for UNUSED_DAYS, so that the folder does not grow for ever."""
    oldest = time.time() - UNUSED_DAYS * 24 * 3600
    for path in folder.glob("*"):
        with contextlib.suppress(OSError):  # such as that of a process that does the same
            if path.stat().st_mtime < oldest:
                path.unlink()


def _decode_all(index: Index, threads: int) -> Iterator[Bytes]:
    """Give the pixels of every image in turn; some hundreds are under way at a time."""

    def to_bytes(encoded: Encoded) -> Bytes:
        return np.asarray(to_pillow(encoded))

    parts = (np.arange(n, min(n + 4 * EACH, len(index))) for n in range(0, len(index), 4 * EACH))
    whole = (clean_request(index, samples, image_size=1, resize=None) for samples in parts)
    with open_reader(index, READS) as reader, ThreadPoolExecutor(threads) as pool:
        for reading in read_ahead(whole, reader):
            yield from pool.map(to_bytes, encoded_images(reading))
            reader.release(reading)
