"""A process group of the simulated accelerator that completes late, like NCCL's.

A collective starts when it is called and ends when the device reaches it: its result appears when
the first operation after `wait()` touches the memory, in the order of the group's queue. `wait()`
orders the device and does not block the host; only a barrier does. Touching memory before `wait()`
raises RuntimeError, and so does everything after `lose()`, with NCCL's messages.

Like NCCL's it is connected immediately to a bound device, and split by a call of all its members; a
call only by workers outside a new group, for which NCCL would wait indefinitely, raises
RuntimeError. `BEGUN` lists the collectives that this worker has started in all its groups.
"""

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Self

import torch
import torch.distributed as dist
from accelerator import NAME, Busy, Graph, SimTensor, Value, mark_busy, mark_idle, require_idle
from torch import Tensor
from torch._C._distributed_c10d import ProcessGroupGloo, Work
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # torch's stubs
from torch.distributed.distributed_c10d import ProcessGroup, Store

BACKEND = "late"

BEGUN: list[tuple[str, str, tuple[int, ...]]] = []
"""Collectives of this worker in the order of their start: "world" or "part", the operation, and the
shape of its first tensor."""


class LateWork(Work, Busy):
    """A collective whose results replace the contents of tensors when it is complete."""

    def __init__(
        self, queue: "deque[LateWork]", inner: Work | None, results: Sequence[tuple[Tensor, Tensor]]
    ) -> None:
        super().__init__()
        self.queue = queue
        self.inner = inner
        self.results = list(results)
        self.ordered = False
        queue.append(self)
        for target, _ in self.results:
            assert isinstance(target, SimTensor)
            mark_busy(target, self)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Order the device after it, without blocking the host."""
        self.ordered = True
        return True

    def is_complete(self) -> bool:
        """Return True if the device has completed it, or could have: nothing blocks its queue."""
        queue = self.queue if self in self.queue else ()
        before = itertools.takewhile(lambda work: work is not self, queue)
        return all(work.inner is not None and work.inner.is_completed() for work in (*before, self))

    def is_completed(self) -> bool:
        """Return True if all workers have joined it, or an error was found in it, as NCCL does."""
        return self.inner is None or self.inner.is_completed()

    def complete(self) -> None:
        """Execute the queue up to this collective."""
        while self in self.queue:
            self.queue[0].finish()  # stays in front if it fails
            self.queue.popleft()

    def finish(self) -> None:
        """Wait for the other workers and store the results."""
        if self.inner is None:
            raise RuntimeError("NCCL communicator was aborted on rank; a remote process exited")
        self.inner.wait()
        for target, result in self.results:
            assert isinstance(target, SimTensor)
            target.raw.copy_(result)
            mark_idle(target, self)
        self.results.clear()


class Barrier(LateWork):
    """The only collective whose `wait()` blocks the host."""

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Block the host until every worker has called this."""
        super().wait(timeout)
        self.complete()
        return True


class Recorded(Work):
    """A collective in a graph, which every replay executes."""

    def __init__(self, begin: Callable[[], Value]) -> None:
        super().__init__()
        assert Graph.recording is not None
        Graph.recording.add(lambda: begin().complete(), [])

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Order the graph after it, as it is."""
        return True


class LateGroup(ProcessGroup):
    """Executes collectives over Gloo, on CPU copies."""

    lost = False
    supports_splitting = True
    options = None

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # an overload
        self.store = store
        self.timeout = timeout
        prefix = PrefixStore(BACKEND, store)
        self.inner: Value = ProcessGroupGloo(prefix, rank, size, timeout)
        self.queue: deque[LateWork] = deque()
        self.connected: torch.device | None = None
        """Device that it was connected to before any operation."""

    def _get_backend(self, _: object) -> Self:  # type: ignore[override]  # no Backend of torch's
        """Return itself: it is both the process group and its backend."""
        return self

    def eager_connect_single_device(self, device: torch.device) -> None:
        """Note the device, as torch does in a group whose backend is another object."""
        self.connected = self.bound_device_id = device

    def perform_nocolor_split(self, _: object) -> None:
        """Raise RuntimeError: a worker outside a new group called this alone."""
        raise RuntimeError("a split of the group of all that not all of its members call")

    def split_group(  # type: ignore[override]  # what is used of it
        self, ranks: Sequence[int], *, timeout: timedelta, group_name: str, **_: object
    ) -> "LateGroup":
        """Return the part of this worker."""
        store = PrefixStore(f"split {group_name}", self.store)
        part = LateGroup(store, list(ranks).index(self.rank()), len(ranks), timeout)
        part._set_group_name(group_name)
        return part

    def get_group_store(self) -> Store:
        """Return the store of its members."""
        return self.store

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_name(self) -> str:  # type: ignore[override]  # a str of torch's own type
        """Return its name in torch."""
        return self._name

    def _set_sequence_number_for_group(self) -> None: ...

    def getBackendName(self) -> str:  # noqa: N802 -- torch's
        """Return the name of the backend."""
        return BACKEND

    def lose(self) -> None:
        """Lose another worker: collectives that start later never complete."""
        self.lost = True

    def allreduce(self, tensors: list[Tensor], opts: Value = None) -> Work:  # type: ignore[override]  # an overload
        """Start to reduce tensors in place."""
        if Graph.recording is not None:
            return Recorded(lambda: self.allreduce(tensors, opts))
        copies = [copy_of(tensor) for tensor in tensors]
        pairs = list(zip(tensors, copies, strict=True))
        return self._start("all_reduce", lambda: self.inner.allreduce(copies, opts), pairs)

    def broadcast(self, tensors: list[Tensor], opts: Value = None) -> LateWork:  # type: ignore[override]  # an overload
        """Start to replace tensors with another worker's."""
        copies = [copy_of(tensor) for tensor in tensors]
        pairs = list(zip(tensors, copies, strict=True))
        return self._start("broadcast", lambda: self.inner.broadcast(copies, opts), pairs)

    def allgather(  # type: ignore[override]  # an overload
        self, outs: list[list[Tensor]], tensors: list[Tensor], opts: Value = None
    ) -> LateWork:
        """Start to gather a tensor of every worker."""
        copies = [[copy_of(tensor) for tensor in row] for row in outs]
        sent = [copy_of(tensor) for tensor in tensors]
        pairs = [
            pair
            for row, results in zip(outs, copies, strict=True)
            for pair in zip(row, results, strict=True)
        ]
        return self._start("all_gather", lambda: self.inner.allgather(copies, sent, opts), pairs)

    def _allgather_base(self, out: Tensor, tensor: Tensor, opts: Value = None) -> Work:
        """Start to gather a tensor of every worker into one."""
        if Graph.recording is not None:
            return Recorded(lambda: self._allgather_base(out, tensor, opts))
        result = copy_of(out)
        sent = copy_of(tensor)
        return self._start(
            "all_gather", lambda: self.inner._allgather_base(result, sent, opts), [(out, result)]
        )

    all_gather_single = _allgather_base  # type: ignore[assignment]  # names of arguments; its name since torch 2.13

    def barrier(self, opts: Value = None) -> LateWork:
        """Start to wait for every worker."""
        return self._start("barrier", self.inner.barrier, [], kind=Barrier)

    def _start(
        self,
        name: str,
        begin: Callable[[], Work],
        results: Sequence[tuple[Tensor, Tensor]],
        kind: type[LateWork] = LateWork,
    ) -> LateWork:
        shape = tuple(results[0][0].shape) if results else ()
        BEGUN.append(("world" if self is dist.group.WORLD else "part", name, shape))
        return kind(self.queue, None if self.lost else begin(), results)


def copy_of(tensor: Tensor) -> Tensor:
    """Return a copy of the values of a device tensor."""
    if not isinstance(tensor, SimTensor):
        raise TypeError(f"the group of {NAME} takes its own tensors, got one on {tensor.device}")
    require_idle(tensor, "a collective")
    return tensor.raw.clone()


def register() -> None:
    """Make it the backend of the simulated accelerator's tensors."""

    def create(store: Store, rank: int, size: int, timeout: timedelta) -> LateGroup:
        return LateGroup(store, rank, size, timeout)

    dist.Backend.register_backend(BACKEND, create, devices=[NAME])
