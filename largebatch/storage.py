"""Atomic writes, checksums, the cache folder, and retries of failed reads."""

import errno
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
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, BinaryIO, TypeVar

from largebatch.errors import CheckpointError, DataError, LargebatchError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

THREADS = 16
"""Number of threads; more than cores, because over a network a thread mostly waits."""

PART = 256
"""Number of images in one thread's task."""

PAUSES = (0.1, 1.0, 5.0)
"""Seconds before each retry of a failed read, here and in a run."""

OF_THE_FILE = (errno.EACCES, errno.EISDIR, errno.ELOOP, errno.ENOENT, errno.ENOTDIR, errno.EPERM)
"""Error numbers that a retry cannot change: permissions, links and file types."""

CHUNK = 2**18
"""Bytes per step of a checksum; small enough to stay in the processor's cache."""

CHECKSUM_BYTES = 4

ReadProgress = Callable[[int, int], None]
"""Callback that takes the number of finished files and the total."""


def silent(_done: int, _total: int) -> None:
    """Show no progress."""


PARTIAL = ".partial"
"""Suffix of the name of a file being written."""

T = TypeVar("T")

_LOG = logging.getLogger(__name__)


def write_whole(path: Path, content: bytes) -> None:
    """Write a file atomically; create its folder if needed."""
    with whole_file(path) as file:
        file.write(content)


@contextmanager
def writing(
    place: Path,
    *,
    error: type[LargebatchError] = CheckpointError,
    hint: str = "make room or choose another --out",
) -> Iterator[None]:
    """Raise `error`, with a `hint`, in place of an OSError: that `place` cannot be written."""
    try:
        yield
    except OSError as reason:
        raise error(f"{place}: cannot be written: {reason.strerror}; {hint}") from None


@contextmanager
def whole_path(path: Path) -> Iterator[Path]:
    """Yield the path of a file to write; it appears at `path` when the block ends without an error.

    After a power failure `path` holds the whole new content or the previous one.

    Raises OSError, and leaves it as it is, if `path` is a device, a pipe or a socket: a rename
    would put a file in its place, as root in that of /dev/null.
    """
    if not path.name:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise OSError(
            errno.EINVAL, "expected a file, found a device, a pipe or a socket", str(path)
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}{PARTIAL}")
    try:
        partial.touch()
        mode = partial.stat().st_mode
        yield partial
        partial.chmod(mode)  # safetensors replaces it by a file that only its owner can read
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        partial.replace(path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            with suppress(OSError):  # not supported by every file system
                os.fsync(folder)
        finally:
            os.close(folder)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Yield a file to write to; as whole_path."""
    with whole_path(path) as partial, partial.open("wb") as file:
        yield file


def remove_leftovers(*folders: Path) -> None:
    """Remove the partial files of killed writers; no writer may be active in these folders."""
    for folder in folders:
        for path in [*folder.glob(f".*{PARTIAL}"), *folder.glob(".tmp??????")]:  # of safetensors
            path.unlink(missing_ok=True)


def remove_content(folder: Path) -> None:
    """Remove everything in a folder, and the folder if that is allowed."""
    with suppress(OSError):
        shutil.rmtree(folder)


def checksum(parts: "Iterable[ReadableBuffer]") -> bytes:
    """Return the CRC-32 of the concatenated parts as CHECKSUM_BYTES bytes."""
    total = functools.reduce(lambda crc, part: zlib.crc32(part, crc), parts, 0)
    return total.to_bytes(CHECKSUM_BYTES, "little")


def is_whole(path: Path, num_bytes: int, *, begin: bytes = b"") -> bool:
    """Return True if a file has these bytes, and then the checksum of `begin` and of them.

    False also if it is not there or cannot be read.
    """
    try:
        with path.open("rb", buffering=0) as file:
            if os.fstat(file.fileno()).st_size != num_bytes + CHECKSUM_BYTES:
                return False
            sizes = (min(CHUNK, num_bytes - start) for start in range(0, num_bytes, CHUNK))
            actual = checksum(chain([begin], map(file.read, sizes)))
            return actual == file.read()
    except OSError:
        return False


def read_again(
    read: Callable[[], T],
    error: OSError,
    *,
    name: str,
    hint: str = "check the disk and that the file has not changed",
) -> T:
    """Repeat a read that raised `error`, after each of PAUSES; raise DataError if all fail."""
    for pause in PAUSES:
        _LOG.warning("%s: cannot be read (%s); trying again", name, error)
        time.sleep(pause)
        try:
            return read()
        except OSError as latest:
            error = latest
    raise DataError(
        f"{name}: cannot be read ({error.strerror or error}), tried {1 + len(PAUSES)} times; {hint}"
    )


def user_cache() -> Path:
    """Return the cache folder: $XDG_CACHE_HOME/largebatch, or ~/.cache/largebatch.

    Raises DataError if this user has no home folder.
    """
    chosen = os.environ.get("XDG_CACHE_HOME")
    try:
        return Path(chosen or Path.home() / ".cache") / "largebatch"
    except RuntimeError:
        raise DataError(
            "the cache has no place, because this user has no home folder: set XDG_CACHE_HOME"
        ) from None


def require_new(out: Path) -> None:
    """Raise DataError unless `out` is a free name for a new folder."""
    if not out.name or out.resolve() == Path.cwd():
        raise DataError(f"{out}: the output is a new folder; name one")
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise DataError(f"{out}: already exists; remove it or choose another place")


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Yield a folder to fill; it becomes `out` when the block ends and is removed if it fails."""
    require_new(out)
    with writing(out, error=DataError, hint="make room or choose another place"):
        out.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=f".{out.name}-", suffix=PARTIAL, dir=out.parent) as around:
            folder = Path(around, out.name)
            folder.mkdir()
            yield folder
            folder.rename(out)
