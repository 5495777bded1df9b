"""Read the header of every image of a split and put the results into arrays.

The arrays, with what a header of plain values says about them, are the content of an index file.
Threads, because they mostly wait for the storage; Python's lock lets them read ten thousand headers
a second, so a million images take less than two minutes on any number of cores.

An image is checked by its header, which Pillow reads, and by the mark of its end: how large it is,
whether it can be used and is whole. The pixels of JPEG and PNG, which large data sets are made of,
are not decoded; the decoder finds data that is broken in the middle.
"""

import contextlib
import hashlib
import io
import json
import os
import re
import stat
import struct
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image, UnidentifiedImageError
from PIL.ImageFile import ImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile

from largebatch.data.index.file import FORMAT, Arrays, Bad, Content
from largebatch.data.index.folder import ClassFolder, Shard, Source
from largebatch.data.index.ignored import list_ignored
from largebatch.data.index.shards import Unusable, read_shard
from largebatch.data.types import IntArray
from largebatch.storage import OF_THE_FILE, PART, THREADS, Progress, read_again, silent

Read = Callable[[int, int], bytes]
"""Returns `length` bytes from `position` of the encoded image, fewer where it ends."""

MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK")
"""Pillow's names for the kinds of pixels that both decoders turn into the same RGB."""

OTHER_FORMATS = ("BMP", "PPM", "TIFF", "WEBP")
"""Besides JPEG and PNG; Pillow's names. Further formats are not for both decoders."""

MAX_SIDE = 32_768
"""Wider or higher images are refused: hardware decoders have limits of this order."""

MAX_BYTES = 2**29
"""Of an encoded image: twice those of the most pixels that Pillow takes."""

HEAD, TAIL = 4096, 64
"""How many bytes are read from either end; of longer headers, MAX_HEADER."""

MAX_HEADER = 2**23
"""Of a JPEG or PNG, in bytes: Pillow takes seconds for the worst that can be put there."""

JPEG, JPEG_END = b"\xff\xd8\xff", b"\xff\xd9"
PNG, PNG_END = b"\x89PNG\r\n\x1a\n", b"\0\0\0\0IEND\xaeB`\x82"
PNG_DEPTH = 24
"""The byte of a PNG that states the bits of a channel."""

ORIENTATION, MOST_ORIENTATION = 274, 8
"""EXIF's tag, and the last of its values; those of TRANSPOSED exchange height and width."""

TRANSPOSED = (5, 6, 7, 8)

OTHER_FRAMES = re.compile(rb"\xff([\xc3\xc5-\xc7\xc9-\xcb\xcd-\xcf])..\x08(....)", re.DOTALL)
"""Frame headers of lossless, hierarchical and arithmetic JPEGs: their marker, height and width."""


class BadImageError(Exception):
    """An image cannot be used; the message is the reason."""


class Size(NamedTuple):
    """Of an image as it is seen, in pixels, and how it is stored."""

    height: int
    width: int
    orientation: int = 1
    """EXIF's number of how the stored image is to be turned; 1: not at all."""

    @property
    def stored(self) -> tuple[int, int]:
        """Height and width of the pixels in the file."""
        turned = self.orientation in TRANSPOSED
        return (self.width, self.height) if turned else (self.height, self.width)


def measure(read: Read, num_bytes: int) -> Size:
    """Return the size of an encoded image of this length, or raise BadImageError."""
    if num_bytes == 0:
        raise BadImageError("the file is empty")
    if num_bytes > MAX_BYTES:
        raise BadImageError(f"it has {num_bytes:,} bytes, expected at most {MAX_BYTES:,}")
    start = read(0, len(PNG))
    if start.startswith(JPEG):
        return _jpeg(read, num_bytes)
    if start == PNG:
        return _png(read, num_bytes)
    return _other(read(0, num_bytes))


def measure_part(file: int, offset: int, num_bytes: int) -> Size:
    """Measure the image that lies in these bytes of an open file."""

    def read(position: int, length: int) -> bytes:
        return os.pread(file, min(length, num_bytes - position), offset + position)

    return measure(read, num_bytes)


def measure_bytes(content: bytes) -> Size:
    """Measure an encoded image."""
    return measure(lambda position, length: content[position : position + length], len(content))


def _jpeg(read: Read, num_bytes: int) -> Size:
    size, header = _header(read, JpegImageFile)
    for found in OTHER_FRAMES.finditer(header):  # Pillow does not say which frame header it read
        if found[2] == struct.pack(">HH", *size.stored):
            raise BadImageError(
                f"it is a JPEG of process SOF{found[1][0] - 0xC0}, expected baseline or progressive"
            )
    _require_end(read, num_bytes, JPEG_END, after=len(header))
    return size


def _png(read: Read, num_bytes: int) -> Size:
    size, header = _header(read, PngImageFile)
    if header[PNG_DEPTH] > 8:
        raise BadImageError(f"it has {header[PNG_DEPTH]} bits a channel, expected at most 8")
    _require_end(read, num_bytes, PNG_END, after=len(header))
    return size


def _header(read: Read, plugin: Callable[[io.BytesIO], ImageFile]) -> tuple[Size, bytes]:
    """Return the size of an image and the bytes of its header."""
    for length in (HEAD, MAX_HEADER):
        content = read(0, length)
        file = io.BytesIO(content)
        problem = ""
        try:
            image = plugin(file)
        except Exception as error:  # Pillow raises all kinds over a damaged file
            problem = str(error) or type(error).__name__
        else:
            if image.tile:  # the data begins here
                return _seen(image), content[: file.tell()]
        if file.read(1):
            raise BadImageError(f"its header cannot be read: {problem}")
    if len(content) < MAX_HEADER:
        raise BadImageError("it is cut off in the header")
    raise BadImageError(
        f"it is cut off in the header, or the header is longer than {MAX_HEADER:,} bytes"
    )


def _other(content: bytes) -> Size:
    """Open with Pillow; decode what has no mark at its end, which is rare in large data sets."""
    try:
        with Image.open(io.BytesIO(content), formats=OTHER_FORMATS) as image:
            if image.mode not in MODES:
                raise BadImageError(f"its pixels are {image.mode}, expected 8 bits per channel")
            size = _seen(image)
            if image.format != "WEBP":  # whose opening has looked for all of its parts
                image.load()
    except BadImageError:
        raise
    except UnidentifiedImageError:
        raise BadImageError("no readable image") from None
    except Exception as error:  # Pillow raises all kinds over a damaged file
        raise BadImageError(str(error) or type(error).__name__) from None
    return size


def _require_end(read: Read, num_bytes: int, mark: bytes, *, after: int) -> None:
    """Refuse an image without the mark of its end; other bytes may follow that mark.

    Within the data the mark cannot occur, so where it is not in the last bytes it is looked for
    everywhere: some cameras and editors leave things behind the image.
    """
    start = max(after, num_bytes - TAIL)
    if mark not in read(start, TAIL) and mark not in read(after, num_bytes):
        raise BadImageError("it is cut off: the mark of its end is missing")


def _seen(image: Image.Image) -> Size:
    """Return the size of an image that Pillow has opened, as it is seen.

    Of a PNG, EXIF that stands behind the pixels is not read: both decoders show it as it is stored.
    """
    size = _sane(image.height, image.width)
    if image.format == "TIFF":  # which Pillow turns itself, and DALI does not
        if _orientation(image.getexif()) != 1:
            raise BadImageError(
                "it is a TIFF that is stored turned or mirrored (EXIF orientation), which the "
                "decoders do not show alike; store it upright, or as a JPEG or PNG"
            )
        return size
    exif = Image.Exif()
    with contextlib.suppress(Exception):  # Pillow raises all kinds over damaged EXIF
        exif.load(image.info.get("exif", b""))
    turned = size._replace(orientation=_orientation(exif))
    return Size(*turned.stored, turned.orientation)


def _orientation(exif: Image.Exif) -> int:
    """Return EXIF's orientation; 1 where it states none, or one that does not exist."""
    found = 1
    with contextlib.suppress(Exception):  # as above
        found = int(exif.get(ORIENTATION, 1))
    return found if 1 <= found <= MOST_ORIENTATION else 1


def _sane(height: int, width: int) -> Size:
    if not (1 <= height <= MAX_SIDE and 1 <= width <= MAX_SIDE):
        raise BadImageError(f"it is {height} x {width} pixels, expected 1 to {MAX_SIDE} a side")
    limit = Image.MAX_IMAGE_PIXELS
    if limit is not None and height * width > limit:
        raise BadImageError(
            f"it is {height} x {width} pixels, more than the {limit:,} beyond which Pillow "
            f"suspects an attack (a decompression bomb)"
        )
    return Size(height, width)


def build(source: Source, *, progress: Progress = silent) -> Content:
    """Measure every image of a split; those that cannot be used are listed and left out."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow's, of what is checked here
        build_kind = _build_shards if source.shards else _build_files
        arrays, bad = build_kind(source, progress)
    header: dict[str, Any] = {
        "format": FORMAT,
        "split": source.split,
        "classes": list(source.classes),
        "folders": [[folder.name, folder.mtime] for folder in source.folders],
        "shards": [[shard.name, shard.size, shard.mtime] for shard in source.shards],
        "bad": [list(each) for each in bad],
    }
    ignored = [list(kind) for kind in list_ignored(source.root, source.split)]
    # The same images have the same digest whatever lies among them.
    return Content({**header, "digest": _digest(header, arrays), "ignored": ignored}, arrays)


def _digest(header: dict[str, Any], arrays: Arrays) -> str:
    """Return a hash of everything listed; it does not depend on where the folder lies."""
    digest = hashlib.sha256(json.dumps(header, sort_keys=True).encode("ascii"))
    for name in sorted(arrays):
        digest.update(np.ascontiguousarray(arrays[name]).data)
    return digest.hexdigest()


def _build_files(source: Source, progress: Progress) -> tuple[Arrays, list[Bad]]:
    jobs = list(_parts(source))
    total = sum(len(folder.names) for folder in source.folders)
    sizes: list[npt.NDArray[np.int64]] = []
    bad: list[Bad] = []
    done = 0
    with ThreadPoolExecutor(THREADS, thread_name_prefix="headers") as pool:
        results = pool.map(lambda job: _measure_files(source, *job), jobs)
        for (_, part), (found, unusable) in zip(jobs, results, strict=True):
            sizes.append(found)
            bad += unusable
            done += len(part)
            progress(done, total)
    counts = [len(folder.names) for folder in source.folders]
    measured = np.concatenate(sizes)
    names = [os.fsencode(name) for folder in source.folders for name in folder.names]
    usable = measured[:, 0] > 0
    usable_names = [names[row] for row in np.flatnonzero(usable).tolist()]
    blob = b"".join(usable_names)
    assert len(blob) < 2**32, "names of 4 GB and more need wider numbers"
    return {
        "labels": np.repeat(np.arange(len(counts), dtype=np.int64), counts)[usable],
        "heights": measured[usable, 0],
        "widths": measured[usable, 1],
        "orientations": measured[usable, 2].astype(np.uint8),
        "num_bytes": _column(source, "sizes")[usable],
        "mtimes": _column(source, "mtimes")[usable],
        "names": np.frombuffer(blob, dtype=np.uint8),
        "name_ends": np.cumsum([len(name) for name in usable_names], dtype=np.uint32),
    }, bad


def _column(source: Source, field: str) -> IntArray:
    return np.array([x for folder in source.folders for x in getattr(folder, field)], np.int64)


def _parts(source: Source) -> Iterator[tuple[ClassFolder, range]]:
    """Divide the images into jobs of one class each."""
    for folder in source.folders:
        for start in range(0, len(folder.names), PART):
            yield folder, range(start, min(start + PART, len(folder.names)))


def _measure_files(source: Source, folder: ClassFolder, rows: range) -> tuple[IntArray, list[Bad]]:
    """Return the sizes of some images of a class, zeros for those that cannot be used."""
    sizes, bad = np.zeros((len(rows), len(Size._fields)), dtype=np.int64), []
    for place, row in enumerate(rows):
        path = f"{source.split}/{folder.name}/{folder.names[row]}"
        facts = folder.sizes[row], folder.mtimes[row]
        try:
            sizes[place] = _measure_file(f"{source.root}/{path}", folder.sizes[row])
        except BadImageError as error:
            bad.append(Bad(path, str(error), *facts))
    return sizes, bad


def _measure_file(path: str, num_bytes: int) -> Size:
    """Measure an image; what is wrong with the disk and not with the file is no bad image."""
    try:
        return _open_and_measure(path, num_bytes)
    except OSError as error:
        return read_again(lambda: _open_and_measure(path, num_bytes), error, name=path)


def _open_and_measure(path: str, num_bytes: int) -> Size:
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe too is opened at once
        try:
            # What is no file has no length.
            if not num_bytes and not stat.S_ISREG(os.fstat(file).st_mode):
                raise BadImageError("it is no file but a folder, a pipe or a device")
            return measure_part(file, 0, num_bytes)
        finally:
            os.close(file)
    except OSError as error:
        if error.errno in OF_THE_FILE:
            raise BadImageError(os.strerror(error.errno)) from None
        raise


def _build_shards(source: Source, progress: Progress) -> tuple[Arrays, list[Bad]]:
    rows: list[IntArray] = []
    bad: list[Bad] = []
    with ThreadPoolExecutor(THREADS, thread_name_prefix="headers") as pool:
        results = pool.map(lambda shard: _measure_shard(source, shard), source.shards)
        for done, (found, unusable) in enumerate(results, start=1):
            rows.append(found)
            bad += unusable
            progress(done, len(source.shards))
    columns = np.concatenate(rows).T.copy()
    names = ("labels", "heights", "widths", "orientations", "offsets", "num_bytes")
    counts = [len(found) for found in rows]
    which = np.repeat(np.arange(len(counts), dtype=np.int64), counts)
    arrays = {**dict(zip(names, columns, strict=True)), "shards": which}
    return {**arrays, "orientations": arrays["orientations"].astype(np.uint8)}, bad


def _measure_shard(source: Source, shard: Shard) -> tuple[IntArray, list[Bad]]:
    """Return label, height, width, orientation, offset and length of every image of a shard."""
    path = source.root / source.split / shard.name
    rows, bad = [], []
    file = os.open(path, os.O_RDONLY)
    try:
        for found in read_shard(path, len(source.classes)):
            try:
                if isinstance(found, Unusable):
                    raise BadImageError(found.reason)
                size = measure_part(file, found.offset, found.num_bytes)
                rows.append((found.label, *size, found.offset, found.num_bytes))
            except BadImageError as error:
                bad.append(Bad(f"{source.split}/{shard.name}/{found.name}", str(error)))
    finally:
        os.close(file)
    return np.array(rows, dtype=np.int64).reshape(-1, 6), bad
