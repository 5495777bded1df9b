"""Send worker 0's index to every worker, with one copy in the memory of each machine.

Worker 0 broadcasts the path of its index file and the digest; workers that find the file map it.
If some do not, because the machines share no folder, worker 0 broadcasts the bytes, the first
worker of each machine writes them to the user's cache, and the others map that file. These workers
compare the lengths of the images' files but not the times: their folder may be a copy, with other
times.
"""

import contextlib
import json
from dataclasses import replace
from pathlib import Path

import torch

from largebatch.data.index.file import Content, pack, unpack
from largebatch.data.index.index import Index, cached_at, index_of, load_file
from largebatch.distributed.backend import Backend
from largebatch.distributed.connection import broadcast_bytes
from largebatch.errors import DataError
from largebatch.storage import write_whole


def share_index(root: Path | None, content: Content | None, backend: Backend) -> Index:
    """Return worker 0's index of the images in `root` on every worker; other workers pass None."""
    note = None
    if content is not None:
        file = None if content.file is None else str(content.file.resolve())
        about = [str(root), content.header["split"], content.header["digest"]]
        about += [file, _identity(content.file)]
        note = json.dumps(about).encode("ascii")
    folder, split, digest, file, identity = json.loads(broadcast_bytes(note, backend))
    if content is None and file is not None:
        content = _find(Path(file), digest)
    original = backend.rank == 0 or (content is not None and _identity(content.file) == identity)
    missing = torch.tensor([content is None], dtype=torch.int64, device=backend.device)
    backend.all_reduce(missing).wait()
    if missing.item():  # sync: once, before training
        # Named by the folder, not the digest, so that a rebuilt index replaces the previous one.
        sent = _send(content, cached_at(Path(folder), f"{split}-sent"), digest, backend)
        content = content or sent
    assert content is not None
    index = index_of(content, Path(folder))
    # A machine may have a copy of the folder, whose files have other times.
    return index if original else replace(index, mtimes=None)


def _send(content: Content | None, file: Path, digest: str, backend: Backend) -> Content:
    """Broadcast worker 0's index and return it, mapped from `file` if possible."""
    packed = None
    if backend.rank == 0:
        assert content is not None
        packed = pack(content.header, content.arrays)
    packed = broadcast_bytes(packed, backend)
    if backend.local_rank == 0:
        with contextlib.suppress(OSError):
            write_whole(file, packed)
    backend.barrier()
    return _find(file, digest) or Content(*unpack(packed))


def _identity(file: Path | None) -> list[int] | None:
    """Return what identifies a file on all machines that share it, but differs in a copy."""
    try:
        stat = None if file is None else file.stat()
    except OSError:
        return None
    return None if stat is None else [stat.st_ino, stat.st_mtime_ns]


def _find(file: Path, digest: str) -> Content | None:
    with contextlib.suppress(OSError, ValueError, DataError):
        content = load_file(file)
        if content.header["digest"] == digest:
            return content
    return None
