"""Read the header of every image of a split into arrays, the content of an index file.

Threads are enough, because they mostly wait for the storage: under Python's lock they read ten
thousand headers per second, so a million images take less than two minutes on any number of cores.

An image is checked by its header, which Pillow reads, and by its end marker: size, format and
completeness. The pixels of JPEG and PNG, the formats of large data sets, are not decoded; the
decoder detects data that is damaged in the middle.
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
"""Returns `length` bytes from `position` of the encoded image, fewer at its end."""

MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK")
"""Pillow's names of the pixel types that both decoders convert to the same RGB."""

OTHER_FORMATS = ("BMP", "PPM", "TIFF", "WEBP")
"""Pillow's names of the formats, besides JPEG and PNG, that both decoders read."""

MAX_SIDE = 32_768
"""Maximum side in pixels: hardware decoders have limits of this order."""

MAX_BYTES = 2**29
"""Maximum length of an encoded image: twice the bytes of Pillow's maximum number of pixels."""

HEAD, TAIL = 4096, 64
"""Bytes read from either end; MAX_HEADER bytes if the header is longer."""

MAX_HEADER = 2**23
"""Maximum header of a JPEG or PNG in bytes: Pillow takes seconds for the worst content."""

JPEG, JPEG_END = b"\xff\xd8\xff", b"\xff\xd9"
PNG, PNG_END = b"\x89PNG\r\n\x1a\n", b"\0\0\0\0IEND\xaeB`\x82"
PNG_DEPTH = 24
"""Position of the byte of a PNG that holds the bits per channel."""

ORIENTATION, MOST_ORIENTATION = 274, 8
"""EXIF's tag of orientation, and its largest value."""

TRANSPOSED = (5, 6, 7, 8)
"""Orientations that exchange height and width."""

OTHER_FRAMES = re.compile(rb"\xff([\xc3\xc5-\xc7\xc9-\xcb\xcd-\xcf])..\x08(....)", re.DOTALL)
"""Frame headers of lossless, hierarchical and arithmetic JPEGs: marker, height and width."""


class BadImageError(Exception):
    """An image cannot be used; the message is the reason."""


class Size(NamedTuple):
    """Size of an image as displayed, in pixels, and how it is stored."""

    height: int
    width: int
    orientation: int = 1
    """EXIF orientation of the stored image; 1 is upright."""

    @property
    def stored(self) -> tuple[int, int]:
        """Height and width of the pixels in the file."""
        is_transposed = self.orientation in TRANSPOSED
        return (self.width, self.height) if is_transposed else (self.height, self.width)


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
    """Return the size of the image in these bytes of an open file, or raise BadImageError."""

    def read(position: int, length: int) -> bytes:
        return os.pread(file, min(length, num_bytes - position), offset + position)

    return measure(read, num_bytes)


def measure_bytes(content: bytes) -> Size:
    """Return the size of an encoded image, or raise BadImageError."""
    return measure(lambda position, length: content[position : position + length], len(content))


def _jpeg(read: Read, num_bytes: int) -> Size:
    size, header = _header(read, JpegImageFile)
    for frame in OTHER_FRAMES.finditer(header):  # Pillow does not report which header it read
        if frame[2] == struct.pack(">HH", *size.stored):
            raise BadImageError(
                f"it is a JPEG of process SOF{frame[1][0] - 0xC0}, expected baseline or progressive"
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
        except Exception as error:  # Pillow raises many types for a damaged file
            problem = str(error) or type(error).__name__
        else:
            if image.tile:  # the pixel data starts here
                return _displayed(image), content[: file.tell()]
        if file.read(1):
            raise BadImageError(f"its header cannot be read: {problem}")
    if len(content) < MAX_HEADER:
        raise BadImageError("it is truncated in the header")
    raise BadImageError(
        f"it is truncated in the header, or the header is longer than {MAX_HEADER:,} bytes"
    )


def _other(content: bytes) -> Size:
    """Open with Pillow; decode formats without an end marker, which are rare in large data sets."""
    try:
        with Image.open(io.BytesIO(content), formats=OTHER_FORMATS) as image:
            require_mode(image.mode)
            problem = _unshared(image, content)
            if problem:
                raise BadImageError(
                    f"it is a {image.format} of {problem}, which the decoders do not show alike; "
                    "store it as a PNG of 8 bits per channel"
                )
            size = _displayed(image)
            if image.format != "WEBP":  # opening a WebP checks that it is complete
                image.load()
    except BadImageError:
        raise
    except UnidentifiedImageError:
        raise BadImageError("not a readable image") from None
    except Exception as error:  # Pillow raises many types for a damaged file
        raise BadImageError(str(error) or type(error).__name__) from None
    return size


def _unshared(image: ImageFile, content: bytes) -> str | None:
    """Return what DALI shows unlike Pillow, or not at all, in an image of OTHER_FORMATS."""
    if image.format == "TIFF":
        tags = image.getexif()
        found = (tags.get(tag, ()) for tag in (258, 339, 338))
        depths, numbers, extra = (set(tag if isinstance(tag, tuple) else [tag]) for tag in found)
        usual = {"1": {1}, "P": {1, 2, 4, 8}}.get(image.mode, {8})
        is_colour = image.mode in {"RGB", "RGBA"}
        faults = {
            f"{max(depths, default='unstated')} bits per channel": not depths or depths - usual,
            "signed numbers or fractions": numbers - {1},
            "alpha beside grey, or multiplied into the colours": 1 in extra
            or (extra and not is_colour),
        }
    else:
        stored = image.tile[0].args if image.tile else ()
        most = stored[-1] if image.format == "PPM" and isinstance(stored, tuple) else 255
        is_text = image.format == "PPM" and content[1:2] in b"123"
        faults = {
            f"values up to {most}, expected 255": most != 255,
            "text without a line break at its end": is_text and not content[-1:].isspace(),
            "16 bits per pixel": image.format == "BMP" and str(stored).startswith("('BGR;1"),
        }
    return next((name for name, found in faults.items() if found), None)


def require_mode(mode: str) -> None:
    """Raise BadImageError for pixels that Pillow converts to RGB by cutting them off at 255.

    Also for those, such as LAB, that only some decoders convert.
    """
    if mode not in MODES:
        raise BadImageError(f"its pixels are {mode}, expected 8 bits per channel")


def _require_end(read: Read, num_bytes: int, mark: bytes, *, after: int) -> None:
    """Raise BadImageError if the end marker is missing; other bytes may follow it.

    The marker cannot occur within the data. If it is not in the last bytes, the whole image is
    searched: some cameras and editors append data.
    """
    start = max(after, num_bytes - TAIL)
    if mark not in read(start, TAIL) and mark not in read(after, num_bytes):
        raise BadImageError("it is truncated: its end marker is missing")


def _displayed(image: Image.Image) -> Size:
    """Return the displayed size of an image opened by Pillow.

    EXIF after the pixels of a PNG is ignored, as by both decoders.
    """
    size = _checked_size(image.height, image.width)
    if image.format == "TIFF":  # Pillow applies the orientation, DALI does not
        if _orientation(image.getexif()) != 1:
            raise BadImageError(
                "it is a TIFF that is stored rotated or mirrored (EXIF orientation), which the "
                "decoders show differently; store it upright, or as a JPEG or PNG"
            )
        return size
    exif = Image.Exif()
    with contextlib.suppress(Exception):  # Pillow raises many types for damaged EXIF
        exif.load(image.info.get("exif", b""))
    stored = size._replace(orientation=_orientation(exif))
    return Size(*stored.stored, stored.orientation)


def _orientation(exif: Image.Exif) -> int:
    """Return EXIF's orientation; 1 if it is missing or invalid."""
    value = 1
    with contextlib.suppress(Exception):  # as above
        value = int(exif.get(ORIENTATION, 1))
    return value if 1 <= value <= MOST_ORIENTATION else 1


def _checked_size(height: int, width: int) -> Size:
    if not (1 <= height <= MAX_SIDE and 1 <= width <= MAX_SIDE):
        raise BadImageError(f"it has {height} x {width} pixels, expected 1 to {MAX_SIDE} per side")
    limit = Image.MAX_IMAGE_PIXELS
    if limit is not None and height * width > limit:
        raise BadImageError(
            f"it has {height} x {width} pixels; above {limit:,} Pillow suspects an attack (a "
            f"decompression bomb)"
        )
    return Size(height, width)


def build(source: Source, *, progress: Progress = silent) -> Content:
    """Measure every image of a split; bad images are listed and left out."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Pillow, about what is checked here
        build_kind = _build_shards if source.shards else _build_files
        arrays, bad = build_kind(source, progress)
    header: dict[str, Any] = {
        "format": FORMAT,
        "split": source.split,
        "classes": list(source.classes),
        "folders": [[folder.name, folder.mtime] for folder in source.folders],
        "shards": [[shard.name, shard.size, shard.mtime] for shard in source.shards],
        "bad": [list(image) for image in bad],
    }
    ignored = [list(kind) for kind in list_ignored(source.root, source.split)]
    # Ignored files do not change the digest.
    return Content({**header, "digest": _digest(header, arrays), "ignored": ignored}, arrays)


def _digest(header: dict[str, Any], arrays: Arrays) -> str:
    """Return a hash of everything listed; it does not depend on the location of the folder."""
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
        for (_, part), (measured_part, unusable) in zip(jobs, results, strict=True):
            sizes.append(measured_part)
            bad += unusable
            done += len(part)
            progress(done, total)
    counts = [len(folder.names) for folder in source.folders]
    measured = np.concatenate(sizes)
    names = [os.fsencode(name) for folder in source.folders for name in folder.names]
    usable = measured[:, 0] > 0
    usable_names = [names[row] for row in np.flatnonzero(usable).tolist()]
    blob = b"".join(usable_names)
    assert len(blob) < 2**32, "names of 4 GB and more need wider integers"
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
    """Return the sizes of some images of a class, zeros for bad ones."""
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
    """Return the size of an image; retry errors of the disk, which do not make it a bad image."""
    try:
        return _open_and_measure(path, num_bytes)
    except OSError as error:
        return read_again(lambda: _open_and_measure(path, num_bytes), error, name=path)


def _open_and_measure(path: str, num_bytes: int) -> Size:
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe must not block
        try:
            # Only special files and empty ones have length 0.
            if not num_bytes and not stat.S_ISREG(os.fstat(file).st_mode):
                raise BadImageError("it is not a file but a folder, a pipe or a device")
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
        for done, (measured, unusable) in enumerate(results, start=1):
            rows.append(measured)
            bad += unusable
            progress(done, len(source.shards))
    columns = np.concatenate(rows).T.copy()
    names = ("labels", "heights", "widths", "orientations", "offsets", "num_bytes")
    counts = [len(measured) for measured in rows]
    shards = np.repeat(np.arange(len(counts), dtype=np.int64), counts)
    arrays = {**dict(zip(names, columns, strict=True)), "shards": shards}
    return {**arrays, "orientations": arrays["orientations"].astype(np.uint8)}, bad


def _measure_shard(source: Source, shard: Shard) -> tuple[IntArray, list[Bad]]:
    """Return label, height, width, orientation, offset and length of every image of a shard."""
    path = source.root / source.split / shard.name
    rows, bad = [], []
    file = os.open(path, os.O_RDONLY)
    try:
        for member in read_shard(path, len(source.classes)):
            try:
                if isinstance(member, Unusable):
                    raise BadImageError(member.reason)
                size = measure_part(file, member.offset, member.num_bytes)
                rows.append((member.label, *size, member.offset, member.num_bytes))
            except BadImageError as error:
                bad.append(Bad(f"{source.split}/{shard.name}/{member.name}", str(error)))
    finally:
        os.close(file)
    return np.array(rows, dtype=np.int64).reshape(-1, 6), bad
