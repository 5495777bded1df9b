"""A process group of the simulated accelerator that completes late, as NCCL's do.

A collective begins when it is called and ends when the device comes to it: its result appears when
the first operation after `wait()` touches the memory, in the order of the group's queue. `wait()`
orders the device and lets the host go on; only a barrier holds the host. Memory that is touched
before `wait()` raises RuntimeError, and so does everything after `lose()`, in the words of NCCL.
"""

from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch.distributed as dist
from accelerator import NAME, Busy, SimTensor, Value, mark_busy, mark_idle
from torch import Tensor
from torch._C._distributed_c10d import ProcessGroupGloo, Work
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # torch's stubs
from torch.distributed.distributed_c10d import ProcessGroup, Store

BACKEND = "late"


class LateWork(Work, Busy):
    """A collective whose results replace the contents of tensors when it is complete."""

    def __init__(
        self, queue: "deque[LateWork]", inner: Work | None, results: Sequence[tuple[Tensor, Tensor]]
    ) -> None:
        super().__init__()
        self.queue, self.inner, self.results = queue, inner, list(results)
        self.ordered = False
        queue.append(self)
        for target, _ in self.results:
            assert isinstance(target, SimTensor)
            mark_busy(target, self)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Order the device after it; the host goes on."""
        self.ordered = True
        return True

    def is_completed(self) -> bool:
        """Return True if all workers have joined it."""
        return self.inner is not None and self.inner.is_completed()

    def complete(self) -> None:
        """Carry out all of the queue up to this."""
        while self in self.queue:
            self.queue.popleft().finish()

    def finish(self) -> None:
        """Wait for the other workers and put the results where they belong."""
        if self.inner is None:
            raise RuntimeError("NCCL communicator was aborted on rank; a remote process exited")
        self.inner.wait()
        for target, result in self.results:
            assert isinstance(target, SimTensor)
            target.raw.copy_(result)
            mark_idle(target, self)
        self.results.clear()


class Barrier(LateWork):
    """The only collective whose `wait()` holds the host."""

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Hold the host until every worker is here."""
        super().wait(timeout)
        self.complete()
        return True


class LateGroup(ProcessGroup):
    """Carries out collectives over Gloo, on copies of the CPU."""

    lost = False

    def __init__(self, inner: Value, rank: int, size: int) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # an overload
        self.inner = inner
        self.queue: deque[LateWork] = deque()

    def getBackendName(self) -> str:  # noqa: N802 -- torch's
        """Return the name of the backend."""
        return BACKEND

    def lose(self) -> None:
        """Lose another worker: nothing that begins from now on is ever complete."""
        self.lost = True

    def allreduce(self, tensors: list[Tensor], opts: Value = None) -> LateWork:  # type: ignore[override]  # an overload
        """Begin to reduce tensors in place."""
        copies = [copy_of(tensor) for tensor in tensors]
        pairs = list(zip(tensors, copies, strict=True))
        return self._start(lambda: self.inner.allreduce(copies, opts), pairs)

    def broadcast(self, tensors: list[Tensor], opts: Value = None) -> LateWork:  # type: ignore[override]  # an overload
        """Begin to replace tensors by another worker's."""
        copies = [copy_of(tensor) for tensor in tensors]
        pairs = list(zip(tensors, copies, strict=True))
        return self._start(lambda: self.inner.broadcast(copies, opts), pairs)

    def allgather(  # type: ignore[override]  # an overload
        self, outs: list[list[Tensor]], tensors: list[Tensor], opts: Value = None
    ) -> LateWork:
        """Begin to gather a tensor of every worker."""
        copies = [[copy_of(tensor) for tensor in row] for row in outs]
        sent = [copy_of(tensor) for tensor in tensors]
        pairs = [
            pair
            for row, results in zip(outs, copies, strict=True)
            for pair in zip(row, results, strict=True)
        ]
        return self._start(lambda: self.inner.allgather(copies, sent, opts), pairs)

    def _allgather_base(self, out: Tensor, tensor: Tensor, opts: Value = None) -> LateWork:
        result, sent = copy_of(out), copy_of(tensor)
        return self._start(lambda: self.inner._allgather_base(result, sent, opts), [(out, result)])

    def barrier(self, opts: Value = None) -> LateWork:
        """Begin to wait for every worker."""
        return self._start(self.inner.barrier, [], kind=Barrier)

    def _start(
        self,
        begin: Callable[[], Work],
        results: Sequence[tuple[Tensor, Tensor]],
        kind: type[LateWork] = LateWork,
    ) -> LateWork:
        return kind(self.queue, None if self.lost else begin(), results)


def copy_of(tensor: Tensor) -> Tensor:
    """Return the values of a tensor of the device, in memory of their own."""
    if not isinstance(tensor, SimTensor):
        raise TypeError(f"the group of {NAME} takes its own tensors, got one on {tensor.device}")
    return tensor.raw.clone()


def register() -> None:
    """Make it the backend of the simulated accelerator's tensors."""

    def create(store: Store, rank: int, size: int, timeout: timedelta) -> LateGroup:
        inner = ProcessGroupGloo(PrefixStore(BACKEND, store), rank, size, timeout)
        return LateGroup(inner, rank, size)

    dist.Backend.register_backend(BACKEND, create, devices=[NAME])
