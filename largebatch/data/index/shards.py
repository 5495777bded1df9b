"""WebDataset shards: tar files of images and labels, read by offset and written in order.

A sample is the members `KEY.<image's extension>` and `KEY.cls`, its label as text; KEY is the part
of the name before the first dot. The tar is not compressed, so an image is a range of bytes of the
file and nothing is unpacked. Other members of a sample are ignored. A sample whose image or label
has no bytes in the tar, such as a link, is a bad one.
"""

import os
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NamedTuple

from largebatch.data.index.folder import EXTENSIONS, is_system, visible
from largebatch.errors import DataError

LABEL = "cls"

BLOCK = 512  # block size of a tar file: headers are one block, contents are padded to a multiple
END = 2 * BLOCK  # minimum number of zeros at the end of a tar file
CHUNK = 2**20  # number of bytes read at a time
LABEL_BYTES = 32  # maximum number of bytes of a label
REPACK = "create the tar with: tar --dereference --hard-dereference, without --sparse"


class Member(NamedTuple):
    """An image in a shard, with the position of its bytes."""

    name: str
    label: int
    offset: int
    num_bytes: int


class Unusable(NamedTuple):
    """A sample that cannot be used, and the reason."""

    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


@dataclass(slots=True)
class _Parts:
    key: str
    images: list[tarfile.TarInfo]
    label: str | None = None
    trouble: Unusable | None = None


def members(file: IO[bytes], end: int) -> Iterator[tarfile.TarInfo]:
    """Yield the members of the tar between the current position of `file` and `end`.

    Raises tarfile.ReadError if the tar is not whole. Python's reader treats a damaged or missing
    header as the end, and loops forever on negative lengths.
    """
    with tarfile.open(fileobj=file, mode="r:") as tar:
        for member in tar:
            tar.members = []  # type: ignore[attr-defined]  # or every member stays in memory
            if member.size < 0 or tar.offset <= member.offset:
                raise tarfile.ReadError(f"the length of {member.name} is negative")
            if tar.offset > end:
                raise tarfile.ReadError(f"it is truncated in {member.name}")
            yield member
        _require_end(file, tar.offset, end)


def _require_end(file: IO[bytes], start: int, end: int) -> None:
    """Raise ReadError unless the last member is followed by zeros only, and by enough of them."""
    if end - start < END:
        raise tarfile.ReadError("the zeros at its end are missing")
    file.seek(start)
    while start < end and (chunk := file.read(min(CHUNK, end - start))):
        if chunk.strip(b"\0"):
            raise tarfile.ReadError(f"there is no header at byte {start}, or data after its end")
        start += len(chunk)


def has_bytes(member: tarfile.TarInfo) -> bool:
    """Return True if a member is a file whose bytes are contiguous in the tar."""
    return member.isfile() and not member.issparse()


def kind_of(member: tarfile.TarInfo) -> str:
    """Return the type of a member without bytes, in words."""
    if member.issym() or member.islnk():
        return f"a link to {member.linkname}"
    return "a sparse file" if member.isfile() else "a special file"


def read_shard(path: Path, num_classes: int) -> Iterator[Member | Unusable]:
    """Yield a shard's samples in order; raise DataError if it is not a whole tar file."""
    try:
        with path.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(0)
            for parts in _samples(members(file, end), file.fileno()):
                yield _usable_member(parts, num_classes)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error
    except (tarfile.TarError, ValueError, OverflowError) as error:
        raise DataError(
            f"{path}: not a whole, uncompressed tar file ({error}); copy or pack it again"
        ) from None


def _samples(listed: Iterable[tarfile.TarInfo], file: int) -> Iterator[_Parts]:
    parts: _Parts | None = None
    for member in listed:
        folder, slash, name = member.name.rpartition("/")
        if member.isdir() or not visible(name):
            continue
        stem, _, extension = name.partition(".")
        key = folder + slash + stem
        if parts is None or parts.key != key:
            if parts is not None:
                yield parts
            parts = _Parts(key, [])
        _add(parts, member, extension, file)
    if parts is not None:
        yield parts


def _add(parts: _Parts, member: tarfile.TarInfo, extension: str, file: int) -> None:
    image = f".{extension.lower()}" in EXTENSIONS
    if not image and extension != LABEL:
        return
    if not has_bytes(member):
        parts.trouble = Unusable(
            member.name, f"it is {kind_of(member)}, expected a whole file; {REPACK}"
        )
    elif image:
        parts.images.append(member)
    else:
        content = os.pread(file, min(member.size, LABEL_BYTES), member.offset_data)
        parts.label = content.decode("ascii", errors="replace").strip()


def _usable_member(parts: _Parts, num_classes: int) -> Member | Unusable:
    if parts.trouble is not None:
        return parts.trouble
    if is_system(parts.key):
        return Unusable(parts.key, "it is in a folder of the system: a thumbnail or a deleted file")
    if len(parts.images) != 1:
        return Unusable(parts.key, f"it has {len(parts.images)} images, expected 1")
    image, label = parts.images[0], parts.label
    if label is None:
        return Unusable(image.name, f"there is no {parts.key}.{LABEL} with its label")
    if not label.isdecimal() or int(label) >= num_classes:
        return Unusable(
            image.name, f"its label is {label!r}, expected a number from 0 to {num_classes - 1}"
        )
    return Member(image.name, int(label), image.offset_data, image.size)
