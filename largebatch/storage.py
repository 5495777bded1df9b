"""Files that are there whole or not at all, the cache folder, and how reads are tried again."""

import errno
import fcntl
import functools
import logging
import os
import shutil
import time
import uuid
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple, Self, TypeVar

import platformdirs

from largebatch.errors import DataError, LargebatchError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

THREADS = 16
"""More than cores: over a network a thread waits most of the time."""

PART = 256
"""Images that a thread takes at a time."""

PAUSES = (0.1, 1.0, 5.0)
"""Seconds before each further attempt at a read that failed, here and in a run."""

OF_THE_FILE = (
    errno.EACCES,
    errno.EISDIR,
    errno.ELOOP,
    errno.ENOENT,
    errno.ENOTDIR,
    errno.ENXIO,
    errno.EPERM,
)
"""Errors that are the same next time: who may read a file, where a link leads, what it is."""

CHUNK = 2**18
"""Bytes that are checked at a time: few enough to stay in a processor's cache."""

CHECKSUM_BYTES = 4

Progress = Callable[[int, int], None]
"""Called with the number of files that are done and of all, after every few."""


def silent(_done: int, _total: int) -> None:
    """Show no progress."""


_PARTIAL = ".partial"
"""Ends the name of what is being written."""

T = TypeVar("T")

_LOG = logging.getLogger(__name__)


def write_whole(path: Path, content: bytes) -> None:
    """Write a file, and its folder, so that the file is there whole or not at all."""
    with whole_file(path) as file:
        file.write(content)


def write_html(path: Path, html: str) -> Path:
    """Write a page whole or not at all; return its path.

    Raises LargebatchError where it cannot be written.
    """
    try:
        write_whole(path, html.encode())
    except OSError as error:
        raise LargebatchError(
            f"{path}: the page cannot be written: {error.strerror}; choose another place with --out"
        ) from None
    return path


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Give a file to write to, which is at `path` when the block ends, or nowhere if it fails.

    It is on the disk before it has its name, and its name before this returns, so after a loss of
    power too it is whole or what was there before.
    """
    if not path.name:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}{_PARTIAL}")
    try:
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
        _sync_folder(path.parent)
    finally:
        partial.unlink(missing_ok=True)


def remove_leftovers(*folders: Path) -> None:
    """Remove what writers that were killed left in these folders, of which no other is at work."""
    for folder in folders:
        for path in find_leftovers(folder):
            path.unlink(missing_ok=True)


def find_leftovers(folder: Path) -> Iterator[Path]:
    """Yield the files that writers have not finished."""
    return folder.glob(f".*{_PARTIAL}")


def _sync_folder(folder: Path) -> None:
    opened = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # there are file systems that cannot
            os.fsync(opened)
    finally:
        os.close(opened)


def checksum(parts: "Iterable[ReadableBuffer]") -> bytes:
    """Return the CRC-32 of all these bytes in their order, as CHECKSUM_BYTES bytes."""
    total = functools.reduce(lambda crc, part: zlib.crc32(part, crc), parts, 0)
    return total.to_bytes(CHECKSUM_BYTES, "little")


def is_undamaged(path: Path, *, begin: bytes = b"") -> bool:
    """Return whether a file ends with the checksum of `begin` and of all that precedes its end.

    It is read, not mapped: where a disk fails, a read raises OSError and a mapping kills the
    process; and pages that are mapped would count as this process's memory.
    """
    with path.open("rb", buffering=0) as file:
        length = os.fstat(file.fileno()).st_size - CHECKSUM_BYTES
        sizes = (min(CHUNK, length - start) for start in range(0, length, CHUNK))
        found = checksum(chain([begin], map(file.read, sizes)))
        return found == file.read()


class Mapped(NamedTuple):
    """A file that is mapped into memory, as it was then.

    Who touches what was cut off is killed by the system without a word, so this is asked before.
    """

    path: Path
    inode: tuple[int, int]
    length: int

    @classmethod
    def of(cls, path: Path) -> Self | None:
        """Note what a file is now; None: it is gone, and stays mapped whole."""
        try:
            found = path.stat()
        except OSError:
            return None
        return cls(path, (found.st_dev, found.st_ino), found.st_size)

    def require_whole(self) -> None:
        """Raise DataError if the file is shorter now; one that was replaced stays mapped whole."""
        try:
            found = self.path.stat()
        except OSError:
            return
        if (found.st_dev, found.st_ino) == self.inode and found.st_size < self.length:
            raise DataError(
                f"{self.path}: it has {found.st_size:,} of its {self.length:,} bytes: it was cut "
                "off while it was used; start again, and it is made anew"
            )


def read_again(read: Callable[[], T], error: OSError, *, name: str) -> T:
    """Repeat a read that raised `error`, after each of PAUSES; raise DataError if all fail."""
    for pause in PAUSES:
        _LOG.warning("%s: cannot be read (%s); trying again", name, error)
        time.sleep(pause)
        try:
            return read()
        except OSError as another:
            error = another
    raise DataError(
        f"{name}: cannot be read ({error.strerror or error}), tried {1 + len(PAUSES)} times; see "
        "that the disk is well and that the file has not changed"
    )


def user_cache() -> Path:
    """Return the folder of what can be made again: $XDG_CACHE_HOME/largebatch, or the system's."""
    return platformdirs.user_cache_path("largebatch")


def require_new(out: Path) -> None:
    """Raise DataError if there is something already where a folder is to be made."""
    if not out.name or out.resolve() == Path.cwd():
        raise DataError(f"{out}: what is made becomes a folder of its own; name one")
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise DataError(f"{out}: there is something already; remove it or choose another place")


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Yield a folder to fill that becomes `out` if all goes well and disappears if not."""
    require_new(out)
    partial = out.with_name(f".{out.name}{_PARTIAL}")
    try:
        partial.mkdir(parents=True, exist_ok=True)
        with _locked(partial):
            for left in partial.iterdir():  # by a process that was killed
                shutil.rmtree(left) if left.is_dir() else left.unlink()
            try:
                yield partial
                partial.rename(out)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise DataError(
            f"{out}: cannot be written ({error.strerror}); make room or choose another place"
        ) from error


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Own a folder; a process that ends, however it does, owns it no more."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataError(
                f"{folder}: another process is at work there; wait for its end"
            ) from None
        except OSError as error:
            _LOG.warning("%s: this file system keeps no locks (%s)", folder, error.strerror)
        yield
    finally:
        os.close(opened)
