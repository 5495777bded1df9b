"""Pictures in class folders, in a folder, a zip or a tar: their bytes are kept.

What decides is the end of a path, `<split>/<class>/<file>`, so an archive may have one more folder
around everything. Where the archives are one for each split, `train.zip` and `val.tar.gz` say, the
paths in them may leave the split out.
"""

import bz2
import gzip
import lzma
import os
import shutil
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO, Any, NamedTuple

from largebatch.data.headers import BadPictureError, measure_bytes
from largebatch.data.packing import DataSet, Sample, in_parts
from largebatch.data.scan import SHOWN, is_picture, listed, visible
from largebatch.errors import DataError

SPLITS = ("train", "val")

LAYOUT = (
    "expected train/<class>/*.jpg and val/<class>/*.jpg, in a folder, in one zip or tar, or in "
    "train.zip and val.zip (or train.tar, train.tar.gz, ...)"
)

COMPRESSED: dict[bytes, Callable[[Path], Any]] = {
    b"\x1f\x8b": gzip.open,
    b"BZh": bz2.open,
    b"\xfd7zXZ\0": lzma.open,
}
"""What unpacks a file that begins so."""

DAMAGED = (OSError, zipfile.BadZipFile, zlib.error)
"""What is raised over archives that are not as they were."""

Found = tuple[str, Callable[[], bytes]]
"""A file's path in its archive, and what reads it."""


class _Picture(NamedTuple):
    split: str
    class_name: str
    name: str
    where: str
    """The archive and the path in it, for messages."""

    read: Callable[[], bytes]


@contextmanager
def open_archives(source: Path) -> Iterator[DataSet]:
    """List the pictures of `source`: a folder, an archive, or a folder with one for each split."""
    with ExitStack() as stack:
        pictures: list[_Picture] = []
        for archive in _archives(source):
            try:
                files = list(stack.enter_context(_open(archive)))
            except (*DAMAGED, tarfile.TarError, EOFError, lzma.LZMAError) as error:
                raise DataError(f"{archive}: not a whole zip or tar ({error})") from None
            pictures += _pictures(archive, files)
        yield _data_set(source, pictures)


def _archives(source: Path) -> list[Path]:
    if all((source / split).is_dir() for split in SPLITS) or source.is_file():
        return [source]
    found = sorted(source.glob("*")) if source.is_dir() else []
    archives = [path for path in found if path.is_file() and _stem(path) in SPLITS]
    if sorted(map(_stem, archives)) != sorted(SPLITS):
        names = listed([path.name for path in found])
        raise DataError(f"{source}: no pictures for import; {LAYOUT}; found {names}")
    return archives


def _stem(path: Path) -> str:
    return path.name.partition(".")[0]


@contextmanager
def _open(archive: Path) -> Iterator[Iterator[Found]]:
    """Give the files of a folder, a zip or a tar; they can be read until the end."""
    if archive.is_dir():
        yield (
            (path.relative_to(archive).as_posix(), path.read_bytes)
            for split in SPLITS
            for path in (archive / split).glob("*/*")
        )
    elif zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as file:
            infos = [info for info in file.infolist() if not info.is_dir()]
            yield ((info.filename, partial(file.read, info)) for info in infos)
    else:
        with _plain(archive) as plain, tarfile.open(fileobj=plain, mode="r:") as tar:
            members = [member for member in tar if member.isfile() and not member.issparse()]
            number = plain.fileno()
            yield (
                (each.name, partial(os.pread, number, each.size, each.offset_data))
                for each in members
            )


@contextmanager
def _plain(archive: Path) -> Iterator[IO[bytes]]:
    """Open a tar; one that is compressed is unpacked first, so that it can be read by place."""
    with archive.open("rb") as file:
        start = file.read(6)
        file.seek(0)
        unpack = next((call for mark, call in COMPRESSED.items() if start.startswith(mark)), None)
        if unpack is None:
            yield file
            return
        with tempfile.TemporaryFile() as plain:
            with unpack(archive) as packed:
                shutil.copyfileobj(packed, plain)
            plain.seek(0)
            yield plain


def _pictures(archive: Path, files: Sequence[Found]) -> Iterator[_Picture]:
    """Find split and class of every picture; other files and hidden names are ignored."""
    for path, read in files:
        parts = PurePosixPath(path).parts
        if not is_picture(parts[-1]) or not all(map(visible, parts[1:])) or "__MACOSX" in parts:
            continue
        split = parts[-3] if len(parts) > 2 and parts[-3] in SPLITS else _stem(archive)
        if split not in SPLITS or len(parts) < 2:
            raise DataError(f"{archive}: {path} belongs to no split and class; {LAYOUT}")
        yield _Picture(split, parts[-2], parts[-1], f"{archive}: {path}", read)


def _data_set(source: Path, pictures: Sequence[_Picture]) -> DataSet:
    """Sort the pictures as class folders are read, so that a sample has the same number there."""
    splits = {
        split: sorted(
            (each for each in pictures if each.split == split),
            key=lambda each: (os.fsencode(each.class_name), os.fsencode(each.name)),
        )
        for split in SPLITS
    }
    found = {split: {each.class_name for each in splits[split]} for split in SPLITS}
    if found["train"] != found["val"] or not pictures:
        raise DataError(
            f"{source}: the splits must have the same classes; only in train: "
            f"{listed(sorted(found['train'] - found['val']))}; only in val: "
            f"{listed(sorted(found['val'] - found['train']))}; {LAYOUT}"
        )
    classes = sorted(found["train"], key=os.fsencode)
    labels = {name: label for label, name in enumerate(classes)}
    return DataSet(
        classes,
        {split: len(each) for split, each in splits.items()},
        lambda split: _samples(source, splits[split], labels),
    )


def _samples(
    source: Path, pictures: Sequence[_Picture], labels: dict[str, int]
) -> Iterator[Sample]:
    """Read the pictures in order; raise one DataError in the end that names the broken ones."""
    bad: list[str] = []
    total = len(pictures)
    for picture, content in zip(
        pictures, in_parts(lambda row: _read(pictures[row]), total), strict=True
    ):
        if isinstance(content, bytes):
            extension = picture.name.rpartition(".")[2]
            yield Sample(content, extension, labels[picture.class_name])
        else:
            bad.append(f"{picture.where}: {content}")
    if bad:
        shown = "\n  ".join(bad[:SHOWN] + ["..."] * (len(bad) > SHOWN))
        raise DataError(
            f"{source}: {len(bad)} of {total} pictures in {pictures[0].split} cannot be used; mend "
            f"the archive, or unpack it and use: largebatch data index DIR --drop-bad\n  {shown}"
        )


def _read(picture: _Picture) -> bytes | Exception:
    """Return the bytes of a picture that can be used, or why it cannot."""
    try:
        content = picture.read()
        measure_bytes(content)
    except (*DAMAGED, BadPictureError, RuntimeError) as error:
        return error
    return content
