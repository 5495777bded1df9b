"""Horovod: its collective operations, without its optimizer.

The workers are already there, started by --workers, horovodrun or mpirun; one that was started
alone is a group of one.

Horovod matches operations by name: all workers must give one the same name, no name may be under
way twice, and a name that comes back with the same type and shape skips the negotiation. The names
it makes up never come back. Ours are the type and shape of the tensor and the lowest number that is
free: all workers count alike, and a step repeats the names of the step before.
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
    launched_size,
    own_rank,
)
from largebatch.distributed.watch import Notes, Watch, Watched
from largebatch.errors import BackendError, PeerLostError
from largebatch.optional import INSTALL_HOROVOD as _INSTALL
from largebatch.optional import require_horovod

_SETTINGS = {
    "HOROVOD_FUSION_THRESHOLD": "0",  # which sums it puts together depends on when they come
    "HOROVOD_STALL_CHECK_DISABLE": "1",  # the watch does that, and ends
}
"""What is set when the backend is opened, unless the user has set it."""


_LATER_SECONDS = 20
"""How much longer than the watch Horovod waits."""


class _ServerNotes:
    """Notes in the server through which horovodrun's workers, those with Gloo, find each other."""

    def __init__(self, address: str, port: str, *, rank: int) -> None:
        self._url = f"http://{address}:{port}/watch/"
        self._rank, self._first = rank, rank
        self._numbers = count(1)
        self._beats: dict[int, str] = {}

    def wait(self) -> None:
        """Note that this worker waits."""
        self._set("waits", "yes")

    def resume(self) -> None:
        """Take that note back."""
        self._set("waits", "")

    def absent(self, members: Sequence[int]) -> list[int]:
        """Return which of these workers do not wait; the server can count nothing: ask for each."""
        found = [n for n in members if n != self._rank and not self._get("waits", n)]
        self._first = min(set(members) - set(found))
        return found

    def beat(self) -> None:
        """Note that this worker is busy."""
        self._set("busy", str(next(self._numbers)))

    def are_busy(self, workers: Sequence[int]) -> bool:
        """Return True if one of these has noted since the last call that it is busy."""
        beats = {worker: self._get("busy", worker) for worker in workers}
        new = any(beat != self._beats.get(worker, "") for worker, beat in beats.items())
        self._beats |= beats
        return new

    def speaks(self) -> bool:
        """Return True on the first worker that waits."""
        return self._rank == self._first

    def _set(self, kind: str, value: str) -> None:
        self._call(f"{kind}.{self._rank}", value.encode(), "PUT")

    def _get(self, kind: str, worker: int) -> str:
        """Return a note, or nothing."""
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
    """A sum under way."""

    wait: Callable[[], None]
    """Block until the result is there. To be called once."""


class HorovodGroup:
    """Some of the workers, over a process set of an initialised `horovod.torch`.

    `prefix` starts the name of every operation: two groups of the same workers share Horovod's
    process set, and each counts its own operations.
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
        self._worker: int = hvd.rank()  # its number among all, which error messages use
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
        with self._lost_peers_named():  # which may wait for the others already
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
        """Let the watch follow an operation that blocks."""
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
        """Turn Horovod's error into PeerLostError, unless it says that the workers disagree."""
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
    """A Backend over an initialised `horovod.torch`, which is not shut down.

    Its tensors live on `device`, or on the CPU where Horovod was built without GPU support.
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
        """Replace `tensor` by worker 0's, in place."""
        target = tensor.detach()
        sent = _sendable(target)
        with self._lost_peers_named(), self._watched("broadcast", tensor):
            self._hvd.broadcast_(sent, root_rank=0, name=self._name(sent))
        if sent is not target:
            target.copy_(sent)

    def split(self, parts: Sequence[Sequence[int]]) -> HorovodGroup:
        """Make a process set of every part there is none of; return the group of this worker."""
        own = own_part(parts, rank=self.rank, world_size=self.world_size)
        for part in map(tuple, parts):  # every worker makes all of them, in this order
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
    """A Backend over an initialised `horovod.torch`, which it shuts down.

    Raises BackendError where torch sees a GPU and Horovod was built without GPU support.
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
        """Shut Horovod down; operations under way on other workers fail there."""
        with self._watched("shutdown"):
            self._hvd.shutdown()
        if self._watch is not None:
            self._watch.close()


def open_horovod(
    timeout: float = TIMEOUT_SECONDS, *, starting: bool = False, splits: bool = True
) -> Horovod:
    """Join the group this process was started in, and take this worker's GPU if there are any.

    An operation that another worker has not joined after `timeout` s ends this one; `starting`:
    STARTING times as long until `started` is called. `splits`: the workers may be divided. Horovod
    then lets no operation begin while it waits for a worker, and no thread of this process run, so
    it ends it itself, later, also at the start, and does not know for whom.
    """
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    limit = math.ceil(timeout * STARTING if starting and not splits else timeout)
    os.environ.setdefault("HOROVOD_GLOO_TIMEOUT_SECONDS", str(limit + _LATER_SECONDS))
    try:
        hvd = require_horovod()
        watch = None
        if launched_size() > 1:
            watch = Watch(_notes(), rank=own_rank(), timeout=timeout, starting=starting)
        with watch.during("init", range(launched_size())) if watch else nullcontext():
            hvd.init(process_sets="dynamic" if splits else None)  # none yet: `split` adds them
    except ModuleNotFoundError:  # of what Horovod needs
        raise
    except (ImportError, AttributeError) as error:  # built for another torch, or for none
        raise BackendError(
            f"Horovod was not built for torch {torch.__version__}; build it again: {_INSTALL}"
        ) from error
    except ValueError as error:
        raise BackendError(f"Horovod could not connect the workers: {error}") from error
    if hvd.size() < launched_size():
        raise BackendError(
            f"{launched_size()} workers were started by something that Horovod does not know; "
            f"start them with horovodrun -np {launched_size()} or --workers, or leave --backend "
            "horovod out"
        )
    backend = Horovod(hvd, watch)
    # From the CPU, for Horovod sends no tensor that is on a GPU here and on the CPU there.
    require_agreement({"device": backend.device.type}, backend, torch.device("cpu"))
    return backend


def _notes() -> Notes | None:
    """Return where the workers can leave notes; mpirun gives them no such place."""
    address = os.environ.get("HOROVOD_GLOO_RENDEZVOUS_ADDR")
    if address is None:
        return None
    return _ServerNotes(address, os.environ["HOROVOD_GLOO_RENDEZVOUS_PORT"], rank=own_rank())


def _supports_gpus(hvd: ModuleType) -> bool:
    return bool(hvd.cuda_built() or hvd.rocm_built())


def _sendable(tensor: Tensor) -> Tensor:
    """Return `tensor`, or a copy as Horovod wants it, which refuses bfloat16 and strides."""
    accepted = tensor.float() if tensor.dtype == torch.bfloat16 else tensor
    return accepted.contiguous()
