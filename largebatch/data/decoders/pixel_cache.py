"""Decoded pixels of a small data set, cached in one file that workers map, and their decoders.

A file in the user's cache holds the pixels of all images, then a checksum of them and of its name.
A run reads the whole file once before it uses it: it would not notice pixels damaged by the disk.

On a CPU, threads crop and resize one image after the other (`open_decoder`). On a GPU the bytes
stay on the device and are cropped, mirrored and resized in batches (`upload`, `decode_on_device`);
one kernel does all of it where nothing is resized, or PyTorch's where Triton is missing.

Resizing is separable: out = Wy . image . Wx^T, with a row of weights for each output pixel, so a
batch is two batched matrix products. The width is resized first, with rounding to integers between
the two, like PyTorch on bytes and Pillow before version 13 (which starts with the height of a tall
box).
"""

import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import PIL
import torch
import torch.nn.functional as F
from torch import Tensor

from largebatch import accelerator, proof
from largebatch.data.augment import clean_request, reflected, translate
from largebatch.data.decoders.prefetch import Part, Transfer, ahead, open_prefetcher
from largebatch.data.decoders.reader import open_reader, read_ahead
from largebatch.data.decoders.torchvision import to_pillow
from largebatch.data.index.index import Index
from largebatch.data.types import (
    Batch,
    BoolArray,
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
from largebatch.recipe.data import Interpolation
from largebatch.storage import (
    CHECKSUM_BYTES,
    Progress,
    checksum,
    is_undamaged,
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

AT_ONCE = 2**25
"""Number of pixels resized at once on a device; as floats they take twelve bytes each."""

BLOCK = 1024  # numbers of a batch that a program of the kernel writes


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

    def part(self, sample: int, box: list[int]) -> Bytes:
        """Return a view of the box of an image, H x W x 3."""
        top, left, height, width = box
        high, wide = int(self.index.heights[sample]), int(self.index.widths[sample])
        start = int(self.starts[sample])
        whole = self.pixels[start : start + high * wide * 3].reshape(high, wide, 3)
        return whole[top : top + height, left : left + width]


class UnwritableError(DataError):
    """Decoded pixels cannot be written to a file."""


class DeviceFullError(DataError):
    """Decoded pixels do not fit the memory of an accelerator."""


class Uploaded(NamedTuple):
    """Labels of an index, and the pixels of its images on a device, N x H x W x 3."""

    labels: IntArray
    pixels: Tensor


def open_cache(
    index: Index, *, backend: Backend, threads: int, progress: Progress = silent
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
    path, problem = _place(index), None
    for writes in (backend.rank == 0, backend.rank > 0 and backend.local_rank == 0):
        if writes and not _is_whole(path, total):
            try:
                _write(path, index, threads, progress)
            except UnwritableError as error:
                problem = error
        backend.barrier()
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
    place = user_cache() / "pixels"
    above = next(folder for folder in (place, *place.parents) if folder.exists())
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


def _is_whole(path: Path, total: int) -> bool:
    try:
        length = path.stat().st_size
        return length == total + CHECKSUM_BYTES and is_undamaged(path, begin=os.fsencode(path.name))
    except OSError:
        return False


def _write(path: Path, index: Index, threads: int, progress: Progress) -> None:
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
    one_size = cache.one_size
    if one_size is not None and max(*one_size.shape[1:3], view.image_size) > SMALL:
        one_size = None

    def fill(request: Request, rows: slice, pixels: Bytes | Floats) -> None:
        samples, boxes, flips = request.samples[rows], request.boxes[rows], request.flips[rows]
        size, mode = pixels.shape[1:3], view.interpolation
        if one_size is not None:
            whole = one_size[samples]
            pixels[:] = resample_small(
                whole, boxes, flips, size=size[0], interpolation=mode
            ).transpose(0, 2, 3, 1)
            return
        images = zip(samples.tolist(), boxes.tolist(), flips.tolist(), pixels, strict=True)
        for sample, box, flip, out in images:
            whole = resized(cache.part(sample, box), size=size, interpolation=mode)
            out[:] = whole[:, ::-1] if flip else whole

    def divide(request: Request) -> tuple[IntArray, list[Part]]:
        rows = (slice(first, first + EACH) for first in range(0, len(request.samples), EACH))
        parts = [Part(part, partial(fill, request, part)) for part in rows]
        return cache.index.labels[request.samples], parts

    with open_prefetcher(view, resources) as fill_ahead:
        yield lambda requests: fill_ahead(requests, divide)


def resized(pixels: Bytes, *, size: Sequence[int], interpolation: Interpolation) -> Bytes:
    """Resize one image, H x W x 3."""
    # unsqueeze, not [None]: with its stride of 0 PyTorch would not detect channels-last.
    image = torch.from_numpy(pixels).unsqueeze(0).permute(0, 3, 1, 2)
    found = F.interpolate(image, size=tuple(size), mode=interpolation, antialias=True)
    whole: Bytes = found.permute(0, 2, 3, 1).numpy()[0]
    return whole


def upload(cache: PixelCache, device: torch.device) -> Uploaded:
    """Copy the pixels to a device; raise DeviceFullError, or DataError if they differ in size."""
    pixels, root = cache.one_size, cache.index.root
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
    pixels, size = uploaded.pixels, view.image_size
    transfer, places = Transfer(pixels.device), _places(size, pixels.device)
    (scale,) = transfer.send(torch.tensor([view.mean, view.std]).mul_(255).view(2, 3, 1, 1))
    order = torch.channels_last if view.channels_last else torch.contiguous_format

    def number(request: Request) -> tuple[Request, Tensor]:
        shifts = np.zeros_like(request.boxes[:, :2]) if request.shifts is None else request.shifts
        labels = uploaded.labels[request.samples]
        rows = request.samples, *request.boxes.T, request.flips, *shifts.T, labels
        return request, torch.from_numpy(np.stack(rows).astype(np.int64, copy=False))

    def by_pytorch(request: Request, numbers: Tensor) -> Tensor:
        if (request.boxes[:, 2:] == size).all():
            images = _cut_out(pixels, numbers, places, request.boxes[:, :2].any())
        else:
            images = _resized(pixels, numbers, view, moves=request.shifts is not None)
        normalised = images.sub(scale[0]).div_(scale[1])  # in float32
        return normalised.to(view.dtype).contiguous(memory_format=order)

    def by_kernel(numbers: Tensor) -> Tensor:
        from largebatch.data.decoders.triton_crop import cut_out

        num, grid = numbers.shape[1], (numbers.shape[1], -(-3 * size * size // BLOCK))
        out = torch.empty(
            (num, 3, size, size), dtype=view.dtype, device=pixels.device, memory_format=order
        )
        sizes = *pixels.shape[1:3], size, num
        constants = {"CHANNELS_LAST": view.channels_last, "BLOCK": BLOCK}
        accelerator.launch(cut_out, grid, out, pixels, numbers, scale, *sizes, **constants)
        return out

    with closing(ahead(map(number, requests))) as numbered:
        for request, on_host in numbered:
            (numbers,) = transfer.send(on_host)
            whole = len(request.samples) > 0 and (request.boxes[:, 2:] == size).all()
            has_kernel = proof.has_kernels(proof.CROPS, pixels.device)
            if whole and has_kernel and proof.uses(proof.CROPS, pixels.device):
                images = by_kernel(numbers)
            else:
                images = by_pytorch(request, numbers)
            yield replace(request, shifts=None), Batch(images, numbers[-1])


@lru_cache(maxsize=8)
def _places(size: int, device: torch.device) -> list[Tensor]:
    """Return the rows to read by shift (negative: from the end), and columns by flip and shift."""
    shifts = torch.cat([torch.arange(size), torch.arange(1 - size, 0)])
    rows = reflected(shifts, num_pixels=size)
    return [rows.to(device), torch.stack([rows, size - 1 - rows]).to(device)]


def _cut_out(pixels: Tensor, numbers: Tensor, places: list[Tensor], offsets: np.bool_) -> Tensor:
    """Return parts of the images that are not resized, mirrored and moved: N x 3 x H x W bytes."""
    samples, top, left, _, _, flips, down, right, _ = numbers
    rows, columns = places[0][down], places[1][flips, right]
    if offsets:
        rows, columns = rows + top[:, None], columns + left[:, None]
    return pixels[samples[:, None, None], rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


def _resized(pixels: Tensor, numbers: Tensor, view: View, *, moves: bool) -> Tensor:
    """Return the boxes of the images, resized, mirrored and moved, some at a time."""
    size, mode, parts = view.image_size, view.interpolation, []
    for some in numbers.split(max(1, AT_ONCE // (pixels[0].numel() // 3)), dim=1):
        flips = some[5] > 0
        part = resample(pixels[some[0]], some[1:5].T, flips, size=size, interpolation=mode)
        parts.append(translate(part, some[6:8].T) if moves else part)
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def resample(
    images: Tensor, boxes: Tensor, flips: Tensor, *, size: int, interpolation: Interpolation
) -> Tensor:
    """Resize the boxes of N x H x W x 3 bytes to N x 3 x size x size floats of whole 0 .. 255.

    `boxes` is N x 4: top, left, height, width; `flips` N: mirror left to right. The filter is
    widened when a box shrinks (antialiasing) and ignores pixels outside the box.
    """
    number, height, width, _ = images.shape
    top, left, box_height, box_width = boxes.to(torch.float32).unbind(dim=1)
    places = torch.arange(size, device=images.device).expand(number, size)
    across = torch.where(flips[:, None], places.flip(1), places)
    rows = _weights(top, box_height, places, num_pixels=height, interpolation=interpolation)
    columns = _weights(left, box_width, across, num_pixels=width, interpolation=interpolation)
    planes = images.permute(0, 3, 1, 2).to(torch.float32, memory_format=torch.contiguous_format)
    narrow = _whole(torch.bmm(planes.view(number, 3 * height, width), columns.transpose(1, 2)))
    narrow = narrow.view(number, 3, height, size).transpose(1, 2).reshape(number, height, 3 * size)
    result = _whole(torch.bmm(rows, narrow))
    return result.view(number, size, 3, size).transpose(1, 2)


def resample_small(
    images: Bytes,
    boxes: IntArray,
    flips: BoolArray,
    *,
    size: int,
    interpolation: Interpolation,
) -> Floats:
    """Resize like `resample`, with precomputed weights; NumPy starts no threads."""
    number, height, width, _ = images.shape
    top, left, box_height, box_width = boxes.T
    rows = _all_weights(height, size, interpolation)[0, top, box_height - 1]
    columns = _all_weights(width, size, interpolation)[flips.astype(int), left, box_width - 1]

    planes = np.empty((number, 3, height, width), dtype=np.float32)
    planes[:] = images.transpose(0, 3, 1, 2)
    narrow = planes.reshape(number, 3 * height, width) @ columns.transpose(0, 2, 1)
    narrow = _to_whole(narrow).reshape(number, 3, height, size)
    return _to_whole(rows[:, None] @ narrow)


@lru_cache(maxsize=4)
def _all_weights(num_pixels: int, size: int, interpolation: Interpolation) -> Floats:
    """Return the weights of all boxes along an axis, by flip, first pixel and length - 1."""
    numbers = torch.arange(num_pixels, dtype=torch.float32)
    starts, lengths = numbers.repeat_interleave(num_pixels), 1.0 + numbers.repeat(num_pixels)
    places = torch.arange(size).expand(len(starts), size)
    weights = _weights(starts, lengths, places, num_pixels=num_pixels, interpolation=interpolation)
    both = torch.stack([weights, weights.flip(1)])
    return both.view(2, num_pixels, num_pixels, size, num_pixels).numpy()


def _weights(
    start: Tensor, length: Tensor, places: Tensor, *, num_pixels: int, interpolation: Interpolation
) -> Tensor:
    """Return N x size x num_pixels weights along one axis; every row sums to 1.

    Output pixel `place` of a box that starts at `start` is at start + (place + 1/2) * scale.
    """
    scale = (length / places.shape[1])[:, None, None]
    width = scale.clamp(min=1.0)
    centers = start[:, None, None] + (places[:, :, None] + 0.5) * scale
    pixels = torch.arange(num_pixels, device=places.device) + 0.5
    distance = ((pixels - centers) / width).abs_()
    linear = interpolation == "bilinear"
    weights = (1.0 - distance).clamp_(min=0.0) if linear else _cubic(distance)
    first, end = start[:, None], (start + length)[:, None]
    weights *= ((pixels > first) & (pixels < end))[:, None, :]
    return weights / weights.sum(dim=2, keepdim=True)


def _cubic(distance: Tensor) -> Tensor:
    """Catmull and Rom's cubic, a = -1/2 (Keys 1981, doi 10.1109/TASSP.1981.1163711, eq. 4)."""
    near = (1.5 * distance - 2.5) * distance * distance + 1.0
    far = ((2.5 - 0.5 * distance) * distance - 4.0) * distance + 2.0
    return torch.where(distance < 1.0, near, torch.where(distance < 2.0, far, 0.0))


def _whole(values: Tensor) -> Tensor:
    return values.add_(0.5).floor_().clamp_(0.0, 255.0)


def _to_whole(values: Floats) -> Floats:
    values += 0.5
    return np.clip(np.floor(values, out=values), 0.0, 255.0, out=values)
