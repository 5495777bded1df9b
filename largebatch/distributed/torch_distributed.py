"""torch.distributed: NCCL on GPUs, Gloo elsewhere.

A worker that is lost or silent ends the others by the timeout of their process group: Gloo raises
an error where it is waited for, and NCCL's own watchdog ends the process.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # its stubs
from torch.distributed.distributed_c10d import Store, _set_pg_timeout
from torch.distributed.rendezvous import rendezvous

from largebatch import accelerator
from largebatch.distributed.agreement import require_same
from largebatch.distributed.backend import own_part, pick_device, remedy
from largebatch.distributed.environment import (
    GRACE_SECONDS,
    STARTING,
    TIMEOUT_SECONDS,
    number,
    use_loopback,
)
from largebatch.distributed.flight_recorder import enable_recorder
from largebatch.errors import BackendError, MismatchError, PeerLostError

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""Gather into one tensor; the name changed in torch 2.13."""


_IN_GRAPHS = {"nccl"}
"""Libraries whose operations can be recorded in a graph. Their watchdogs do not see what a graph
waits for; the next operation outside of it, queued behind it, ends a run that lost a worker."""


class _PendingWork:
    def __init__(self, work: dist.Work, worker: int) -> None:
        self._work = work
        self._worker = worker

    def wait(self) -> None:
        """Block until the result is available."""
        with lost_peers_named(self._worker):
            self._work.wait()


class TorchGroup:
    """A group of workers, over a process group of torch.distributed; None is the default one."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._worker = dist.get_rank()  # global rank, for error messages
        self._group = group
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self.in_graphs = any(name in dist.get_backend_config(group) for name in _IN_GRAPHS)

    def all_reduce(self, tensor: Tensor) -> _PendingWork:
        """Start to sum `tensor` over the group, in place."""
        return self._start(lambda: dist.all_reduce(tensor, group=self._group, async_op=True))

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Return world_size x tensor.shape."""
        gathered = tensor.new_empty((self.world_size, tensor.numel()))
        sent = tensor.reshape(1, -1).contiguous()
        self._start(lambda: _all_gather(gathered, sent, group=self._group, async_op=True)).wait()
        return gathered.view(self.world_size, *tensor.shape)

    def _start(self, begin: Callable[[], dist.Work | None]) -> _PendingWork:
        with lost_peers_named(self._worker, by=dist.DistError):  # others are wrong arguments
            work = begin()
        assert work is not None
        return _PendingWork(work, self._worker)


class RunningTorch(TorchGroup):
    """A Backend over the default process group of torch.distributed, which `close` leaves open.

    Its tensors are on `device` if the group supports that, as NCCL does not for CPU tensors.
    """

    name = "torch"
    timeout: timedelta | None = None
    """Timeout of an operation, after the first update; None is the library's default."""

    _limit: timedelta | None = None
    """The present timeout."""

    _opens_groups = False
    """True if all groups of this process are made by `split` and `pair_groups`."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(None)
        self._groups: list[TorchGroup] = [self]
        self.local_rank = number("LOCAL_RANK", self.rank)
        self.local_size = number("LOCAL_WORLD_SIZE", self.world_size)
        libraries = dist.get_backend_config().split(",")  # as in cpu:gloo,cuda:nccl
        kinds = [library.partition(":")[0] for library in libraries]
        self.device = device
        if device.type not in kinds:
            self.device = torch.device(kinds[0])
            if kinds[0] != "cpu":
                self.device = torch.device(kinds[0], torch.accelerator.current_device_index())

    def broadcast(self, tensor: Tensor) -> None:
        """Replace `tensor` with worker 0's, in place."""
        self._start(lambda: dist.broadcast(tensor, src=0, group=self._group, async_op=True)).wait()

    def split(self, parts: Sequence[Sequence[int]]) -> TorchGroup:
        """Create process groups of the parts and return this worker's.

        If this object makes all groups, only this worker's is created, for any number of parts.
        Torch names it by its members and the number of groups this process has. Members agree on
        that number if every worker creates its groups by `split` before those of `pair_groups`.
        """
        own = own_part(parts, rank=self.rank, world_size=self.world_size)
        every = [list(part) for part in parts]
        with lost_peers_named(self._worker):
            if _can_split():
                group: object = dist.split_group(split_ranks=every, timeout=self._limit)
            elif self._opens_groups:
                group = dist.new_group(own, timeout=self._limit, use_local_synchronization=True)
            else:  # in the same order on every worker
                groups = [dist.new_group(part, timeout=self._limit) for part in every]
                group = groups[every.index(own)]
        assert isinstance(group, dist.ProcessGroup)
        self._groups.append(TorchGroup(group))
        return self._groups[-1]

    def pair_groups(
        self, pairs: Sequence[tuple[int, int]]
    ) -> dict[tuple[int, int], dist.ProcessGroup]:
        """Create a Gloo group for each pair of ranks; return those of this worker.

        Every worker creates all of them, in this order. A pair may occur twice, once reversed.
        Their timeout is the short one: they are used only while all wait for gradients or updates.
        """
        made: dict[tuple[int, int], dist.ProcessGroup] = {}
        with lost_peers_named(self._worker), _by_members_alone():
            for pair in pairs:
                group = dist.new_group(sorted(pair), timeout=self.timeout, backend="gloo")
                if self.rank in pair:
                    assert isinstance(group, dist.ProcessGroup)
                    made[pair] = group
        return made

    def barrier(self) -> None:
        """Wait for every worker; unlike `wait` of a sum, this blocks the host on accelerators."""
        index = self.device.index
        devices = None if self.device.type == "cpu" or index is None else [index]
        self._start(
            lambda: dist.barrier(group=self._group, async_op=True, device_ids=devices)
        ).wait()

    def started(self) -> None:
        """Reduce the timeout of all groups to `timeout`, if this object opened them."""
        if self.timeout is None or self._limit == self.timeout:
            return
        self._limit = self.timeout
        if dist.get_backend() in {"gloo", "nccl"}:  # torch changes that of no other library
            for group in self._groups:
                _set_pg_timeout(self.timeout, group._group)

    def members(self) -> dict[str, list[int]]:
        """Return the ranks of each group, by torch's name of it; pairs are left out."""
        groups = [group._group or dist.group.WORLD for group in self._groups]
        return {
            group.group_name: dist.get_process_group_ranks(group)
            for group in groups
            if group is not None
        }

    def close(self) -> None:
        """Do nothing: the code that opened the group closes it."""


class TorchDistributed(RunningTorch):
    """A Backend over the default process group, which it opens and closes.

    An operation that another worker has not joined after `timeout` seconds fails; with `starting`,
    after STARTING times as long until `started` is called.
    """

    _opens_groups = True

    def __init__(self, timeout: float = TIMEOUT_SECONDS, *, starting: bool = False) -> None:
        needed = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        missing = [name for name in needed if not os.environ.get(name)]
        if missing:
            raise BackendError(
                f"the torch backend needs {', '.join(missing)} in the environment; start the "
                "workers with --workers N or with torchrun"
            )
        rank = number("RANK", 0)
        world_size = number("WORLD_SIZE", 1)
        local_rank = number("LOCAL_RANK", rank)
        local_size = number("LOCAL_WORLD_SIZE", world_size)
        device = pick_device(local_rank, local_size, compared=True)
        # Without LOCAL_WORLD_SIZE others may be on other hosts, unless none can reach the store.
        here = os.environ["MASTER_ADDR"].startswith(("127.", "::1", "localhost"))
        if number("LOCAL_WORLD_SIZE", world_size if here else 0) == world_size:
            use_loopback()
        self.timeout = timedelta(seconds=timeout)
        self._limit = self.timeout * (STARTING if starting else 1)
        enable_recorder()
        with lost_peers_named(rank):
            store, rank, world_size = open_store(self._limit)
            # torchrun's store survives a restart, with the addresses of the previous workers.
            attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            self.store = PrefixStore(attempt, store.clone())
            """A connection of this object to the store of all workers."""

            store = PrefixStore(attempt, store)
            require_one_type(
                store, device.type, rank=rank, world_size=world_size, unit=accelerator.uuid(device)
            )
            dist.init_process_group(
                dist.get_default_backend_for_device(device),
                store=store,
                rank=rank,
                world_size=world_size,
                timeout=self._limit,
                device_id=None if device.type == "cpu" else device,
            )
        super().__init__(device)

    def seconds_allowed(self) -> float:
        """Return the present timeout of an operation."""
        assert self._limit is not None
        return self._limit.total_seconds()

    def close(self) -> None:
        """Destroy the process groups."""
        if dist.is_initialized():
            dist.destroy_process_group()


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
    bound = world.bound_device_id
    world.bound_device_id = None
    try:
        yield
    finally:
        world.bound_device_id = bound


@contextmanager
def lost_peers_named(worker: int, *, by: type[RuntimeError] = RuntimeError) -> Iterator[None]:
    """Convert an error of the library, which cannot reach another worker, to PeerLostError."""
    try:
        yield
    except by as error:  # Gloo's are plain RuntimeErrors
        of_this_worker = "CUDA error" in str(error) or accelerator.is_out_of_memory(error)
        if of_this_worker:
            raise
        reason = " ".join(str(error).split())[:500] or type(error).__name__
        text = f"worker {worker} lost contact with another worker ({reason})"
        raise PeerLostError(text) from error


def open_store(limit: timedelta) -> tuple[Any, int, int]:
    """Open the store at MASTER_ADDR and MASTER_PORT; return it with rank and world size."""
    joined: tuple[Any, int, int] = next(rendezvous("env://", timeout=limit))
    return joined


def require_one_type(
    store: Store, own: str, *, rank: int, world_size: int, unit: str | None = None
) -> None:
    """Raise MismatchError on every worker unless all compute on the same type of device.

    Also raised if two workers use the same `unit`, a device's unique name, if it has one. Without
    this, NCCL and Gloo would wait for each other. The last worker to arrive compares, so that the
    others make only a few requests for any world size.
    """
    store.set(f"device/{rank}", own)
    store.add(f"on/{own}", 1)
    if unit is not None:
        other = store.compare_set(f"unit/{unit}", "", str(rank)).decode()
        if other != str(rank):
            store.set("shared", f"{other} and {rank} share GPU {unit}")
    if store.add("arrived", 1) == world_size:
        difference = ""
        if store.add(f"on/{own}", 0) < world_size:
            types = store.multi_get([f"device/{worker}" for worker in range(world_size)])
            try:
                require_same([{"device": kind.decode()} for kind in types])
            except MismatchError as error:
                difference = str(error)
        elif unit is not None and store.check(["shared"]):
            difference = f"workers {store.get('shared').decode()}; {remedy()}"
        store.set("difference", difference)
    difference = store.get("difference").decode()
    if not difference:
        return
    if store.add("informed", 1) == world_size:
        store.set("all informed", "")
    if rank == 0:  # its process may serve the store
        with suppress(dist.DistStoreError):
            store.wait(["all informed"], timedelta(seconds=GRACE_SECONDS))
    raise MismatchError(difference)
