"""Random access to the files of a folder, a zip or a tar by path.

A link in a tar is read as the file that it points to, and a tar in a tar as a folder, as in
ImageNet's archives. Any other special file with an image's name is an error, so no image is lost
silently. Only the path and position of each file stay in memory: there may be a million.

An unreadable file and a damaged one need different remedies. Python's archive modules raise
OSError for both; only an error of the system has an error number.
"""

import bz2
import gzip
import io
import lzma
import os
import posixpath
import struct
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

from largebatch.data.index.folder import files_below, is_image, is_system, visible
from largebatch.data.index.headers import MAX_BYTES
from largebatch.data.index.shards import CHUNK, has_bytes, kind_of, members
from largebatch.errors import DataError

_MAX_RATIO = 100  # of an archive's unpacked to packed bytes; images hardly compress
_ALWAYS = 2**28  # unpacked bytes that are allowed whatever the ratio

COMPRESSED: dict[bytes, Callable[[IO[bytes]], Any]] = {
    b"\x1f\x8b": gzip.open,
    b"BZh": bz2.open,
    b"\xfd7zXZ\0": lzma.open,
}
"""Function that unpacks a file, by its first bytes."""

DAMAGED = (
    OSError,
    EOFError,
    RuntimeError,  # from zipfile, for passwords and unknown methods
    ValueError,
    OverflowError,
    struct.error,
    zlib.error,
    lzma.LZMAError,
    tarfile.TarError,
    zipfile.BadZipFile,
)
"""Exceptions of the archive modules for unreadable or damaged files."""


class Files(NamedTuple):
    """The files of one archive or folder, by path."""

    archive: Path
    names: list[str]
    read: Callable[[str], bytes]


@contextmanager
def open_files(archive: Path, *, below: tuple[str, ...], scratch: Path) -> Iterator[Files]:
    """Yield the files of a zip, a tar, or of the folders `below` a folder ("" is all of it).

    A compressed tar is unpacked into the folder `scratch` for random access. Raises DataError or
    one of DAMAGED.
    """
    if archive.is_dir():
        names = [name for folder in below for name in _walk(archive, folder, ())]
        yield Files(archive, names, lambda name: (archive / name).read_bytes())
        return
    with archive.open("rb") as file:
        start = file.read(6)
        file.seek(0)
        unpack = next((call for mark, call in COMPRESSED.items() if start.startswith(mark)), None)
        if start.startswith(b"PK"):
            with _open_zip(file) as opened:
                yield _zip_files(archive, opened)
        elif unpack is None:
            yield _tar_files(archive, file)
        else:
            with unpack(file) as packed, _unpacked(archive, packed, scratch) as plain:
                yield _tar_files(archive, plain)


def _walk(root: Path, name: str, above: tuple[tuple[int, int], ...]) -> Iterator[str]:
    """Yield the paths, from the root, of all files in a folder and below, following links."""
    status = (root / name).stat()
    identity = status.st_dev, status.st_ino
    if identity in above:
        raise DataError(f"{root / name}: links back to a folder that contains it; remove the link")
    with os.scandir(root / name) as entries:
        for entry in entries:
            path = f"{name}/{entry.name}" if name else entry.name
            if is_system(entry.name):  # even if it is not readable
                yield from (file for _, file in files_below(root, path))
            elif not visible(entry.name):
                continue
            elif entry.is_dir():
                yield from _walk(root, path, (*above, identity))
            elif entry.is_file():
                yield path
            elif is_image(entry.name):
                raise DataError(f"{root / path}: is a pipe, a device or a broken link, not a file")


def _open_zip(file: IO[bytes]) -> zipfile.ZipFile:
    # Without a flag for UTF-8 a name should be in code page 437, but Info-ZIP and macOS write UTF-8
    # without the flag; other text is hardly ever valid UTF-8 by chance.
    try:
        return zipfile.ZipFile(file, metadata_encoding="utf-8")
    except UnicodeDecodeError:
        file.seek(0)
        return zipfile.ZipFile(file)


def _zip_files(archive: Path, file: zipfile.ZipFile) -> Files:
    _require_no_bomb(archive, sum(info.file_size for info in file.infolist()))
    places: dict[str, zipfile.ZipInfo] = {}
    seen: set[str] = set()
    for info in file.infolist():
        if not info.is_dir():
            places[_new(archive, info.filename, seen)] = info

    def read(name: str) -> bytes:
        num_bytes = places[name].file_size
        if num_bytes > MAX_BYTES:
            raise ValueError(f"it has {num_bytes:,} bytes unpacked, expected at most {MAX_BYTES:,}")
        return file.read(places[name])

    return Files(archive, list(places), read)


def _clean(path: str) -> str:
    return posixpath.normpath(f"/{path}").lstrip("/")


def _new(archive: Path, path: str, seen: set[str]) -> str:
    name = _clean(path)
    if is_image(posixpath.basename(name)) and name in seen:
        raise DataError(
            f"{archive}: there are two files {name}; unpack the archive, keep one of them and "
            "import the folder"
        )
    seen.add(name)
    return name


def _tar_files(archive: Path, file: IO[bytes]) -> Files:
    places: dict[str, tuple[int, int]] = {}
    links: dict[str, str] = {}
    seen: set[str] = set()
    length = file.seek(0, os.SEEK_END)
    file.seek(0)

    def add(end: int, folder: str) -> None:
        for member in members(file, end):
            path = f"{folder}/{member.name}"
            if member.isdir():
                continue
            if member.issym() or member.islnk():
                beside = posixpath.dirname(path) if member.issym() else folder
                target = posixpath.join(beside, member.linkname)
                links[_new(archive, path, seen)] = _clean(target)
            elif not has_bytes(member):
                if is_image(posixpath.basename(path)):
                    raise DataError(
                        f"{archive}: {path.lstrip('/')} is {kind_of(member)}; unpack the archive, "
                        "make it a file and import the folder"
                    )
            elif path.endswith(".tar") and not folder:
                file.seek(member.offset_data)
                try:
                    add(member.offset_data + member.size, path[:-4])
                except tarfile.ReadError as error:
                    raise tarfile.ReadError(f"{path.lstrip('/')} in it: {error}") from None
            else:
                places[_new(archive, path, seen)] = member.offset_data, member.size

    add(length, "")
    _resolve(archive, places, links)
    number = file.fileno()

    def read(name: str) -> bytes:
        offset, num_bytes = places[name]
        return os.pread(number, num_bytes, offset)

    return Files(archive, list(places), read)


def _resolve(archive: Path, places: dict[str, tuple[int, int]], links: dict[str, str]) -> None:
    """Add the links to the places, each with that of the file it points to."""
    for name, target in links.items():
        last, visited = target, {name}
        while last in links and last not in visited:
            visited.add(last)
            last = links[last]
        if last in places:
            places[name] = places[last]
        elif visible(posixpath.basename(name)) and not is_system(name):
            raise DataError(
                f"{archive}: {name} is a link to {target}, and there is no such file in the "
                "archive; unpack the archive, fix the link and import the folder"
            )


def _require_no_bomb(archive: Path, unpacked: int) -> None:
    """Raise DataError if an archive unpacks to far more bytes than images do."""
    packed = archive.stat().st_size
    if unpacked > max(_ALWAYS, _MAX_RATIO * packed):
        raise DataError(
            f"{archive}: {packed:,} bytes would unpack to more than {unpacked - 1:,}, and images "
            "hardly compress (a decompression bomb?); unpack it yourself and import the folder"
        )


@contextmanager
def _unpacked(archive: Path, packed: IO[bytes], scratch: Path) -> Iterator[IO[bytes]]:
    """Unpack into an unnamed file in `scratch`; the system's temporary folder is often small."""
    with unpacking(archive, scratch):
        scratch.mkdir(parents=True, exist_ok=True)
        raw = tempfile.TemporaryFile(buffering=0, dir=scratch)  # noqa: SIM115 -- closed below
    with raw:  # unbuffered, so that closing has nothing left to write
        while chunk := packed.read(CHUNK):
            _require_no_bomb(archive, raw.tell() + len(chunk))
            with unpacking(archive, scratch):
                while chunk:
                    chunk = chunk[raw.write(chunk) :]
        with io.BufferedReader(raw) as plain:
            yield plain


@contextmanager
def unpacking(archive: Path, scratch: Path) -> Iterator[None]:
    """Convert an OSError of writing into `scratch` to a DataError."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"{scratch}: {archive} cannot be unpacked there ({error.strerror}), beside the output; "
            f"make room for both, or choose another place with --out"
        ) from error


def fault(path: Path, error: Exception, *, expected: str) -> DataError:
    """Return the DataError for a file that is unreadable, incomplete or of another format."""
    if isinstance(error, OSError) and error.errno is not None:
        return DataError(f"{error.filename or path}: cannot be read ({error.strerror})")
    return DataError(f"{path}: not a whole {expected} ({reason(error)}); download it again")


def reason(error: Exception) -> str:
    """Return an error's message, or its type if it has none."""
    return str(error) or type(error).__name__
