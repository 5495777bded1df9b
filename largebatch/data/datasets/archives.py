"""Random access to the files of a folder, a zip or a tar by path.

A link in an archive stands for the file that it points to, and a tar in a tar for a folder, as in
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
import stat
import struct
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Generic, NamedTuple, TypeVar

from largebatch.data.index.build import MAX_BYTES
from largebatch.data.index.folder import is_image, is_system, visible
from largebatch.data.index.ignored import files_below
from largebatch.data.index.shards import CHUNK, has_bytes, kind_of, members
from largebatch.errors import DataError

ZIP = b"PK"
"""First bytes of a zip file."""

UTF8_FLAG = 0x800
"""Flag of a file in a zip: its name is UTF-8."""

COMPRESSED: dict[bytes, Callable[[IO[bytes]], Any]] = {
    b"\x1f\x8b": gzip.open,
    b"BZh": bz2.open,
    b"\xfd7zXZ\0": lzma.open,
}
"""Function that unpacks a file, by its first bytes."""

MAX_PATH = 4096
"""Maximum length in bytes of a link's target, as in Linux."""

MAX_RATIO = 100
"""Maximum ratio of an archive's unpacked to packed bytes; images hardly compress."""

ALWAYS = 2**28
"""Unpacked bytes that are always allowed, whatever the ratio."""

MAX_TARS = 4
"""Maximum nesting depth of tars; ImageNet's is two."""

P = TypeVar("P")

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
        if start.startswith(ZIP):
            with zipfile.ZipFile(file) as opened:
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
                raise DataError(
                    f"{root / path}: is not a file but a pipe, a device or a broken link"
                )


class _Listing(Generic[P]):
    """Positions of an archive's files by path, collected while it is listed."""

    def __init__(self, archive: Path) -> None:
        self._archive = archive
        self._places: dict[str, P] = {}
        self._links: dict[str, str] = {}

    def add(self, path: str, place: P) -> None:
        """Add a file."""
        self._places[self._new(path)] = place

    def add_link(self, path: str, target: str) -> None:
        """Add a link to another path of the archive."""
        self._links[self._new(path)] = _clean(target)

    def refuse(self, path: str, kind: str) -> None:
        """Raise DataError if a special file has the name of an image."""
        if is_image(_last(path)):
            raise DataError(f"{self._archive}: {path} is {kind}; {self._unpack('make it a file')}")

    def places(self) -> Mapping[str, P]:
        """Return the positions of all files; a link has that of the file it points to."""
        for name, target in self._links.items():
            last, visited = target, {name}
            while last in self._links and last not in visited:
                visited.add(last)
                last = self._links[last]
            if last in self._places:
                self._places[name] = self._places[last]
            elif visible(_last(name)) and not is_system(name):
                raise DataError(
                    f"{self._archive}: {name} is a link to {target}, and there is no such file in "
                    f"the archive; {self._unpack('fix the link')}"
                )
        return self._places

    def _new(self, path: str) -> str:
        if "\0" in path:
            shown = repr(path.lstrip("/"))
            raise DataError(
                f"{self._archive}: {shown} is not a valid file name, because it contains a NUL; "
                f"{self._unpack('rename it')}"
            )
        name = _clean(path)
        if is_image(_last(name)) and (name in self._places or name in self._links):
            raise DataError(
                f"{self._archive}: there are two files {name}; {self._unpack('keep one of them')}"
            )
        return name

    @staticmethod
    def _unpack(then: str) -> str:
        return f"unpack the archive, {then} and import the folder"


def _clean(path: str) -> str:
    """Return a path without dots, relative to the root of the archive."""
    return posixpath.normpath(f"/{path}").lstrip("/")


def _last(path: str) -> str:
    return path.rpartition("/")[2]


def _beside(path: str, target: str) -> str:
    """Return the path that a symbolic link at `path` points to."""
    return posixpath.join(posixpath.dirname(path), target)


def require_no_bomb(archive: Path, unpacked: int) -> None:
    """Raise DataError if an archive unpacks to far more bytes than images do."""
    packed = archive.stat().st_size
    if unpacked > max(ALWAYS, MAX_RATIO * packed):
        raise DataError(
            f"{archive}: {packed:,} bytes would unpack to more than {unpacked - 1:,}, and images "
            "hardly compress: this looks like an attack (a decompression bomb); if it is not, "
            "unpack the archive and import the folder"
        )


def _zip_files(archive: Path, file: zipfile.ZipFile) -> Files:
    require_no_bomb(archive, sum(info.file_size for info in file.infolist()))
    listing = _Listing[zipfile.ZipInfo](archive)
    for info in file.infolist():
        name = _name(info)
        if stat.S_ISLNK(info.external_attr >> 16):  # Unix's file type
            listing.add_link(name, _beside(name, _target(file, info)))
        elif not name.endswith("/"):
            listing.add(name, info)
    places = listing.places()

    def read(name: str) -> bytes:
        num_bytes = places[name].file_size
        if num_bytes > MAX_BYTES:
            raise ValueError(f"it has {num_bytes:,} bytes unpacked, expected at most {MAX_BYTES:,}")
        return file.read(places[name])

    return Files(archive, list(places), read)


def _name(info: zipfile.ZipInfo) -> str:
    """Return the path of a file in a zip.

    Without the UTF-8 flag a name should be in code page 437, and zipfile decodes it so. Info-ZIP
    and macOS write UTF-8 without the flag; other text is hardly ever valid UTF-8 by chance.
    """
    name = info.orig_filename if "\0" in info.orig_filename else info.filename
    if info.flag_bits & UTF8_FLAG:
        return name
    try:
        return name.encode("cp437").decode()
    except UnicodeError:
        return name


def _target(file: zipfile.ZipFile, link: zipfile.ZipInfo) -> str:
    if link.file_size > MAX_PATH:
        raise ValueError(f"{link.filename} is a link of {link.file_size:,} bytes")
    return os.fsdecode(file.read(link))


def _tar_files(archive: Path, file: IO[bytes]) -> Files:
    listing = _Listing[tuple[int, int]](archive)
    length = file.seek(0, os.SEEK_END)
    file.seek(0)
    _add_tar(listing, file, length, "")
    places, number = listing.places(), file.fileno()

    def read(name: str) -> bytes:
        offset, num_bytes = places[name]
        return os.pread(number, num_bytes, offset)

    return Files(archive, list(places), read)


def _add_tar(
    listing: _Listing[tuple[int, int]], file: IO[bytes], end: int, folder: str, *, depth: int = 1
) -> None:
    """List the tar between the current position of `file` and `end`, as the content of `folder`."""
    for member in members(file, end):
        path = f"{folder}/{member.name}"
        if member.isdir():
            continue
        if member.issym():
            listing.add_link(path, _beside(path, member.linkname))
        elif member.islnk():
            listing.add_link(path, f"{folder}/{member.linkname}")
        elif not has_bytes(member):
            listing.refuse(path.lstrip("/"), kind_of(member))
        elif path.endswith(".tar"):
            _add_tar_in_tar(listing, file, member, path, depth=depth + 1)
        else:
            listing.add(path, (member.offset_data, member.size))


def _add_tar_in_tar(
    listing: _Listing[tuple[int, int]],
    file: IO[bytes],
    member: tarfile.TarInfo,
    path: str,
    *,
    depth: int,
) -> None:
    if depth > MAX_TARS:
        raise tarfile.ReadError(f"more than {MAX_TARS} tars are nested")
    file.seek(member.offset_data)
    try:
        _add_tar(listing, file, member.offset_data + member.size, path[:-4], depth=depth)
    except tarfile.ReadError as error:
        raise tarfile.ReadError(f"{path.lstrip('/')} in it: {error}") from None


@contextmanager
def _unpacked(archive: Path, packed: IO[bytes], scratch: Path) -> Iterator[IO[bytes]]:
    """Unpack into an unnamed file in `scratch`; the system's temporary folder is often small."""
    with unpacking(archive, scratch):
        scratch.mkdir(parents=True, exist_ok=True)
        raw = tempfile.TemporaryFile(buffering=0, dir=scratch)  # noqa: SIM115 -- closed below
    with raw:  # unbuffered, so that closing has nothing left to write
        while chunk := packed.read(CHUNK):
            require_no_bomb(archive, raw.tell() + len(chunk))
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
