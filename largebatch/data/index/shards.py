"""WebDataset shards: tar files of images and labels, read by offset and written in order.

A sample is the members `KEY.<image's extension>` and `KEY.cls`, its label as text; KEY is what
stands before the first dot of the name. The tar is not compressed, so an image is a range of
bytes of the file and nothing is unpacked. Other members of a sample are ignored. An image or a
label that has no bytes of its own there, a link say, makes the sample one that cannot be used.
"""

import os
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NamedTuple

from largebatch.data.index.folder import EXTENSIONS, visible
from largebatch.errors import DataError

LABEL = "cls"

BLOCK = 512
"""A tar file's unit: headers are one long, contents are padded to a multiple."""

END = 2 * BLOCK
"""How many zeros every tar file ends with, at the least."""

CHUNK = 2**20
"""How many bytes are looked at together."""

LABEL_BYTES = 32
"""How much of a label is read."""

REPACK = "write the tar anew with: tar --dereference --hard-dereference, without --sparse"


class Member(NamedTuple):
    """An image in a shard, by where its bytes lie."""

    name: str
    label: int
    offset: int
    num_bytes: int


class Unusable(NamedTuple):
    """A sample that is not an image with a label, and why."""

    name: str
    reason: str


@dataclass(slots=True)
class _Parts:
    """What was found under one key."""

    key: str
    images: list[tarfile.TarInfo]
    label: str | None = None
    trouble: Unusable | None = None


def members(file: IO[bytes], end: int) -> Iterator[tarfile.TarInfo]:
    """Give the members of the tar that lies from where `file` stands up to `end`; keep none.

    Raises tarfile.ReadError where the tar is not whole. Python's reader takes a header that is
    damaged or missing for the end, and follows lengths below zero backwards for ever.
    """
    with tarfile.open(fileobj=file, mode="r:") as tar:
        for member in tar:
            tar.members = []  # type: ignore[attr-defined]  # else every member is kept in memory
            if member.size < 0 or tar.offset <= member.offset:
                raise tarfile.ReadError(f"the length of {member.name} is below zero")
            if tar.offset > end:
                raise tarfile.ReadError(f"it is cut off in {member.name}")
            yield member
        _require_end(file, tar.offset, end)


def _require_end(file: IO[bytes], start: int, end: int) -> None:
    """Refuse a tar behind whose last member there is anything but zeros, or too few of them."""
    if end - start < END:
        raise tarfile.ReadError("the zeros at its end are missing")
    file.seek(start)
    while start < end and (chunk := file.read(min(CHUNK, end - start))):
        if chunk.strip(b"\0"):
            raise tarfile.ReadError(f"there is no header at byte {start}, or data behind its end")
        start += len(chunk)


def has_bytes(member: tarfile.TarInfo) -> bool:
    """Return whether a member is a file whose bytes lie in one piece at its place in the tar."""
    return member.isfile() and not member.issparse()


def kind_of(member: tarfile.TarInfo) -> str:
    """Return what a member without bytes of its own is, in words."""
    if member.issym() or member.islnk():
        return f"a link to {member.linkname}"
    return "a sparse file" if member.isfile() else "a device or the like"


def read_shard(path: Path, num_classes: int) -> Iterator[Member | Unusable]:
    """Go through a shard's headers in order; raise DataError where it is not a whole tar file."""
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


def _samples(found: Iterable[tarfile.TarInfo], file: int) -> Iterator[_Parts]:
    """Put together the members in a row that have one key."""
    parts: _Parts | None = None
    for member in found:
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
    """Take a member for the image or the label of a sample, or leave it."""
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
