"""Files that are there whole or not at all, the cache folder, and how reads are tried again."""

import errno
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import platformdirs

from largebatch.errors import DataError

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

Progress = Callable[[int, int], None]
"""Told how many of how many files are done, after every few."""


def write_whole(path: Path, content: bytes) -> None:
    """Write a file, and its folder, so that the file is there whole or not at all."""
    with whole_file(path) as file:
        file.write(content)


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Give a file to write to, which is at `path` when the block ends, or nowhere if it fails.

    It is on the disk before it has its name, so after a loss of power too it is whole or not there.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    try:
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def user_cache() -> Path:
    """Return the folder of what can be made again: $XDG_CACHE_HOME/largebatch, or the system's."""
    return platformdirs.user_cache_path("largebatch")


def require_new(out: Path) -> None:
    """Raise DataError if there is something already where a folder is to be made."""
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise DataError(f"{out}: there is something already; remove it or choose another place")


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Yield a folder to fill that becomes `out` if all goes well and disappears if not."""
    require_new(out)
    partial = out.with_name(f".{out.name}.{uuid.uuid4().hex}")
    try:
        partial.mkdir(parents=True)
        yield partial
        partial.rename(out)
    except OSError as error:
        raise DataError(
            f"{out}: cannot be written ({error.strerror}); make room or choose another place"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
