"""torch.distributed: NCCL where there are GPUs, Gloo elsewhere.

The workers are already there, started by `--workers`, torchrun or a scheduler, and described by
RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT.
"""

import os
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # its stubs

from largebatch.distributed.agreement import shape
from largebatch.distributed.backend import identify, on_cpu, own_part, pick_device
from largebatch.distributed.dropped import DroppedWorkers
from largebatch.distributed.environment import (
    STARTING,
    TIMEOUT_SECONDS,
    use_loopback,
)
from largebatch.distributed.meeting import open_store, require_one_type
from largebatch.distributed.notes import StoreNotes
from largebatch.distributed.watch import Watch, Watched
from largebatch.errors import BackendError, PeerLostError, PeerSilentError

_NCCL = re.compile(r"\bNCCL\b|\bnccl[A-Z]\w+Error", re.IGNORECASE)
"""What is in NCCL's reports, which come out of whatever waits for the device."""

_GONE = re.compile("connection|closed|reset|timed? ?out|broken pipe|socket", re.IGNORECASE)
"""How a library words that a peer is gone."""

_CONNECTION = re.compile(f"{_GONE.pattern}|{_NCCL.pattern}", re.IGNORECASE)
"""The same, or NCCL's words: Gloo reports the loss of a peer as a plain RuntimeError."""

_TIMEOUT = re.compile("timed? ?out", re.IGNORECASE)
"""How it words that a peer did nothing."""

_LOCAL = re.compile("nccl(SystemError|UnhandledCudaError|InvalidUsage|InvalidArgument)")
"""How NCCL words a fault of this worker; a lost connection is a system error too."""

_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""Into one tensor, by its name since torch 2.13 or before."""

_SUCCESS = 0
"""As torch's WorkResult has it."""

_LATER = timedelta(minutes=1)
"""How much longer than the watch the libraries wait, which do not know for whom."""


class _Pending:
    """An operation under way."""

    def __init__(
        self, work: dist.Work, worker: int, has_failed: Callable[[dist.Work], bool]
    ) -> None:
        self._work, self._worker, self._has_failed = work, worker, has_failed

    def wait(self) -> None:
        """Block until the result is there."""
        with lost_peers_named(self._worker):
            if self._has_failed(self._work):  # to wait would let the device go on without it
                raise dist.DistBackendError("NCCL reported an error in this operation")
            self._work.wait()


def _has_failed(work: dist.Work) -> bool:
    """Return whether NCCL reported an error in it, which then counts as completed."""
    with suppress(RuntimeError):  # of other libraries, which have no such result
        result = work.get_future_result()  # type: ignore[attr-defined]  # torch's stubs
        return bool(result.done() and result.value() != _SUCCESS)
    return False


def _never(_: dist.Work) -> bool:
    return False


class TorchGroup:
    """Some of the workers, over a process group of torch.distributed; None is the default one.

    `watch` follows its operations, if there is one.
    """

    def __init__(self, group: dist.ProcessGroup | None, watch: Watch | None = None) -> None:
        self._watch = watch
        self._worker = dist.get_rank()  # its number among all, which error messages use
        self._use(group)

    def _use(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._members = dist.get_process_group_ranks(group)
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        # Gloo's raise what they find when they are waited for.
        self._has_failed = _never if dist.get_backend(group) == "gloo" else _has_failed

    def all_reduce(self, tensor: Tensor) -> _Pending:
        """Start to sum `tensor` over the group, in place."""
        return self._start(
            f"all_reduce {shape(tensor)}",
            lambda: dist.all_reduce(tensor, group=self._group, async_op=True),
        )

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Return world_size x tensor.shape."""
        gathered = tensor.new_empty((self.world_size, tensor.numel()))
        sent = tensor.reshape(1, -1).contiguous()
        self._start(
            f"all_gather {shape(tensor)}",
            lambda: _all_gather(gathered, sent, group=self._group, async_op=True),
        ).wait()
        return gathered.view(self.world_size, *tensor.shape)

    def _start(self, name: str, begin: Callable[[], dist.Work | None]) -> _Pending:
        """Begin an operation, and let the watch follow it until it is complete."""
        works: list[dist.Work] = []
        has_failed = self._has_failed
        if self._watch is not None:  # from here on: to begin may be to wait
            self._watch.begin(
                name,
                self._members,
                lambda: bool(works) and works[0].is_completed() and not has_failed(works[0]),
                lambda: bool(works) and has_failed(works[0]),
            )
        with lost_peers_named(self._worker):
            work = begin()
        assert work is not None
        works.append(work)
        return _Pending(work, self._worker, has_failed)


class RunningTorch(Watched, TorchGroup):
    """A Backend over the default process group of torch.distributed, which is open and stays so.

    Its tensors live on `device` if the group has a library for such devices, else on those that it
    has one for: NCCL alone sends nothing that is on the CPU.
    """

    name = "torch"
    _timeout: timedelta | None = None
    _limit: timedelta | None = None
    """How long an operation waits, and the library, which does not know for whom; None is its own
    limit."""

    def __init__(self, device: torch.device, watch: Watch | None = None) -> None:
        super().__init__(None, watch)
        self.local_rank = int(os.environ.get("LOCAL_RANK", self.rank))
        self.local_size = int(os.environ.get("LOCAL_WORLD_SIZE", self.world_size))
        libraries = dist.get_backend_config().split(",")  # as in cpu:gloo,cuda:nccl
        kinds = [library.partition(":")[0] for library in libraries]
        self.device = device if device.type in kinds else _current_device(kinds[0])

    def broadcast(self, tensor: Tensor) -> None:
        """Replace `tensor` by worker 0's, in place."""
        name = f"broadcast {shape(tensor)}"
        self._start(
            name, lambda: dist.broadcast(tensor, src=0, group=self._group, async_op=True)
        ).wait()

    def split(self, parts: Sequence[Sequence[int]]) -> TorchGroup:
        """Make process groups of the parts; return the one this worker is in."""
        own = own_part(parts, rank=self.rank, world_size=self.world_size)
        with lost_peers_named(self._worker):
            if _can_split():
                ranks = [list(part) for part in parts]
                group: object = dist.split_group(split_ranks=ranks, timeout=self._limit)
            else:
                group = self._new_group(own, parts)
        assert isinstance(group, dist.ProcessGroup)
        return TorchGroup(group, self._watch)

    def _new_group(self, own: list[int], parts: Sequence[Sequence[int]]) -> object:
        """Make all groups, which every worker does in this order; return its own."""
        groups = [dist.new_group(list(part), timeout=self._limit) for part in parts]
        return groups[[list(part) for part in parts].index(own)]

    def pair_groups(
        self, pairs: Sequence[tuple[int, int]]
    ) -> dict[tuple[int, int], dist.ProcessGroup]:
        """Make a group of Gloo for each pair of ranks; return those this worker is in.

        Every worker makes all of them, in this order. A pair may come twice, the other way round.
        No watch follows their operations, so they wait for no longer than it would.
        """
        made: dict[tuple[int, int], dist.ProcessGroup] = {}
        with lost_peers_named(self._worker), _by_members_alone():
            for pair in pairs:
                group = dist.new_group(sorted(pair), timeout=self._timeout, backend="gloo")
                if self.rank in pair:
                    assert isinstance(group, dist.ProcessGroup)
                    made[pair] = group
        return made

    def barrier(self) -> None:
        """Wait for every worker; after `wait` of a sum on an accelerator the host goes on."""
        index = self.device.index
        devices = None if self.device.type == "cpu" or index is None else [index]
        self._start(
            "barrier",
            lambda: dist.barrier(group=self._group, async_op=True, device_ids=devices),
        ).wait()

    def close(self) -> None:
        """Leave the group open, for the code that opened it."""


class TorchDistributed(RunningTorch):
    """A Backend over the default process group, which it opens and closes.

    An operation that another worker has not joined after `timeout` s ends this one. `starting`:
    until `started` is called it waits STARTING times as long.
    """

    def __init__(self, timeout: float = TIMEOUT_SECONDS, *, starting: bool = False) -> None:
        missing = [name for name in _NEEDED if name not in os.environ]
        if missing:
            raise BackendError(
                f"the torch backend needs {', '.join(missing)} in the environment; start the "
                "workers with --workers N or with torchrun"
            )
        local_rank = int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))
        local_size = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
        device = pick_device(local_rank, local_size, compared=True)
        alone = local_size == int(os.environ["WORLD_SIZE"])
        if alone:
            use_loopback()
        library = _library_for(device)
        # Its own thread would end this process, before or after the state is saved.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        self._limit = timedelta(seconds=timeout * STARTING if starting else timeout) + _LATER
        self._timeout = timedelta(seconds=timeout)
        with lost_peers_named(int(os.environ["RANK"])):
            store, rank, world_size = open_store(self._limit, alone=alone)
            # torchrun's store outlives a restart, with the addresses of the workers before.
            attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            notes = StoreNotes(PrefixStore(attempt, store.clone()), rank=rank, workers=world_size)
            self._dropped = DroppedWorkers(store.clone(), attempt=attempt)
            store = PrefixStore(attempt, store)
            watch = Watch(notes, rank=rank, timeout=timeout, starting=starting)
            with watch.during("the group of all workers", range(world_size)):
                require_one_type(
                    store, device.type, rank=rank, world_size=world_size, unit=identify(device)
                )
                dist.init_process_group(
                    library,
                    store=store,
                    rank=rank,
                    world_size=world_size,
                    timeout=self._limit,
                    device_id=None if device.type == "cpu" else device,
                )
        super().__init__(device, watch)

    def _new_group(self, own: list[int], parts: Sequence[Sequence[int]]) -> object:  # noqa: ARG002
        """Make this worker's group alone, however many parts there are.

        Torch names it by its members and by how many groups this process has already. Members agree
        on that as long as every worker makes its groups by `split` before those of `pair_groups`.
        """
        return dist.new_group(own, timeout=self._limit, use_local_synchronization=True)

    def drop(self, worker: int) -> None:
        """Note that the run goes on without a worker, from the next `agree_on_dropped` on."""
        with lost_peers_named(self._worker):
            self._dropped.add(worker)

    def is_dropped(self, worker: int) -> bool:
        """Return True if the run goes on without a worker; False if the store is out of reach."""
        with suppress(dist.DistError):
            return self._dropped.include(worker)
        return False

    def agree_on_dropped(self, of: Collection[int], *, witnesses: Sequence[int]) -> set[int]:
        """Return which of these workers were dropped, and continue with a group without them.

        Every remaining worker calls this alike; the `witnesses`, who drop workers, when they will
        drop no more. A worker that was dropped gets the set too, and can do nothing more. The rank
        of a worker is then its place among those left. Worker 0 cannot be dropped.
        """
        assert self._timeout is not None
        with lost_peers_named(self._worker):
            own, limit = self._worker, self._timeout + _LATER
            dropped = self._dropped.agree(of, own=own, witnesses=witnesses, limit=limit)
            if dropped and own not in dropped:
                left = [member for member in self._members if member not in dropped]
                # Its members alone connect to each other; all would meet only at this barrier.
                os.environ.pop("TORCH_DIST_INIT_BARRIER", None)
                with _by_members_alone():
                    group = dist.new_group(left, timeout=limit)
                assert isinstance(group, dist.ProcessGroup)
                self._use(group)
        return dropped

    def close(self) -> None:
        """Destroy the process groups."""
        assert self._watch is not None
        self._watch.close()
        if dist.is_initialized():
            dist.destroy_process_group()


def _library_for(device: torch.device) -> str:
    """Return the name of what torch sums over such devices with; raise BackendError without one."""
    try:
        return dist.get_default_backend_for_device(device)
    except ValueError:
        raise BackendError(
            f"torch {torch.__version__} has no library that sums over {device.type} devices; "
            f"install a torch that has one, or {on_cpu()}"
        ) from None


def _can_split() -> bool:
    """Return whether a call of all workers divides the group of all (NCCL, of a bound device)."""
    world = dist.group.WORLD
    assert world is not None
    bound = world.bound_device_id
    return bound is not None and bool(world._get_backend(bound).supports_splitting)


@contextmanager
def _by_members_alone() -> Iterator[None]:
    """Make groups by their members alone, without splitting the default group.

    Torch divides it wherever a device is bound, also for a group of another library, and NCCL then
    waits for a call of every worker.
    """
    world = dist.group.WORLD
    assert world is not None
    bound, world.bound_device_id = world.bound_device_id, None
    try:
        yield
    finally:
        world.bound_device_id = bound


def _current_device(kind: str) -> torch.device:
    """Return the device of this kind (cpu, cuda, ...) that this process has chosen."""
    if kind == "cpu":
        return torch.device(kind)
    return torch.device(kind, torch.accelerator.current_device_index())


@contextmanager
def lost_peers_named(worker: int, *, reads: bool = False) -> Iterator[None]:
    """Turn the loss of a peer, which arrives as a RuntimeError, into PeerLostError.

    `reads`: the block does more than send and receive, and of its errors only those are the loss of
    a peer that name NCCL.
    """
    try:
        yield
    except RuntimeError as error:
        raise _lost(worker, error, words=_NCCL if reads else _CONNECTION) from error


def _lost(
    rank: int, error: RuntimeError, *, words: re.Pattern[str]
) -> PeerLostError | BackendError:
    """Return what the error means; raise it again if it is none of the library."""
    text = str(error).strip()
    if not isinstance(error, dist.DistError) and not words.search(text):
        raise error
    first, _, rest = text.partition("\n")
    last = rest.partition("Last error:")[2].strip()  # where NCCL names the cause
    reason = " ".join((last or first).split()) or type(error).__name__
    if _LOCAL.search(text) and last and not _GONE.search(last):
        return BackendError(
            f"worker {rank}: the communication library failed here ({reason}); with "
            "NCCL_DEBUG=INFO in the environment NCCL prints more"
        )
    kind = PeerSilentError if _TIMEOUT.search(reason) else PeerLostError
    return kind(f"worker {rank} lost contact with another worker ({reason})")
