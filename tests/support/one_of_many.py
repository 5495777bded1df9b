"""One worker of thousands in this process, with counts of its requests to the others.

Torch's "fake" process group exchanges nothing. A sum here is the one of workers with equal values,
and the store already holds the writes of all other workers.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # noqa: F401 -- registers the backend "fake"
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from largebatch.distributed import connection, torch_distributed


class Waits(Exception):  # noqa: N818 -- no error: another worker has to come first
    """Raised if a worker would wait for a key that is not in the store."""


class CountingStore(Store):
    """A store in memory that counts requests, keys and bytes."""

    def __init__(self, **content: int) -> None:
        super().__init__()
        self.content = {key: str(value).encode() for key, value in content.items()}
        self.requests = self.keys = self.bytes = 0

    def _note(self, *sent: str | bytes, keys: int = 1) -> None:
        self.requests += 1
        self.keys += keys
        self.bytes += sum(map(len, sent))

    def set(self, key: str, value: str | bytes) -> None:
        """Write a value."""
        self.content[key] = value.encode() if isinstance(value, str) else bytes(value)
        self._note(key, value)

    def append(self, key: str, value: str | bytes) -> None:
        """Write behind a value."""
        value = value.encode() if isinstance(value, str) else bytes(value)
        self.content[key] = self.content.get(key, b"") + value
        self._note(key, value)

    def add(self, key: str, number: int) -> int:
        """Add to a number."""
        total = int(self.content.get(key, b"0")) + number
        self.content[key] = str(total).encode()
        self._note(key, self.content[key])
        return total

    def get(self, key: str) -> bytes:
        """Return a value."""
        self._require([key])
        self._note(key, self.content[key])
        return self.content[key]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return values."""
        self._require(keys)
        found = [self.content[key] for key in keys]
        self._note(*keys, *found, keys=len(keys))
        return found

    def compare_set(self, key: str, _: str, value: str) -> bytes:
        """Write a value if there is none; return the stored one."""
        self.content.setdefault(key, value.encode())
        self._note(key, value)
        return self.content[key]

    def check(self, keys: Sequence[str]) -> bool:
        """Return True if all are there."""
        self._note(*keys, keys=len(keys))
        return all(key in self.content for key in keys)

    def wait(self, keys: Sequence[str], _: timedelta | None = None) -> None:
        """Go on if all are there."""
        self._note(*keys, keys=len(keys))
        self._require(keys)

    def _require(self, keys: Sequence[str]) -> None:
        if not all(key in self.content for key in keys):
            raise Waits(keys)

    def clone(self) -> Store:
        """Return a store that counts with this one."""
        return self

    def set_timeout(self, _: timedelta) -> None:
        """Waiting is refused."""


@dataclass
class Counts:
    """Counts of one worker's requests to the others."""

    store: CountingStore
    groups: int = 0
    collectives: list[str] = field(default_factory=list)
    received: int = 0
    """Bytes of the results of collective operations."""

    files: list[str] = field(default_factory=list)
    """Opened, without Python's own."""


_OPENED: list[list[str]] = []
"""Lists that get the path of every file opened now."""


def _note_file(event: str, arguments: tuple[object, ...]) -> None:
    if event == "open" and _OPENED:
        path = str(arguments[0])
        if not path.endswith((".py", ".pyc", ".so")) and "site-packages" not in path:
            for opened in _OPENED:
                opened.append(path)


sys.addaudithook(_note_file)  # which cannot be removed


@contextmanager
def one_of_many(rank: int, workers: int) -> Iterator[Counts]:
    """Make `connect` join as worker `rank` of `workers`, after all others."""
    others = workers - 1
    counts = Counts(CountingStore(**{"0/arrived": others, "0/on/cpu": others}))
    init = dist.init_process_group
    new_group = dist.new_group

    def counted(name: str, grows: Callable[[Any], int]) -> Callable[..., Any]:
        real = getattr(torch_distributed, name, None) or getattr(dist, name)

        def operation(*args: Any, **options: Any) -> Any:  # noqa: ANN401 -- torch's
            counts.collectives.append(name.lstrip("_"))
            counts.received += sum(map(grows, args[:1]))
            work = real(*args, **options)
            if name == "all_reduce":
                args[0].mul_(dist.get_world_size(options.get("group")))
            return work

        return operation

    def grouped(*args: Any, **options: Any) -> Any:  # noqa: ANN401 -- torch's
        counts.groups += 1
        return new_group(*args, **options)

    def nbytes(tensor: Tensor) -> int:
        return tensor.nbytes

    numbers = {"RANK": rank, "LOCAL_RANK": rank % 8, "WORLD_SIZE": workers}
    numbers |= {"LOCAL_WORLD_SIZE": 8, "MASTER_PORT": 1}
    environment = {"MASTER_ADDR": "127.0.0.1", **{key: str(n) for key, n in numbers.items()}}
    with pytest.MonkeyPatch.context() as patch:
        for key, value in environment.items():
            patch.setenv(key, value)
        patch.setattr(connection, "leave_with", lambda _: None)
        patch.setattr(
            torch_distributed, "open_store", lambda *_, **__: (counts.store, rank, workers)
        )
        patch.setattr(dist, "init_process_group", lambda _, **options: init("fake", **options))
        patch.setattr(dist, "new_group", grouped)
        patch.setattr(dist, "all_reduce", counted("all_reduce", nbytes))
        patch.setattr(dist, "broadcast", counted("broadcast", nbytes))
        patch.setattr(torch_distributed, "_all_gather", counted("_all_gather", nbytes))
        patch.setattr(dist, "barrier", counted("barrier", nbytes))
        _OPENED.append(counts.files)
        try:
            yield counts
        finally:
            _OPENED.remove(counts.files)
            if dist.is_initialized():
                dist.destroy_process_group()
