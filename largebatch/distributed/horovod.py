"""Horovod: its collective operations, without its optimizer.

The workers are started by --workers, horovodrun or mpirun; a process started alone is a group of
one.

Horovod matches operations by name: all workers must use the same name, a name may not be in use
twice at the same time, and a repeated name with the same type and shape skips the negotiation.
Horovod's default names never repeat. Here a name is the type and shape of the tensor and the lowest
free number: all workers count in the same way, and every step repeats the names of the previous.
"""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import count
from types import ModuleType
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import torch
from torch import Tensor

from largebatch import accelerator
from largebatch.distributed.agreement import require_agreement, shape
from largebatch.distributed.backend import own_part, pick_device
from largebatch.distributed.environment import (
    GRACE_SECONDS,
    STARTING,
    TIMEOUT_SECONDS,
    Launched,
    launched,
    launched_size,
    own_rank,
)
from largebatch.distributed.watch import Notes, Watch, Watched
from largebatch.errors import BackendError, MissingPackageError, PeerLostError
from largebatch.optional import INSTALL_HOROVOD as _INSTALL
from largebatch.optional import require_horovod

_SETTINGS = {
    "HOROVOD_FUSION_THRESHOLD": "0",  # fused groups of sums would depend on timing
    "HOROVOD_STALL_CHECK_DISABLE": "1",  # the watch checks for stalls
}
"""Environment variables set when the backend is opened, unless the user has set them."""

_BY_TORCH = (
    "torch.distributed connects workers of torchrun, --workers or srun --mpi=none, without Horovod"
)
"""Remedy where Horovod is missing or does not know the launcher."""

_LATER_SECONDS = 20
"""Additional seconds that Horovod waits after the watch's timeout."""


class _ServerNotes:
    """Notes in the rendezvous server of horovodrun's Gloo workers."""

    def __init__(self, address: str, port: str, *, rank: int) -> None:
        self._url = f"http://{address}:{port}/watch/"
        self._rank, self._first = rank, rank
        self._numbers = count(1)
        self._beats: dict[int, str] = {}

    def wait(self) -> None:
        """Record that this worker is waiting."""
        self._set("waits", "yes")

    def resume(self) -> None:
        """Remove the record of `wait`."""
        self._set("waits", "")

    def absent(self, members: Sequence[int]) -> list[int]:
        """Return the workers that are not waiting, with one request per worker."""
        found = [n for n in members if n != self._rank and not self._get("waits", n)]
        self._first = min(set(members) - set(found))
        return found

    def beat(self) -> None:
        """Record that this worker is busy."""
        self._set("busy", str(next(self._numbers)))

    def are_busy(self, workers: Sequence[int]) -> bool:
        """Return True if one of these workers has recorded since the last call that it is busy."""
        beats = {worker: self._get("busy", worker) for worker in workers}
        new = any(beat != self._beats.get(worker, "") for worker, beat in beats.items())
        self._beats |= beats
        return new

    def speaks(self) -> bool:
        """Return True on the first waiting worker."""
        return self._rank == self._first

    def _set(self, kind: str, value: str) -> None:
        self._call(f"{kind}.{self._rank}", value.encode(), "PUT")

    def _get(self, kind: str, worker: int) -> str:
        """Return a note, or an empty string if there is none."""
        try:
            return self._call(f"{kind}.{worker}", None, "GET").decode()
        except HTTPError as error:
            if error.code == 404:
                return ""
            raise

    def _call(self, key: str, data: bytes | None, method: str) -> bytes:
        request = Request(self._url + key, data, method=method)  # noqa: S310 -- a constant scheme
        with urlopen(request, timeout=GRACE_SECONDS) as answer:  # noqa: S310
            content: bytes = answer.read()
        return content


@dataclass(frozen=True, slots=True)
class _Sum:
    """A sum in progress."""

    wait: Callable[[], None]
    """Function that blocks until the result is available; call it once."""


class HorovodGroup:
    """A group of workers, over a process set of an initialised `horovod.torch`.

    Every operation's name starts with `prefix`: two groups of the same workers share Horovod's
    process set, but each counts its own operations.
    """

    def __init__(
        self,
        hvd: ModuleType,
        *,
        members: Sequence[int],
        process_set: object,
        prefix: str,
        watch: Watch | None = None,
    ) -> None:
        self._hvd, self._set, self._prefix = hvd, process_set, prefix
        self._members, self._watch = members, watch
        self._under_way: set[str] = set()
        self._worker: int = hvd.rank()  # global rank, for error messages
        self.rank = list(members).index(self._worker)
        self.world_size = len(members)

    def all_reduce(self, tensor: Tensor) -> _Sum:
        """Start to sum `tensor` over the group, in place."""
        hvd, target = self._hvd, tensor.detach()
        sent = _sendable(target)
        numbered = (f"{self._name(sent)}.{number}" for number in count())
        name = next(name for name in numbered if name not in self._under_way)
        handles: list[int] = []
        number = self._begin("all_reduce", target, lambda: bool(handles and hvd.poll(handles[0])))
        with self._lost_peers_named():  # starting may already wait for the others
            handles.append(hvd.allreduce_async_(sent, name=name, op=hvd.Sum, process_set=self._set))
        self._under_way.add(name)

        def wait() -> None:
            with self._lost_peers_named():
                hvd.synchronize(handles[0])
            self._end(number)
            self._under_way.remove(name)
            if sent is not target:
                target.copy_(sent)

        return _Sum(wait)

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Return world_size x tensor.shape."""
        sent = _sendable(tensor.detach().unsqueeze(0))
        with self._lost_peers_named(), self._watched("all_gather", tensor):
            gathered: Tensor = self._hvd.allgather(
                sent, name=self._name(sent), process_set=self._set
            )
        return gathered.to(tensor.dtype)

    def _begin(self, name: str, tensor: Tensor, is_done: Callable[[], bool]) -> int | None:
        if self._watch is None:
            return None
        return self._watch.begin(f"{name} {shape(tensor)}", self._members, is_done)

    def _end(self, number: int | None) -> None:
        if self._watch is not None and number is not None:
            self._watch.end(number)

    @contextmanager
    def _watched(self, name: str, tensor: Tensor | None = None) -> Iterator[None]:
        """Monitor a blocking operation with the watch."""
        if self._watch is None:
            yield
            return
        words = name if tensor is None else f"{name} {shape(tensor)}"
        with self._watch.during(words, self._members):
            yield

    def _name(self, sent: Tensor) -> str:
        return f"{self._prefix}{sent.dtype}{list(sent.shape)}"

    @contextmanager
    def _lost_peers_named(self) -> Iterator[None]:
        """Convert Horovod's error to PeerLostError, unless it reports mismatched operations."""
        try:
            yield
        except self._hvd.HorovodInternalError as error:
            if str(error).startswith("Mismatched"):
                raise
            reason = str(error).partition("\n")[0].partition(". ")[0]
            raise PeerLostError(
                f"worker {self._worker} lost contact with another worker ({reason})"
            ) from error


class RunningHorovod(Watched, HorovodGroup):
    """A Backend over an initialised `horovod.torch`, which `close` does not shut down.

    Its tensors are on `device`, or on the CPU if Horovod was built without GPU support.
    """

    name = "horovod"

    def __init__(self, hvd: ModuleType, device: torch.device, watch: Watch | None = None) -> None:
        everyone = range(hvd.size())
        process_set = hvd.global_process_set
        super().__init__(hvd, members=everyone, process_set=process_set, prefix="", watch=watch)
        self._sets = {tuple(everyone): hvd.global_process_set}
        self._num_splits = 0
        self.local_rank: int = hvd.local_rank()
        self.local_size: int = hvd.local_size()
        self.device = device if _supports_gpus(hvd) else torch.device("cpu")

    def broadcast(self, tensor: Tensor) -> None:
        """Replace `tensor` with worker 0's, in place."""
        target = tensor.detach()
        sent = _sendable(target)
        with self._lost_peers_named(), self._watched("broadcast", tensor):
            self._hvd.broadcast_(sent, root_rank=0, name=self._name(sent))
        if sent is not target:
            target.copy_(sent)

    def split(self, parts: Sequence[Sequence[int]]) -> HorovodGroup:
        """Create the missing process sets of the parts; return the group of this worker."""
        own = own_part(parts, rank=self.rank, world_size=self.world_size)
        for part in map(tuple, parts):  # every worker creates all of them, in this order
            if part not in self._sets:
                with self._lost_peers_named(), self._watched("add_process_set"):
                    self._sets[part] = self._hvd.add_process_set(list(part))
        self._num_splits += 1
        return HorovodGroup(
            self._hvd,
            members=own,
            process_set=self._sets[tuple(own)],
            prefix=f"split {self._num_splits} ",
            watch=self._watch,
        )

    def barrier(self) -> None:
        """Wait for every worker."""
        with self._lost_peers_named(), self._watched("barrier"):
            self._hvd.barrier()

    def close(self) -> None:
        """Leave Horovod running, for the code that initialised it."""


class Horovod(RunningHorovod):
    """A Backend over an initialised `horovod.torch`, which `close` shuts down.

    Raises BackendError if torch sees a GPU but Horovod was built without GPU support.
    """

    def __init__(self, hvd: ModuleType, watch: Watch | None = None) -> None:
        device = pick_device(hvd.local_rank(), hvd.local_size())
        if accelerator.is_remote(device) and not _supports_gpus(hvd):
            raise BackendError(
                "torch sees a GPU and Horovod was built without GPU support; install the CUDA "
                f"toolkit (nvcc) and build it again: {_INSTALL}, or train on CPU with "
                "CUDA_VISIBLE_DEVICES= in the environment"
            )
        super().__init__(hvd, device, watch)

    def close(self) -> None:
        """Shut Horovod down; operations in progress on other workers fail there."""
        with self._watched("shutdown"):
            self._hvd.shutdown()
        if self._watch is not None:
            self._watch.close()


def open_horovod(
    timeout: float = TIMEOUT_SECONDS, *, starting: bool = False, splits: bool = True
) -> Horovod:
    """Initialise Horovod for the group this process was started in, on this worker's GPU if any.

    The process exits if another worker has not joined an operation after `timeout` seconds; with
    `starting`, STARTING times as long until `started` is called. `splits` allows groups of workers.
    Horovod then blocks all operations and all threads of this process while it waits for a worker,
    so Horovod itself ends the process, later, also during the start, and cannot name the worker.
    """
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    limit = math.ceil(timeout * STARTING if starting and not splits else timeout)
    os.environ.setdefault("HOROVOD_GLOO_TIMEOUT_SECONDS", str(limit + _LATER_SECONDS))
    found, watch = launched(), None
    try:
        hvd = _require_horovod(found)
        if found is not None and found.size > 1:
            watch = Watch(_notes(), rank=own_rank(), timeout=timeout, starting=starting)
        with watch.during("init", range(launched_size())) if watch else nullcontext():
            hvd.init(process_sets="dynamic" if splits else None)  # none yet: `split` adds them
    except ModuleNotFoundError:  # a dependency of Horovod is missing
        raise
    except (ImportError, AttributeError) as error:  # built for another torch, or without torch
        raise BackendError(
            f"Horovod was not built for torch {torch.__version__}; build it again: {_INSTALL}"
        ) from error
    except ValueError as error:
        raise BackendError(f"Horovod could not connect the workers: {error}") from error
    if found is not None and hvd.size() < found.size:
        remedy = "leave --backend horovod out" if found.by == "RANK" else _BY_TORCH
        raise BackendError(
            f"{found.shown} in the environment, but Horovod connected {hvd.size()} of these "
            f"workers: it knows those of horovodrun and of the MPI that it was built with; {remedy}"
        )
    backend = Horovod(hvd, watch)
    # On the CPU: Horovod cannot sum a GPU tensor with another worker's CPU tensor.
    require_agreement({"device": backend.device.type}, backend, torch.device("cpu"))
    return backend


def _require_horovod(found: Launched | None) -> ModuleType:
    """Import Horovod; if it is missing, the error names the launcher that asks for it."""
    try:
        return require_horovod()
    except MissingPackageError as error:
        if found is None:
            raise
        raise BackendError(f"{found.shown} in the environment: {error}; {_BY_TORCH}") from None


def _notes() -> Notes | None:
    """Return the notes in horovodrun's server; None under mpirun, which has no server."""
    address = os.environ.get("HOROVOD_GLOO_RENDEZVOUS_ADDR")
    if address is None:
        return None
    return _ServerNotes(address, os.environ["HOROVOD_GLOO_RENDEZVOUS_PORT"], rank=own_rank())


def _supports_gpus(hvd: ModuleType) -> bool:
    return bool(hvd.cuda_built() or hvd.rocm_built())


def _sendable(tensor: Tensor) -> Tensor:
    """Return `tensor`, or a contiguous copy not in bfloat16, as Horovod requires."""
    accepted = tensor.float() if tensor.dtype == torch.bfloat16 else tensor
    return accepted.contiguous()
