"""Where the bytes of an encoded image come from: files of this machine, or objects in a bucket."""

import functools
import os
from collections.abc import Mapping
from typing import Protocol

import numpy as np

from largebatch.address import Address
from largebatch.bucket import open_bucket
from largebatch.data.index.index import Index, Location
from largebatch.data.types import Bytes, Request

KEPT_OPEN = 256  # shards that a reader keeps open: a quarter of the usual limit of files


class Source(Protocol):
    """What a reader reads from; threads share one."""

    hint: str
    """What to check if an image cannot be read."""

    @property
    def is_full(self) -> bool:
        """True if no more requests are to be announced now."""

    def expect(self, request: Request) -> None:
        """Announce a request before its images are read."""

    def close(self) -> None:
        """Drop the requests that were announced and not read."""

    def read(self, content: Bytes, location: Location) -> None:
        """Fill `content` with an image.

        Raises OSError for what a later attempt may change, and DataError for the rest.
        """

    def reopen(self) -> None:
        """Drop open files and connections, before another attempt."""


def open_source(index: Index) -> Source:
    """Return what the images of an index are read from."""
    if not isinstance(index.root, Address):
        return Files()
    if index.cache is None:
        return Objects(index.root, index.versions)
    from largebatch.data.decoders.host_cache import Blocks

    return Blocks(index, index.cache)


class _WithoutAnnouncements:
    """Source that reads each image when it is needed."""

    is_full = True

    def expect(self, request: Request) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class _OpenFile:
    """A file that closes with the last reference to it: another thread may still read it."""

    def __init__(self, path: str) -> None:
        self.number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        if hasattr(self, "number"):  # not if it could not be opened
            os.close(self.number)


class Files(_WithoutAnnouncements):
    """Files and shards on this machine or a file system that it mounts."""

    hint = "check the disk and that the file has not changed"

    def __init__(self) -> None:
        # Shards stay open, so that reading an image is one system call.
        self._open = functools.lru_cache(maxsize=KEPT_OPEN)(_OpenFile)

    def read(self, content: Bytes, location: Location) -> None:
        """Fill `content` with an image.

        Raises OSError if its file's length, or its time if known, has changed.
        """
        path, offset, num_bytes, mtime = location
        if offset:
            shard = self._open(path)
            fill(content, shard.number, offset)
            return
        # Not a shard, which begins with a header. This is done for every image of a folder, and
        # Python runs it while the training thread waits for the lock, so it makes no object.
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            status = os.fstat(file)
            # A file that was replaced would be decoded with the boxes of another image.
            if status.st_size != num_bytes:
                raise OSError(f"it has {status.st_size:,} bytes, it had {num_bytes:,}")
            if mtime not in {None, status.st_mtime_ns}:
                raise OSError("its modification time has changed since it was indexed")
            fill(content, file, 0)
        finally:
            os.close(file)

    def reopen(self) -> None:
        """Close the shards: the handle of a network file may be stale."""
        self._open.cache_clear()


def fill(content: Bytes, file: int, offset: int) -> None:
    """Read from an offset of an open file; raise OSError if the file is too short."""
    num_bytes = len(content)
    done = 0
    got = 1
    while done < num_bytes and got > 0:
        got = os.preadv(file, [content.data[done:]], offset + done)
        done += got
    if done < num_bytes:
        raise OSError(f"its file has {done:,} of its {num_bytes:,} bytes")


class Objects(_WithoutAnnouncements):
    """Shards in a bucket or on a web server: each image is a request for a range of bytes."""

    hint = "check the network, the credentials and that the object has not changed"

    def __init__(self, root: Address, versions: Mapping[str, str]) -> None:
        self._bucket = open_bucket(root)
        self._versions = versions

    def read(self, content: Bytes, location: Location) -> None:
        """Fill `content` with an image; raise ChangedError if its shard is another one."""
        name = location.path.removeprefix(f"{self._bucket.address}/")
        received = self._bucket.read_range(
            name, location.offset, location.num_bytes, version=self._versions[name]
        )
        content[:] = np.frombuffer(received, dtype=np.uint8)

    def reopen(self) -> None:
        """Do nothing: the library makes new connections itself."""
