"""Horovod: its collective operations, without its optimizer.

Horovod matches operations by name: all workers must use the same name, a name may not be in use
twice at the same time, and a repeated name skips the negotiation. Here a name is the type and shape
of the tensor and the lowest free number, so that every step repeats the names of the previous.
"""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from types import ModuleType

import torch
from torch import Tensor

from largebatch import accelerator
from largebatch.distributed.agreement import require_agreement
from largebatch.distributed.backend import own_part, pick_device
from largebatch.distributed.environment import STARTING, TIMEOUT_SECONDS, launched
from largebatch.errors import BackendError, MissingPackageError, PeerLostError
from largebatch.optional import INSTALL_HOROVOD as _INSTALL
from largebatch.optional import require_horovod

_BY_TORCH = "torch.distributed connects those of torchrun, --workers or srun --mpi=none"


@dataclass(frozen=True, slots=True)
class _Sum:
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
    ) -> None:
        self._hvd = hvd
        self._set = process_set
        self._prefix = prefix
        self._under_way: set[str] = set()
        self._worker: int = hvd.rank()  # global rank, for error messages
        self.rank = list(members).index(self._worker)
        self.world_size = len(members)

    def all_reduce(self, tensor: Tensor) -> _Sum:
        """Start to sum `tensor` over the group, in place."""
        hvd = self._hvd
        target = tensor.detach()
        sent = _sendable(target)
        # Horovod matches the operations of workers by name, and a name may be under way only once.
        # All workers start the same operations in the same order, so they count alike.
        numbered = (f"{self._name(sent)}.{number}" for number in count())
        name = next(name for name in numbered if name not in self._under_way)
        with self._lost_peers_named():
            handle = hvd.allreduce_async_(sent, name=name, op=hvd.Sum, process_set=self._set)
        self._under_way.add(name)

        def wait() -> None:
            with self._lost_peers_named():
                hvd.synchronize(handle)
            self._under_way.remove(name)
            if sent is not target:
                target.copy_(sent)

        return _Sum(wait)

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Return world_size x tensor.shape."""
        sent = _sendable(tensor.detach().unsqueeze(0))
        with self._lost_peers_named():
            gathered: Tensor = self._hvd.allgather(
                sent, name=self._name(sent), process_set=self._set
            )
        return gathered.to(tensor.dtype)

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


class Horovod(HorovodGroup):
    """A Backend over an initialised `horovod.torch`.

    Its tensors are on `device`, or on the CPU if Horovod was built without GPU support. `close`
    shuts Horovod down if `is_own`, else leaves it running for the code that initialised it.
    """

    name = "horovod"

    def __init__(self, hvd: ModuleType, device: torch.device, *, is_own: bool = False) -> None:
        everyone = range(hvd.size())
        process_set = hvd.global_process_set
        super().__init__(hvd, members=everyone, process_set=process_set, prefix="")
        self._sets = {tuple(everyone): hvd.global_process_set}
        self._num_splits = 0
        self._is_own = is_own
        self.local_rank: int = hvd.local_rank()
        self.local_size: int = hvd.local_size()
        self.device = device if _supports_gpus(hvd) else torch.device("cpu")

    def broadcast(self, tensor: Tensor) -> None:
        """Replace `tensor` with worker 0's, in place."""
        target = tensor.detach()
        sent = _sendable(target)
        with self._lost_peers_named():
            self._hvd.broadcast_(sent, root_rank=0, name=self._name(sent))
        if sent is not target:
            target.copy_(sent)

    def split(self, parts: Sequence[Sequence[int]]) -> HorovodGroup:
        """Create the missing process sets of the parts; return the group of this worker."""
        own = own_part(parts, rank=self.rank, world_size=self.world_size)
        for part in map(tuple, parts):  # every worker creates all of them, in this order
            if part not in self._sets:
                with self._lost_peers_named():
                    self._sets[part] = self._hvd.add_process_set(list(part))
        self._num_splits += 1
        return HorovodGroup(
            self._hvd,
            members=own,
            process_set=self._sets[tuple(own)],
            prefix=f"split {self._num_splits} ",
        )

    def barrier(self) -> None:
        """Wait for every worker."""
        with self._lost_peers_named():
            self._hvd.barrier()

    def started(self) -> None:
        """Do nothing: Horovod's time limits are fixed when it is initialised."""

    def close(self) -> None:
        """Leave the group; operations in progress on other workers fail there."""
        if self._is_own:
            self._hvd.shutdown()


def open_horovod(
    timeout: float = TIMEOUT_SECONDS, *, starting: bool = False, splits: bool = True
) -> Horovod:
    """Initialise Horovod for the group this process was started in, on this worker's GPU if any.

    If a worker does not join an operation for `timeout` seconds (with `starting`, STARTING times as
    long, throughout the run), Horovod's stall check or Gloo's timeout fails the operation on all
    others. `splits` allows groups of workers.

    Raises MissingPackageError without Horovod, and BackendError if it does not connect the workers
    or cannot use a GPU that torch sees.
    """
    limit = math.ceil(timeout * STARTING if starting else timeout)
    for name, value in {
        "HOROVOD_FUSION_THRESHOLD": "0",  # fused groups of sums would depend on timing
        "HOROVOD_STALL_CHECK_TIME_SECONDS": str(max(1, limit // 2)),  # it prints the workers
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": str(limit),
        "HOROVOD_GLOO_TIMEOUT_SECONDS": str(limit),
    }.items():
        os.environ.setdefault(name, value)
    found = launched()
    try:
        hvd = require_horovod()
        hvd.init(process_sets="dynamic" if splits else None)  # none yet: `split` adds them
    except MissingPackageError as error:
        if found is None:
            raise
        raise BackendError(f"{found.shown} in the environment: {error}; {_BY_TORCH}") from None
    except ModuleNotFoundError:  # a dependency of Horovod is missing
        raise
    except (ImportError, AttributeError) as error:  # built for another torch, or without torch
        raise BackendError(
            f"Horovod was not built for torch {torch.__version__}; build it again: {_INSTALL}"
        ) from error
    except ValueError as error:
        raise BackendError(f"Horovod could not connect the workers: {error}") from error
    if found is not None and hvd.size() < found.size:
        raise BackendError(
            f"{found.shown} in the environment, but Horovod connected {hvd.size()} of these "
            "workers: it knows those of horovodrun and of the MPI that it was built with; "
            + _BY_TORCH
        )
    device = pick_device(hvd.local_rank(), hvd.local_size())
    if accelerator.is_remote(device) and not _supports_gpus(hvd):
        raise BackendError(
            "torch sees a GPU and Horovod was built without GPU support; install the CUDA "
            f"toolkit (nvcc) and build it again: {_INSTALL}, or train on CPU with "
            "CUDA_VISIBLE_DEVICES= in the environment"
        )
    backend = Horovod(hvd, device, is_own=True)
    # On the CPU: Horovod cannot sum a GPU tensor with another worker's CPU tensor.
    require_agreement({"device": backend.device.type}, backend, torch.device("cpu"))
    return backend


def _supports_gpus(hvd: ModuleType) -> bool:
    return bool(hvd.cuda_built() or hvd.rocm_built())


def _sendable(tensor: Tensor) -> Tensor:
    """Return `tensor`, or a contiguous copy of a type that Horovod knows."""
    accepted = {torch.bfloat16: torch.float32, torch.bool: torch.int32}
    return tensor.to(accepted.get(tensor.dtype, tensor.dtype)).contiguous()
