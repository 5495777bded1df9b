"""WebDataset shards: tar files of pictures and labels, read by offset and written in order.

A sample is the members `KEY.<picture's extension>` and `KEY.cls`, its label as text; KEY is what
stands before the first dot of the name. The tar is not compressed, so a picture is a range of
bytes of the file and nothing is unpacked. Other members of a sample are ignored.
"""

import io
import os
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from largebatch.data.scan import EXTENSIONS, visible
from largebatch.errors import DataError

LABEL = "cls"

BLOCK = 512
"""A tar file's unit: headers are one long, contents are padded to a multiple."""


END = bytes(2 * BLOCK)
"""What every tar file ends with."""

LABEL_BYTES = 32
"""How much of a label is read."""


class Member(NamedTuple):
    """A picture in a shard, by where its bytes lie."""

    name: str
    label: int
    offset: int
    num_bytes: int


class Unusable(NamedTuple):
    """A sample that is not a picture with a label, and why."""

    name: str
    reason: str


@dataclass(slots=True)
class _Parts:
    """What was found under one key."""

    key: str
    pictures: list[tarfile.TarInfo]
    label: str | None = None


def read_shard(path: Path, num_classes: int) -> Iterator[Member | Unusable]:
    """Go through a shard's headers in order; raise DataError where it is not a whole tar file."""
    try:
        with path.open("rb") as file, tarfile.open(fileobj=file, mode="r:") as tar:
            for parts in _samples(tar, file.fileno()):
                yield _judge(parts, num_classes)
            length = file.seek(0, os.SEEK_END)
            if os.pread(file.fileno(), len(END), length - len(END)) != END:
                raise tarfile.ReadError("the zeros at its end are missing")
    except (tarfile.TarError, OSError) as error:
        raise DataError(
            f"{path}: not a whole, uncompressed tar file ({error}); copy or pack it again"
        ) from None


def _samples(tar: tarfile.TarFile, file: int) -> Iterator[_Parts]:
    """Put together the members in a row that have one key."""
    parts: _Parts | None = None
    for member in tar:
        tar.members = []  # type: ignore[attr-defined]  # else every member is kept in memory
        folder, slash, name = member.name.rpartition("/")
        if not member.isfile() or not visible(name):
            continue
        stem, _, extension = name.partition(".")
        key = folder + slash + stem
        if parts is None or parts.key != key:
            if parts is not None:
                yield parts
            parts = _Parts(key, [])
        if extension == LABEL:
            content = os.pread(file, min(member.size, LABEL_BYTES), member.offset_data)
            parts.label = content.decode("ascii", errors="replace").strip()
        elif f".{extension.lower()}" in EXTENSIONS:
            parts.pictures.append(member)
    if parts is not None:
        yield parts


def _judge(parts: _Parts, num_classes: int) -> Member | Unusable:
    if len(parts.pictures) != 1:
        return Unusable(parts.key, f"it has {len(parts.pictures)} pictures, expected 1")
    picture, label = parts.pictures[0], parts.label
    if label is None:
        return Unusable(picture.name, f"there is no {parts.key}.{LABEL} with its label")
    if not label.isdecimal() or int(label) >= num_classes:
        return Unusable(
            picture.name, f"its label is {label!r}, expected a number from 0 to {num_classes - 1}"
        )
    return Member(picture.name, int(label), picture.offset_data, picture.size)


class ShardWriter:
    """Writes samples into `folder/000000.tar` and so on, none longer than `shard_bytes`.

    The same samples give the same bytes: owners, modes and times are left out. A sample that is
    longer than that alone has a shard of its own. Used as a context manager.
    """

    def __init__(self, folder: Path, *, shard_bytes: int) -> None:
        if shard_bytes < 1:
            raise ValueError(f"shard_bytes must be at least 1, got {shard_bytes}")
        self._folder = folder
        self._limit = shard_bytes
        self._tar: tarfile.TarFile | None = None
        self._used = 0
        self.num_samples = 0
        self.num_shards = 0

    def add(self, content: bytes, *, extension: str, label: int) -> None:
        """Write one encoded picture with its label; `extension` is without a dot."""
        files = {extension.lower(): content, LABEL: str(label).encode("ascii")}
        length = sum(BLOCK + _padded(len(each)) for each in files.values())
        end = tarfile.RECORDSIZE  # with which tarfile ends a file, at the most
        if self._tar is None or self._used + length + end > self._limit:
            self._begin()
        assert self._tar is not None
        for name, each in files.items():
            member = tarfile.TarInfo(f"{self.num_samples:09d}.{name}")
            member.size = len(each)
            self._tar.addfile(member, io.BytesIO(each))
        self._used += length
        self.num_samples += 1

    def close(self) -> None:
        """End the last shard."""
        if self._tar is not None:
            self._tar.close()
            self._tar = None

    def _begin(self) -> None:
        self.close()
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"{self.num_shards:06d}.tar"
        self._tar = tarfile.open(path, "x", format=tarfile.USTAR_FORMAT)  # noqa: SIM115 -- closed by close()
        self._used = 0
        self.num_shards += 1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _padded(length: int) -> int:
    return -(-length // BLOCK) * BLOCK
