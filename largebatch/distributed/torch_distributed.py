"""torch.distributed: NCCL on GPUs, Gloo elsewhere.

The workers are started by `--workers`, torchrun or a scheduler, and described by RANK, WORLD_SIZE,
LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT.
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
from largebatch.distributed.environment import STARTING, TIMEOUT_SECONDS, number, use_loopback
from largebatch.distributed.meeting import open_store, require_one_type
from largebatch.distributed.notes import StoreNotes
from largebatch.distributed.watch import Watch, Watched
from largebatch.errors import BackendError, PeerLostError, PeerSilentError

_NCCL = re.compile(r"\bNCCL\b|\bnccl[A-Z]\w+Error", re.IGNORECASE)
"""Pattern of NCCL's errors, which are raised by any call that waits for the device."""

_GONE = re.compile("connection|closed|reset|timed? ?out|broken pipe|socket", re.IGNORECASE)
"""Pattern of a library's error for a lost peer."""

_CONNECTION = re.compile(f"{_GONE.pattern}|{_NCCL.pattern}", re.IGNORECASE)
"""_GONE or _NCCL: Gloo reports the loss of a peer as a plain RuntimeError."""

_TIMEOUT = re.compile("timed? ?out", re.IGNORECASE)
"""Pattern of a library's error for a silent peer."""

_LOCAL = re.compile("nccl(SystemError|UnhandledCudaError|InvalidUsage|InvalidArgument)")
"""Pattern of NCCL's errors of this worker; a lost connection is a system error too."""

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""Gather into one tensor; the name changed in torch 2.13."""

_SUCCESS = 0
"""Value of success in torch's WorkResult."""

_LATER = timedelta(minutes=1)
"""Additional wait of the libraries after the watch, because they cannot name the worker."""


class _Pending:
    """An operation in progress."""

    def __init__(
        self, work: dist.Work, worker: int, has_failed: Callable[[dist.Work], bool]
    ) -> None:
        self._work, self._worker, self._has_failed = work, worker, has_failed

    def wait(self) -> None:
        """Block until the result is available."""
        with lost_peers_named(self._worker):
            if self._has_failed(self._work):  # waiting would let the device continue without it
                raise dist.DistBackendError("NCCL reported an error in this operation")
            self._work.wait()


def _has_failed(work: dist.Work) -> bool:
    """Return True if NCCL reported an error in an operation, which then counts as completed."""
    with suppress(RuntimeError):  # other libraries have no such result
        result = work.get_future_result()  # type: ignore[attr-defined]  # torch's stubs
        return bool(result.done() and result.value() != _SUCCESS)
    return False


class TorchGroup:
    """A group of workers, over a process group of torch.distributed; None is the default one.

    `watch` monitors its operations, if given.
    """

    def __init__(self, group: dist.ProcessGroup | None, watch: Watch | None = None) -> None:
        self._watch = watch
        self._worker = dist.get_rank()  # global rank, for error messages
        self._use(group)

    def _use(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._members = dist.get_process_group_ranks(group)
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        # Gloo's operations raise their errors in `wait`.
        raises = dist.get_backend(group) == "gloo"
        self._has_failed = (lambda _: False) if raises else _has_failed

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
        """Start an operation that the watch monitors until it is complete."""
        works: list[dist.Work] = []
        has_failed = self._has_failed
        if self._watch is not None:  # before the start, which may already wait
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
    """A Backend over the default process group of torch.distributed, which `close` leaves open.

    Its tensors are on `device` if the group has a library for that type of device, else on a device
    that it supports: NCCL cannot send CPU tensors.
    """

    name = "torch"
    _timeout: timedelta | None = None
    _limit: timedelta | None = None
    """Time limits of an operation and of the library; None is the library's default."""

    def __init__(self, device: torch.device, watch: Watch | None = None) -> None:
        super().__init__(None, watch)
        self.local_rank = number("LOCAL_RANK", self.rank)
        self.local_size = number("LOCAL_WORLD_SIZE", self.world_size)
        libraries = dist.get_backend_config().split(",")  # as in cpu:gloo,cuda:nccl
        kinds = [library.partition(":")[0] for library in libraries]
        self.device = device if device.type in kinds else _current_device(kinds[0])

    def broadcast(self, tensor: Tensor) -> None:
        """Replace `tensor` with worker 0's, in place."""
        name = f"broadcast {shape(tensor)}"
        self._start(
            name, lambda: dist.broadcast(tensor, src=0, group=self._group, async_op=True)
        ).wait()

    def split(self, parts: Sequence[Sequence[int]]) -> TorchGroup:
        """Create process groups of the parts and return this worker's."""
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
        """Create all groups, in the same order on every worker; return its own."""
        groups = [dist.new_group(list(part), timeout=self._limit) for part in parts]
        return groups[[list(part) for part in parts].index(own)]

    def pair_groups(
        self, pairs: Sequence[tuple[int, int]]
    ) -> dict[tuple[int, int], dist.ProcessGroup]:
        """Create a Gloo group for each pair of ranks; return those of this worker.

        Every worker creates all of them, in this order. A pair may occur twice, once reversed.
        The watch does not monitor their operations, so their timeout is that of the watch.
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
        """Wait for every worker; unlike `wait` of a sum, this blocks the host on accelerators."""
        index = self.device.index
        devices = None if self.device.type == "cpu" or index is None else [index]
        self._start(
            "barrier",
            lambda: dist.barrier(group=self._group, async_op=True, device_ids=devices),
        ).wait()

    def close(self) -> None:
        """Do nothing: the code that opened the group closes it."""


class TorchDistributed(RunningTorch):
    """A Backend over the default process group, which it opens and closes.

    The process exits if another worker has not joined an operation after `timeout` seconds; with
    `starting`, STARTING times as long until `started` is called.
    """

    def __init__(self, timeout: float = TIMEOUT_SECONDS, *, starting: bool = False) -> None:
        needed = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        missing = [name for name in needed if not os.environ.get(name)]
        if missing:
            raise BackendError(
                f"the torch backend needs {', '.join(missing)} in the environment; start the "
                "workers with --workers N or with torchrun"
            )
        rank, world_size = number("RANK", 0), number("WORLD_SIZE", 1)
        local_rank, local_size = number("LOCAL_RANK", rank), number("LOCAL_WORLD_SIZE", world_size)
        device = pick_device(local_rank, local_size, compared=True)
        # Without LOCAL_WORLD_SIZE others may be on other hosts, unless none can reach the store.
        here = os.environ["MASTER_ADDR"].startswith(("127.", "::1", "localhost"))
        alone = number("LOCAL_WORLD_SIZE", world_size if here else 0) == world_size
        if alone:
            use_loopback()
        library = _library_for(device)
        # NCCL's watchdog thread could end this process before the state is saved.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        self._limit = timedelta(seconds=timeout * STARTING if starting else timeout) + _LATER
        self._timeout = timedelta(seconds=timeout)
        with lost_peers_named(rank):
            store, rank, world_size = open_store(self._limit, alone=alone)
            # torchrun's store survives a restart, with the addresses of the previous workers.
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
        """Create only this worker's group, for any number of parts.

        Torch names it by its members and the number of groups this process has. Members agree on
        that number if every worker creates its groups by `split` before those of `pair_groups`.
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
    """Return torch's library for this type of device; raise BackendError if there is none."""
    try:
        return dist.get_default_backend_for_device(device)
    except ValueError:
        raise BackendError(
            f"torch {torch.__version__} has no communication library for {device.type} devices; "
            f"install a torch that has one, or {on_cpu()}"
        ) from None


def _can_split() -> bool:
    """Return True if the default group supports split_group (NCCL with a bound device)."""
    world = dist.group.WORLD
    assert world is not None
    bound = world.bound_device_id
    return bound is not None and bool(world._get_backend(bound).supports_splitting)


@contextmanager
def _by_members_alone() -> Iterator[None]:
    """Create groups by their members only, without splitting the default group.

    Torch splits it whenever a device is bound, even for a group of another library, and NCCL then
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
    """Return this process's current device of this type (cpu, cuda, ...)."""
    if kind == "cpu":
        return torch.device(kind)
    return torch.device(kind, torch.accelerator.current_device_index())


@contextmanager
def lost_peers_named(worker: int, *, reads: bool = False) -> Iterator[None]:
    """Convert the RuntimeError of a lost peer to PeerLostError.

    `reads` is True if the block does more than send and receive: then only errors that name NCCL
    are treated as a lost peer.
    """
    try:
        yield
    except RuntimeError as error:
        raise _lost(worker, error, words=_NCCL if reads else _CONNECTION) from error


def _lost(
    rank: int, error: RuntimeError, *, words: re.Pattern[str]
) -> PeerLostError | BackendError:
    """Return the matching error; raise `error` itself if it is not one of the library."""
    text = str(error).strip()
    if not isinstance(error, dist.DistError) and not words.search(text):
        raise error
    first, _, rest = text.partition("\n")
    last = rest.partition("Last error:")[2].strip()  # NCCL's cause
    reason = " ".join((last or first).split()) or type(error).__name__
    if _LOCAL.search(text) and last and not _GONE.search(last):
        return BackendError(
            f"worker {rank}: the communication library failed here ({reason}); with "
            "NCCL_DEBUG=INFO in the environment NCCL prints more"
        )
    kind = PeerSilentError if _TIMEOUT.search(reason) else PeerLostError
    return kind(f"worker {rank} lost contact with another worker ({reason})")
