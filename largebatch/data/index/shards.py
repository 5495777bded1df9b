"""WebDataset shards: tar files of images and labels, read by offset and written in order.

A sample is the members `KEY.<image's extension>` and `KEY.cls`, its label as text; KEY is the part
of the name before the first dot. Other members are ignored; a link makes a sample a bad one.
"""

import os
import tarfile
from collections.abc import Iterator
from itertools import groupby
from typing import IO, BinaryIO, NamedTuple

from largebatch.data.index.folder import EXTENSIONS, visible
from largebatch.errors import DataError
from largebatch.formatting import plural

LABEL = "cls"

BLOCK = 512  # block size of a tar file: headers are one block, contents are padded to a multiple
END = 2 * BLOCK  # minimum number of zeros at the end of a tar file
CHUNK = 2**20  # number of bytes read at a time
LABEL_BYTES = 32  # maximum number of bytes of a label


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


def members(file: IO[bytes], end: int) -> Iterator[tarfile.TarInfo]:
    """Yield the members of the tar between two positions; ReadError if it is not whole."""
    with tarfile.open(fileobj=file, mode="r:") as tar:
        for member in tar:
            tar.members = []  # type: ignore[attr-defined]  # or every member stays in memory
            if tar.offset > end:
                raise tarfile.ReadError(f"it is truncated in {member.name}")
            yield member
        start = tar.offset
    # tarfile takes the end of the file for that of the archive, so one that was cut off between
    # two members looks whole.
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


def read_shard(file: BinaryIO, num_classes: int, *, name: str) -> Iterator[Member | Unusable]:
    """Yield the samples of an open shard in order; raise DataError if it is not a whole tar file.

    The file may be read at other positions between two samples. `name` is for messages.
    """
    try:
        end = file.seek(0, os.SEEK_END)
        file.seek(0)
        shown = (m for m in members(file, end) if visible(m.name.rpartition("/")[2]))
        # Members of a sample follow each other: this is what makes a tar a WebDataset.
        for key, parts in groupby((m for m in shown if not m.isdir()), _key):
            yield _sample(key, list(parts), file, num_classes)
    except OSError as error:
        raise DataError(f"{name}: cannot be read ({error.strerror or error})") from error
    except (tarfile.TarError, ValueError, OverflowError) as error:
        raise DataError(
            f"{name}: not a whole, uncompressed tar file ({error}); copy or pack it again"
        ) from None


def _key(member: tarfile.TarInfo) -> str:
    folder, slash, name = member.name.rpartition("/")
    return folder + slash + name.partition(".")[0]


def _sample(
    key: str, parts: list[tarfile.TarInfo], file: BinaryIO, num_classes: int
) -> Member | Unusable:
    extensions = [(part, part.name[len(key) + 1 :]) for part in parts]
    images = [part for part, extension in extensions if f".{extension.lower()}" in EXTENSIONS]
    labels = [part for part, extension in extensions if extension == LABEL]
    for part in (*images, *labels):
        if not has_bytes(part):
            return Unusable(part.name, "it is a link or a sparse file, expected a whole file")
    if len(images) != 1:
        return Unusable(key, f"it has {plural(len(images), 'image')}, expected 1")
    (image,) = images
    if not labels:
        return Unusable(image.name, f"there is no {key}.{LABEL} with its label")
    # The last of equal names wins, as when a tar is unpacked.
    file.seek(labels[-1].offset_data)
    content = file.read(min(labels[-1].size, LABEL_BYTES))
    label = content.decode("ascii", errors="replace").strip()
    if not label.isdecimal() or int(label) >= num_classes:
        reason = f"its label is {label!r}, expected a number from 0 to {num_classes - 1}"
        return Unusable(image.name, reason)
    return Member(image.name, int(label), image.offset_data, image.size)
