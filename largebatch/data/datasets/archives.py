"""Random access to the files of a folder, a zip or an uncompressed tar by path.

A tar in a tar is read as a folder, as in ImageNet's archives. A link or another special file with
an image's name is an error, so no image is lost silently. Only the path and position of each file
stay in memory: there may be a million.
"""

import lzma
import os
import posixpath
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NamedTuple

from largebatch.data.index.folder import is_image, visible
from largebatch.data.index.shards import has_bytes, members
from largebatch.errors import DataError

_MAX_RATIO = 100  # of an archive's unpacked to packed bytes; images hardly compress
_ALWAYS = 2**28  # unpacked bytes that are allowed whatever the ratio

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
def open_files(archive: Path) -> Iterator[Files]:
    """Yield the files of a folder, a zip or an uncompressed tar.

    Raises DataError or one of DAMAGED.
    """
    if archive.is_dir():
        yield Files(archive, list(_walk(archive)), lambda name: (archive / name).read_bytes())
        return
    with archive.open("rb") as file:
        start = file.read(2)
        length = file.seek(0, os.SEEK_END)
        file.seek(0)
        if start == b"PK":
            with zipfile.ZipFile(file) as opened:
                infos = {_clean(i.filename): i for i in opened.infolist() if not i.is_dir()}
                unpacked = sum(info.file_size for info in infos.values())
                if unpacked > max(_ALWAYS, _MAX_RATIO * length):
                    raise DataError(
                        f"{archive}: {length:,} bytes would unpack to {unpacked:,}, and images "
                        "hardly compress (a decompression bomb?)"
                    )
                yield Files(archive, list(infos), lambda name: opened.read(infos[name]))
        else:
            places = dict(_tar_places(archive, file, end=length))
            number = file.fileno()
            yield Files(archive, list(places), lambda name: os.pread(number, *places[name]))


def _walk(root: Path) -> Iterator[str]:
    def fail(error: OSError) -> None:
        raise error

    for place, folders, names in os.walk(root, followlinks=True, onerror=fail):
        folders[:] = filter(visible, folders)
        yield from (os.path.relpath(f"{place}/{name}", root) for name in names)


def _clean(path: str) -> str:
    return posixpath.normpath(f"/{path}").lstrip("/")


def _tar_places(
    archive: Path, file: IO[bytes], *, end: int, folder: str = ""
) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield the path of each file, and the number of its bytes and their position."""
    for member in members(file, end):
        path = _clean(f"{folder}/{member.name}")
        if member.isdir():
            continue
        if not has_bytes(member):
            if is_image(posixpath.basename(path)):
                raise DataError(
                    f"{archive}: {path} is a link or another special file; unpack the archive and "
                    "import the folder"
                )
        elif path.endswith(".tar") and not folder:
            file.seek(member.offset_data)
            inner = member.offset_data + member.size
            yield from _tar_places(archive, file, end=inner, folder=path[:-4])
        else:
            yield path, (member.size, member.offset_data)


def fault(path: Path, error: Exception, *, expected: str) -> DataError:
    """Return the DataError for a file that is unreadable, incomplete or of another format."""
    # Python's archive modules raise OSError for damage too, without an error number.
    if isinstance(error, OSError) and error.errno is not None:
        return DataError(f"{error.filename or path}: cannot be read ({error.strerror})")
    return DataError(f"{path}: not a whole {expected} ({error})")
