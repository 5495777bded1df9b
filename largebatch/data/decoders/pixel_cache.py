"""Decoded pixels of a small data set, cached in one file that workers map, and their decoders.

A file in the user's cache holds the pixels of all images, then a checksum of them and of its name.
A run reads the whole file once before it uses it: it would not notice pixels damaged by the disk.

On a CPU, threads crop and resize one image after the other (`open_decoder`). On a GPU the bytes
stay on the device and are cropped, mirrored and resized in batches (`upload`, `decode_on_device`);
one kernel does all of it where nothing is resized, or PyTorch's where Triton is missing. How is in
`crops`.
"""

import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import PIL
import torch
from torch import Tensor

from largebatch import accelerator, proof
from largebatch.data.augment import clean_request
from largebatch.data.decoders import crops
from largebatch.data.decoders.prefetch import FillTask, Transfer, ahead, open_prefetcher
from largebatch.data.decoders.reader import open_reader, read_ahead
from largebatch.data.decoders.torchvision import to_pillow
from largebatch.data.index.index import Index
from largebatch.data.types import (
    Batch,
    Bytes,
    Decode,
    DecodedBatches,
    Floats,
    IntArray,
    Request,
    Resources,
    View,
)
from largebatch.distributed.backend import Backend
from largebatch.errors import DataError
from largebatch.storage import (
    ReadProgress,
    checksum,
    is_whole,
    silent,
    user_cache,
    whole_file,
)

LIMIT = 2**36  # maximum number of bytes of pixels of one split
AUTOMATIC = 2 * 2**30  # of those that are cached in a host's memory without being asked for
FORMAT = 1  # version of the files and of the decoding; files of another version are not used
EACH = 128  # number of images in one thread's task
READS = 8  # maximum number of images read at the same time
SMALL = 40
"""Maximum side in pixels of images of one size that are resized together: one by one, the threads
would mostly wait for Python's lock. The weights of all boxes then take 20 MB."""


@dataclass(frozen=True, slots=True)
class PixelCache:
    """Pixels of all images of an index: H x W x 3 bytes each, concatenated."""

    index: Index
    pixels: Bytes
    starts: IntArray  # position of the first byte of each image

    @property
    def one_size(self) -> Bytes | None:
        """The same bytes as N x H x W x 3; None if images differ in size."""
        size = one_size(self.index)
        return None if size is None else self.pixels.reshape(-1, *size, 3)

    def image(self, sample: int) -> Bytes:
        """Return a view of an image, H x W x 3."""
        height = int(self.index.heights[sample])
        width = int(self.index.widths[sample])
        start = int(self.starts[sample])
        return self.pixels[start : start + height * width * 3].reshape(height, width, 3)


class UnwritableError(DataError):
    """Decoded pixels cannot be written to a file."""


class DeviceFullError(DataError):
    """Decoded pixels do not fit the memory of an accelerator."""


class Uploaded(NamedTuple):
    """Labels of an index, and the pixels of its images on a device, N x H x W x 3."""

    labels: IntArray
    pixels: Tensor


def open_cache(
    index: Index, *, backend: Backend, threads: int, progress: ReadProgress = silent
) -> PixelCache:
    """Map the decoded pixels of an index; decode every image if there is no such file yet.

    Worker 0 writes the file first, then the first worker of each machine that does not find it: in
    a shared folder, a file that others have mapped must not be replaced. Raises DataError with the
    path of an image that cannot be decoded, or if there are too many pixels to cache; on every
    worker UnwritableError if one of them cannot write.
    """
    sizes = 3 * index.heights * index.widths
    starts = np.concatenate([[0], np.cumsum(sizes)])
    total = int(starts[-1])
    if total > LIMIT:
        raise DataError(
            f"{index.root}: {len(index)} decoded images are {total / 1e9:.1f} GB, and "
            f"execution.cache stores at most {LIMIT / 1e9:.1f} GB; decode them each time with "
            "execution.cache: none, or make the images smaller"
        )
    path = _place(index)
    problem = None
    # Two rounds with a barrier after each: first worker 0, then the other machines that do not
    # see its file.
    for writes in (backend.rank == 0, backend.rank > 0 and backend.local_rank == 0):
        if writes and not is_whole(path, total, begin=os.fsencode(path.name)):
            try:
                _write(path, index, threads, progress)
            except UnwritableError as error:
                problem = error
        backend.barrier()
    # All workers raise, or none: one alone would leave the others waiting in the next sum.
    failed = backend.all_gather(torch.tensor(problem is not None).to(backend.device))
    if failed.any():  # sync: once, before training
        raise problem or UnwritableError("another worker cannot write the pixels of its images")
    # Mapped as private, because torch warns about read-only arrays; nothing writes to it.
    pixels = np.asarray(np.memmap(path, mode="c", dtype=np.uint8, shape=(total,)))
    return PixelCache(index, pixels, starts)


def fits_host(indexes: Sequence[Index], *, on_disk: bool = False) -> bool:
    """Return True if cached pixels take a quarter of this host's memory and half of the free disk.

    Files that are there already count as free. Each split must be at most AUTOMATIC, and the folder
    of the files, or the one above it, writable. With `on_disk` they need no memory and a split is
    at most LIMIT: pixels of a device are written, and copied to it, in pieces.
    """
    sizes = [num_bytes(index) for index in indexes]
    folder_of_caches = user_cache() / "pixels"
    # The folder of the caches may not exist yet.
    above = next(
        folder for folder in (folder_of_caches, *folder_of_caches.parents) if folder.exists()
    )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    free = shutil.disk_usage(above).free
    free += sum(file.stat().st_size for file in set(map(_place, indexes)) if file.exists())
    most, room = (LIMIT, free / 2) if on_disk else (AUTOMATIC, min(memory / 4, free / 2))
    return max(sizes) <= most and sum(sizes) <= room and os.access(above, os.W_OK)


def num_bytes(index: Index) -> int:
    """Return the bytes of the decoded pixels of an index."""
    return int((3 * index.heights * index.widths).sum())


def one_size(index: Index) -> tuple[int, int] | None:
    """Return the height and width of all images; None if they differ."""
    height, width = int(index.heights[0]), int(index.widths[0])
    is_one = (index.heights == height).all() and (index.widths == width).all()
    return (height, width) if is_one else None


def _place(index: Index) -> Path:
    assert index.digest, "a stored index has a digest"
    name = f"{index.digest}.{FORMAT}.pillow-{PIL.__version__}.pixels"
    return user_cache() / "pixels" / name


def _write(path: Path, index: Index, threads: int, progress: ReadProgress) -> None:
    def written() -> Iterator[bytes | memoryview]:
        yield os.fsencode(path.name)  # so that the checksum is valid only under this name
        for done, pixels in enumerate(_decode_all(index, threads), start=1):
            file.write(pixels.data)
            yield pixels.data
            if done % EACH == 0 or done == len(index):
                progress(done, len(index))

    try:
        with whole_file(path) as file:
            file.write(checksum(written()))
    except OSError as error:
        size = num_bytes(index) / 1e6
        raise UnwritableError(
            f"{path.parent}: {size:,.1f} MB of decoded images cannot be written there "
            f"({error.strerror or error}); set XDG_CACHE_HOME to a writable folder with room for "
            "them, or decode them each time with --set execution.cache=none"
        ) from None


def _decode_all(index: Index, threads: int) -> Iterator[Bytes]:
    def decode(sample: int, content: Bytes) -> Bytes:
        return np.asarray(to_pillow(index, sample, content))

    parts = (np.arange(n, min(n + 4 * EACH, len(index))) for n in range(0, len(index), 4 * EACH))
    whole = (clean_request(index, samples, image_size=1, resize=None) for samples in parts)
    with open_reader(index, READS) as reader, ThreadPoolExecutor(threads) as pool:
        for reading in read_ahead(whole, reader):
            samples = reading.request.samples.tolist()
            yield from pool.map(decode, samples, reading.contents)
            reader.release(reading)


@contextmanager
def open_decoder(cache: PixelCache, view: View, resources: Resources) -> Iterator[Decode]:
    """Yield a decoder whose threads end with the block."""
    small = cache.one_size
    if small is not None and max(*small.shape[1:3], view.image_size) > SMALL:
        small = None

    def fill(request: Request, rows: slice, pixels: Bytes | Floats) -> None:
        samples = request.samples[rows]
        boxes = request.boxes[rows]
        flips = request.flips[rows]
        if small is not None and not crops.is_cut_out(request, view.image_size):
            squares = crops.resample_small(
                small[samples],
                boxes,
                flips,
                size=view.image_size,
                interpolation=view.interpolation,
            )
            pixels[:] = squares.transpose(0, 2, 3, 1)
            return
        images = zip(samples.tolist(), boxes.tolist(), flips.tolist(), pixels, strict=True)
        for sample, box, flip, out in images:
            out[:] = crops.crop_and_resize(
                cache.image(sample),
                box,
                flip=flip,
                size=view.image_size,
                interpolation=view.interpolation,
            )

    def divide(request: Request) -> tuple[IntArray, list[FillTask]]:
        rows = (slice(first, first + EACH) for first in range(0, len(request.samples), EACH))
        parts = [FillTask(part, partial(fill, request, part)) for part in rows]
        return cache.index.labels[request.samples], parts

    with open_prefetcher(view, resources) as fill_ahead:
        yield lambda requests: fill_ahead(requests, divide)


def upload(cache: PixelCache, device: torch.device) -> Uploaded:
    """Copy the pixels to a device; raise DeviceFullError, or DataError if they differ in size."""
    pixels = cache.one_size
    root = cache.index.root
    if pixels is None:
        raise DataError(f"{root}: its images differ in size; use execution.cache: memory")
    try:
        with accelerator.memory_errors():
            return Uploaded(cache.index.labels, torch.from_numpy(pixels).to(device))
    except torch.OutOfMemoryError:
        raise DeviceFullError(
            f"{root}: {pixels.size / 1e9:.1f} GB of decoded images do not fit on {device}; use "
            "execution.cache: memory"
        ) from None


def decode_on_device(uploaded: Uploaded, view: View, requests: Iterable[Request]) -> DecodedBatches:
    """Yield one batch for each request, its numbers computed ahead.

    Images are moved as they are cut out, in the same kernel, so no shifts are left to apply.
    """
    pixels = uploaded.pixels
    size = view.image_size
    transfer = Transfer(pixels.device)
    (scale,) = transfer.send(view.pixel_scale())
    order = torch.channels_last if view.channels_last else torch.contiguous_format

    def with_table(request: Request) -> tuple[Request, Tensor]:
        return request, crops.table_of(request, uploaded.labels[request.samples])

    def by_pytorch(request: Request, table: Tensor) -> Tensor:
        if crops.is_cut_out(request, size):
            at_corner = not request.boxes[:, :2].any()
            images = crops.cut_out(pixels, table, size=size, at_corner=at_corner)
        else:
            images = crops.resize(pixels, table, view, moves=request.shifts is not None)
        normalised = images.sub(scale[0]).div_(scale[1])  # in float32
        return normalised.to(view.dtype).contiguous(memory_format=order)

    with closing(ahead(map(with_table, requests))) as with_tables:
        for request, on_host in with_tables:
            (table,) = transfer.send(on_host)
            if _has_kernel(request, size, pixels.device):
                images = crops.cut_out_by_kernel(pixels, table, scale, view)
            else:
                images = by_pytorch(request, table)
            yield replace(request, shifts=None), Batch(images, table[crops.LABEL])


def _has_kernel(request: Request, size: int, device: torch.device) -> bool:
    """Return True if the kernel cuts out these boxes: none is resized, and it is proven here."""
    if not proof.has_kernels(proof.CROPS, device) or len(request.samples) == 0:
        return False
    return crops.is_cut_out(request, size) and proof.uses(proof.CROPS, device)
