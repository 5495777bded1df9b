"""A simulated accelerator: a separate device that computes on the CPU and counts operations.

`simulate()` registers the device "sim" through PyTorch's Python backend. This cannot be undone:
call it in a forked worker (`on_forked_workers`). Then `torch.accelerator` finds one accelerator.
Its tensors wrap a CPU tensor, which computes; every operation on them

    is refused    if it mixes tensors of both devices, as CUDA does (0-d CPU tensors aside), or uses
                  memory that a collective is still using (see `late_group`)
    is counted    in `COUNTS`: operations, of these launches (all but views and allocations), host
                  syncs, transfers between host and device, and of these the pageable copies, which
                  block the host until the device has finished its queue
    is recorded   in a graph, where nothing is computed: a replay is one launch. Refused are a host
                  sync, a copy of pageable memory and an event there, and a replay of which memory
                  was freed, of the device or pinned

Each count is a Counter by the line of largebatch that caused it; autograd's own have "backward".
"""

import copy
import functools
import sys
import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, Self
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils import backend_registration
from torch.utils._device import _device_constructors
from torch.utils._pytree import tree_flatten, tree_map_only

import largebatch.accelerator
from largebatch import proof
from largebatch.models import kernels

aten = torch.ops.aten

NAME = "sim"

Value = Any
"""Arguments and result of an operation."""

_FREE = {
    "alias", "as_strided", "chunk", "detach", "diagonal", "empty", "empty_like", "empty_strided",
    "expand", "new_empty", "new_empty_strided", "permute", "select", "slice", "split",
    "split_with_sizes", "squeeze", "t", "transpose", "unbind", "unfold", "unsqueeze", "view",
    "_unsafe_view", "_reshape_alias", "reshape", "view_as_real", "narrow", "movedim", "real",
}  # fmt: skip
"""Operations that launch nothing: views and allocations."""

_SYNCS = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "equal"}
"""Operations whose result, or its shape, the host reads."""

_INDEXED = {"index", "index_put", "index_put_", "_index_put_impl_"}


@dataclass(slots=True)
class Counts:
    """Counts by line."""

    operations: Counter[str] = field(default_factory=Counter)
    launches: Counter[str] = field(default_factory=Counter)
    syncs: Counter[str] = field(default_factory=Counter)
    transfers: Counter[str] = field(default_factory=Counter)
    pageable: Counter[str] = field(default_factory=Counter)
    aside: Counter[str] = field(default_factory=Counter)
    """Transfers to the device in other streams than the default one, whose work goes on."""

    def clear(self) -> None:
        """Set all counts to zero."""
        for counter in self._all():
            counter.clear()

    def totals(self) -> dict[str, int]:
        """Return the sum of each counter by its name."""
        return {name: getattr(self, name).total() for name in self.__slots__}

    def _all(self) -> Iterable[Counter[str]]:
        return (getattr(self, name) for name in self.__slots__)


COUNTS = Counts()

_PINNED: dict[int, Tensor] = {}
"""Pinned host memory by its address; kept alive, so that no address is used twice."""

_BUSY: dict[int, "Busy"] = {}
"""What uses the memory at an address outside the order of the device; see `late_group`."""


class Busy:
    """An operation that uses the memory of a tensor until it is complete."""

    ordered = False
    """True if the device waits for it: the next operation on the memory completes it."""

    def complete(self) -> None:
        """Complete it."""

    def is_complete(self) -> bool:
        """Return True if the device has completed it."""
        return True


_STREAM = threading.local()


def in_default_stream() -> bool:
    """Return True unless this thread has entered another stream."""
    return getattr(_STREAM, "current", None) is None


class Allocated:
    """Bytes of the tensors that were made since `limit` was set; more raise OutOfMemoryError.

    A backward pass raises it at its end: autograd's threads lose errors of Python's fallbacks.
    """

    def __init__(self) -> None:
        self.limit: int | None = None
        self.failed = False
        self.bytes = self.peak = 0
        self._tensors: Counter[int] = Counter()
        """Number of tensors by the address of their memory."""

    def add(self, tensor: "SimTensor") -> None:
        """Count the memory of a tensor until its last tensor is gone."""
        memory = tensor.raw.untyped_storage()
        address = memory.data_ptr()
        size = memory.nbytes()
        if not self._tensors[address]:
            assert self.limit is not None
            self.failed = self.failed or self.bytes + size > self.limit
            if torch._C._current_graph_task_id() == -1:  # not in a backward pass
                self.check()
            self.bytes += size
            self.peak = max(self.peak, self.bytes)
        self._tensors[address] += 1
        weakref.finalize(tensor, self._remove, address, size)

    def check(self) -> None:
        """Raise OutOfMemoryError if a tensor did not fit."""
        failed = self.failed
        self.failed = False
        if failed:
            raise torch.OutOfMemoryError(f"more than the {self.limit} bytes of the device")

    def _remove(self, address: int, size: int) -> None:
        self._tensors[address] -= 1
        self.bytes -= 0 if self._tensors[address] else size


ALLOCATED = Allocated()


def _backward(tensor: Tensor, *args: Value, **settings: Value) -> None:
    torch.autograd.backward(tensor, *args, **settings)
    ALLOCATED.check()


class SimTensor(Tensor):
    """A tensor on the simulated device; `raw` holds its values."""

    raw: Tensor

    @staticmethod
    def __new__(cls: type[Self], raw: Tensor) -> Self:
        wrapper = Tensor._make_wrapper_subclass(
            cls,
            raw.size(),
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            layout=raw.layout,
            device=torch.device(NAME, 0),
            requires_grad=False,
        )
        wrapper.raw = raw
        if ALLOCATED.limit is not None:
            ALLOCATED.add(wrapper)
        made: Self = wrapper
        if Graph.recording is not None:
            Graph.recording.note(made, made=True)
        return made

    def __repr__(self) -> str:  # type: ignore[override]  # torch's contents are its own
        return f"SimTensor({self.raw})"

    @property
    def data(self) -> Tensor:
        """The tensor without its history; what it is set to replaces values and strides."""
        without: Tensor = Tensor.data.__get__(self)  # type: ignore[attr-defined]  # a descriptor
        return without

    @data.setter
    def data(self, new: Tensor) -> None:
        assert isinstance(new, SimTensor)
        Tensor.data.__set__(self, new)  # type: ignore[attr-defined]  # as above
        self.raw = new.raw

    def data_ptr(self) -> int:
        """Return the address, which is also that of the device's memory."""
        return self.raw.data_ptr()

    def tolist(self) -> Value:
        """Return the values; the host waits for them."""
        return self.cpu().tolist()

    def record_stream(self, stream: Value) -> None:
        """Do nothing: memory is not reused while a tensor of it exists."""

    def new_tensor(self, data: Value, **settings: Value) -> Tensor:  # type: ignore[override]  # settings are torch's
        """Copy values from unpinned host memory."""
        host = self.raw.new_tensor(data, **{k: v for k, v in settings.items() if k != "device"})
        return host.to(NAME)

    def __deepcopy__(self, memo: dict[int, Value]) -> Tensor:
        made: Tensor = SimTensor(self.raw.clone())
        if getattr(self, "_is_param", False):
            made = nn.Parameter(made, self.requires_grad)
        else:
            made.requires_grad_(self.requires_grad)
        if self.grad is not None:
            made.grad = copy.deepcopy(self.grad, memo)
        memo[id(self)] = made
        return made

    def __reduce_ex__(self, _: object) -> tuple[Any, ...]:
        return _rebuilt, (self.raw, self.requires_grad, getattr(self, "_is_param", False))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's
        cls,
        func: Value,
        types: Value,
        args: Value = (),
        kwargs: Value = None,
    ) -> Value:
        """Execute an operation."""
        return _run(func, args, kwargs or {})


def _rebuilt(raw: Tensor, requires_grad: bool, is_parameter: bool) -> Tensor:
    if is_parameter:
        return nn.Parameter(SimTensor(raw), requires_grad)
    return SimTensor(raw).requires_grad_(requires_grad)


def _run(func: Value, args: Value, kwargs: dict[str, Value]) -> Value:
    name = func.overloadpacket.__name__
    flat, _ = tree_flatten((args, kwargs))
    ours = [x for x in flat if isinstance(x, SimTensor)]
    host = [x for x in flat if isinstance(x, Tensor) and not isinstance(x, SimTensor) and x.dim()]
    if name not in _FREE:
        for tensor in ours:
            require_idle(tensor, name)
    stays = _count(name, args, kwargs, ours, host)
    target = kwargs.get("device")
    if target is not None and torch.device(target).type == NAME:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    kwargs = {key: value for key, value in kwargs.items() if key != "pin_memory"}
    raws = {id(x): x.raw for x in ours}
    recording = Graph.recording
    if recording is not None:
        for x in ours:
            recording.note(x)
        others = (x for x in flat if isinstance(x, Tensor) and not isinstance(x, SimTensor))
        recording.pinned += [weakref.ref(x) for x in others if is_pinned(x)]
        if name not in _FREE:
            real_args, real_kwargs = tree_map_only(Tensor, memory_of, (args, kwargs))
            # It is computed when it is replayed; numbers of classes may be any by now.
            raws = {id(x): x.raw.clone().mul_(x.dtype.is_floating_point) for x in ours}
    known = {id(raws[id(x)]): x for x in ours}
    raw_args, raw_kwargs = tree_map_only(SimTensor, lambda x: raws[id(x)], (args, kwargs))
    out = _computed(func, raw_args, raw_kwargs)
    if recording is not None and name not in _FREE:
        fresh = [
            (place, x)
            for place, x in enumerate(tree_flatten(out)[0])
            if isinstance(x, Tensor) and id(x) not in known
        ]
        recording.add(lambda: _repeat(func, real_args, real_kwargs, fresh), [x for _, x in fresh])
    if not stays:
        return out
    return tree_map_only(
        Tensor,
        lambda x: known.get(id(x), x if isinstance(x, SimTensor) else SimTensor(x)),
        out,
    )


def _computed(func: Value, args: Value, kwargs: dict[str, Value]) -> Value:
    """Return the result of an operation; random numbers are those of the device."""
    draws = torch.Tag.nondeterministic_seeded in func.tags
    generator: AbstractContextManager[None] = _device_generator() if draws else nullcontext()
    with torch.no_grad(), generator:
        return func(*args, **kwargs)


@contextmanager
def _device_generator() -> Iterator[None]:
    outer = torch.default_generator.get_state()
    torch.default_generator.set_state(GENERATOR.get_state())
    try:
        yield
    finally:
        GENERATOR.set_state(torch.default_generator.get_state())
        torch.default_generator.set_state(outer)


def _repeat(func: Value, args: Value, kwargs: Value, fresh: list[tuple[int, Tensor]]) -> None:
    """Compute an operation of a graph again, into the memory of its first results."""
    flat = tree_flatten(_computed(func, args, kwargs))[0]
    for place, target in fresh:
        target.copy_(flat[place])


def _count(
    name: str, args: Value, kwargs: dict[str, Value], ours: list[SimTensor], host: list[Tensor]
) -> bool:
    """Count an operation; return whether its result is on the device."""
    line = _line()
    COUNTS.operations[line] += 1
    if name in _COPIES:
        source, to, waits = _COPIES[name](args, kwargs)
        if to != isinstance(source, SimTensor):
            _count_transfer(line, source, to_host=not to, waits=waits)
            return to
    elif ours and host:
        if name not in _INDEXED:
            raise RuntimeError(f"{name}: tensors on {NAME} and on the CPU")
        COUNTS.pageable[line] += 1  # an index is copied
        COUNTS.transfers[line] += 1
        _note_wait(line)
    if _reads(name, kwargs, ours):
        COUNTS.syncs[line] += 1
        _note_wait(line)
    COUNTS.launches[line] += name not in _FREE and Graph.recording is None
    return name not in {"_local_scalar_dense", "equal"}


def _of_copy(args: Value, kwargs: dict[str, Value]) -> tuple[Tensor, bool, bool]:
    """Return what is copied, whether to the device, and whether the host waits."""
    waits = not (args[2] if len(args) > 2 else kwargs.get("non_blocking"))
    return args[1], isinstance(args[0], SimTensor), waits


def _of_conversion(args: Value, kwargs: dict[str, Value]) -> tuple[Tensor, bool, bool]:
    target = kwargs.get("device")
    ours = isinstance(args[0], SimTensor)
    to = ours if target is None else torch.device(target).type == NAME
    return args[0], to, not kwargs.get("non_blocking")


_COPIES = {"copy_": _of_copy, "_to_copy": _of_conversion}


def _reads(name: str, kwargs: dict[str, Value], ours: list[SimTensor]) -> bool:
    """Return whether the host reads the result of an operation, or its shape."""
    masked = name in _INDEXED and any(x.dtype is torch.bool for x in ours[1:])
    counted = name == "repeat_interleave" and not kwargs.get("output_size")
    return name in _SYNCS or masked or counted


def _count_transfer(line: str, source: Tensor, *, to_host: bool, waits: bool) -> None:
    COUNTS.transfers[line] += 1
    if to_host:
        COUNTS.syncs[line] += waits
        if waits:
            _note_wait(line)
    elif not is_pinned(source):
        COUNTS.pageable[line] += 1
        _note_wait(line)
    COUNTS.aside[line] += not to_host and not in_default_stream()


def _note_wait(line: str) -> None:
    """Refuse a wait of the host in a graph; warn of others where torch would."""
    if Graph.recording is not None:
        raise RuntimeError(f"{line}: operation not permitted when stream is capturing")
    if MODULE.sync_debug_mode == "warn":
        warnings.warn(f"called a synchronizing operation in {line}", UserWarning, stacklevel=5)


_PACKAGE = str(Path(largebatch.__file__).parent) + "/"


def _line() -> str:
    """Return the innermost line of largebatch that is running."""
    frame = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_PACKAGE):
            return f"{file.removeprefix(_PACKAGE)}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]  # None ends it
    return "backward"


def _address(tensor: SimTensor) -> int:
    return tensor.raw.untyped_storage().data_ptr()


def require_idle(tensor: SimTensor, name: str) -> None:
    """Complete what the device waits for; raise RuntimeError where it does not wait."""
    busy = _BUSY.get(_address(tensor))
    if busy is None:
        return
    if not busy.ordered:
        raise RuntimeError(
            f"{name} uses memory of a collective that is under way; its work was not waited for"
        )
    busy.complete()


def mark_busy(tensor: SimTensor, busy: Busy) -> None:
    """Note that something uses the memory of a tensor outside the order of the device."""
    _BUSY[_address(tensor)] = busy


def mark_idle(tensor: SimTensor, busy: Busy) -> None:
    """End that, unless something else uses the memory by now."""
    if _BUSY.get(_address(tensor)) is busy:
        del _BUSY[_address(tensor)]


def synchronize(*_: object) -> None:
    """Block the host until the device has finished its queue."""
    for busy in [busy for busy in _BUSY.values() if busy.ordered]:
        busy.complete()


class Graph:
    """A graph of the device: what was asked of it in a `with` block, which nothing has computed.

    A replay writes into the memory of the results. What nobody refers to by then is overwritten,
    as by another graph of the same memory.
    """

    recording: "Graph | None" = None

    def __init__(self) -> None:
        self._steps: list[Callable[[], object]] = []
        self._results: list[Tensor] = []
        self._seen: dict[int, list[weakref.ref[SimTensor]]] = {}
        """Tensors of each address: of others' memory one must be alive in a replay."""

        self._own: set[int] = set()
        self.pinned: list[weakref.ref[Tensor]] = []
        """Tensors of pinned memory that are copied, alive in a replay too."""

    def note(self, tensor: SimTensor, *, made: bool = False) -> None:
        """Note a tensor that the graph reads, writes, or makes."""
        address = _address(tensor)
        if made and address not in self._seen:
            self._own.add(address)
        self._seen.setdefault(address, []).append(weakref.ref(tensor))

    def add(self, step: Callable[[], object], results: list[Tensor]) -> None:
        """Add a launch, and the memory that it writes first."""
        self._steps.append(step)
        self._results += results

    def finish(self) -> None:
        """Fill the results with NaN: nothing has been computed."""
        for result in self._results:
            if result.is_floating_point():
                result.fill_(torch.nan)

    def replay(self) -> None:
        """Compute everything, as one launch."""
        line = _line()
        COUNTS.operations[line] += 1
        COUNTS.launches[line] += 1
        dead = {at for at, seen in self._seen.items() if not any(ref() is not None for ref in seen)}
        if dead - self._own:
            raise RuntimeError(f"a graph uses the memory of {len(dead - self._own)} freed tensors")
        if any(ref() is None for ref in self.pinned):
            raise RuntimeError("a graph copies pinned memory that was freed")
        synchronize()  # a replay waits for what was asked before
        for step in self._steps:
            step()
        for result in self._results:
            if result.untyped_storage().data_ptr() in dead and result.is_floating_point():
                result.fill_(torch.nan)


_USERS: dict[object, weakref.WeakSet[Graph]] = {}
"""Graphs by their memory, which ends with the last one."""


@contextmanager
def recording(graph: Graph, *, pool: object, capture_error_mode: str) -> Iterator[None]:
    """Record what is asked of the device in this block."""
    assert pool is not None
    assert capture_error_mode == "thread_local"
    assert Graph.recording is None
    if pool in _USERS and not _USERS[pool]:
        raise RuntimeError("use_count > 0: memory of graphs that are gone")
    _USERS.setdefault(pool, weakref.WeakSet()).add(graph)
    drawn = GENERATOR.get_state()
    Graph.recording = graph
    MODULE.pools.append(pool)
    try:
        yield
        MODULE.pools.remove(pool)
    except Exception as error:
        if "capturing" not in str(error):  # else the recording is invalid, and does not end
            MODULE.pools.remove(pool)
        raise
    finally:
        Graph.recording = None
        GENERATOR.set_state(drawn)
        graph.finish()


class Event:
    """An event in the stream of the device, whose operations are complete when they return.

    Collectives, and what was asked of the default stream after it hung, are not.
    """

    def __init__(self, *_: object, **__: object) -> None:
        self.device = torch.device(NAME, 0)
        self._before: list[Busy] = []

    def record(self, *_: object) -> None:
        """Record the operations that must complete before the event."""
        if Graph.recording is not None:
            raise RuntimeError("an event in a graph: its time is unknown")
        self._before = [busy for busy in _BUSY.values() if busy.ordered]

    def synchronize(self) -> None:
        """Block the host until the event."""
        for busy in self._before:
            busy.complete()

    def query(self) -> bool:
        """Return True if the device has reached the event."""
        return all(busy.is_complete() for busy in self._before)

    def elapsed_time(self, _: "Event") -> float:
        """Return milliseconds to another event."""
        return 0.0


class Stream:
    """A stream of the device; all run in the order in which they are asked, until one hangs."""

    def __init__(self, *_: object, **__: object) -> None:
        self.device = torch.device(NAME, 0)
        self._outer: Stream | None = None

    def query(self) -> bool:
        """Return True: the device completes operations immediately."""
        return True

    def wait_event(self, event: Event) -> None:
        """Make the stream wait, and with it the host, which reads from it next."""
        event.synchronize()

    def wait_stream(self, _: "Stream") -> None:
        """Do nothing: all before is complete."""

    def __enter__(self) -> Self:
        self._outer = getattr(_STREAM, "current", None)
        _STREAM.current = self
        return self

    def __exit__(self, *_: object) -> None:
        _STREAM.current = self._outer


SEEDS: Counter[int] = Counter()
"""Number of times each seed was set on the device."""

GENERATOR = torch.Generator()
"""Random numbers of the device."""

MEMORY = 2**34
"""Bytes of the device."""

NUM_DEVICES = 8
"""Number of reported devices, one per worker; each worker sees its own as the first."""


class _Module:
    """What is asked of torch.sim, the module of the device."""

    uuid: str | None = None
    """Which of all devices it is."""

    sync_debug_mode = ""
    pools: ClassVar[list[object]] = []
    """Pools of memory that recordings use."""

    default_generators = (mock.Mock(),)  # as they are after an error in a graph
    CUDAGraph = Graph
    graph: Value = staticmethod(recording)
    device = nullcontext
    stream = nullcontext

    def current_stream(self, _: object = None) -> None: ...

    def graph_pool_handle(self) -> object:
        return object()

    def get_sync_debug_mode(self) -> str:
        return self.sync_debug_mode or "default"

    def set_sync_debug_mode(self, mode: str) -> None:
        if not self.sync_debug_mode:  # as torch does once in a process
            text = "Synchronization debug mode is a prototype feature and does not yet detect all "
            warnings.warn(f"{text}synchronizing operations", UserWarning, stacklevel=2)
        self.sync_debug_mode = mode

    @property
    def memory(self) -> SimpleNamespace:
        def end(_: int, pool: object) -> None:
            if pool not in self.pools:
                raise RuntimeError("not currently recording to mempool_id")
            self.pools.remove(pool)

        return SimpleNamespace(_cuda_endAllocateToPool=end, _cuda_releasePool=lambda *_: None)

    def get_device_name(self, _: object = None) -> str:
        return "simulated"

    def get_device_properties(self, _: object = None) -> SimpleNamespace:
        return SimpleNamespace(
            name="simulated", total_memory=ALLOCATED.limit or MEMORY, uuid=self.uuid
        )

    def max_memory_allocated(self, _: object = None) -> int:
        return ALLOCATED.peak

    def memory_allocated(self, _: object = None) -> int:
        return ALLOCATED.bytes

    memory_reserved = memory_allocated

    def reset_peak_memory_stats(self, _: object = None) -> None:
        ALLOCATED.peak = ALLOCATED.bytes

    def mem_get_info(self, _: object = None) -> tuple[int, int]:
        return (ALLOCATED.limit or MEMORY) - ALLOCATED.bytes, ALLOCATED.limit or MEMORY

    def empty_cache(self) -> None: ...

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def set_device(self, _: object) -> None: ...

    def device_count(self) -> int:
        return NUM_DEVICES

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed(self, seed: int) -> None:
        SEEDS[seed] += 1
        GENERATOR.manual_seed(seed)

    manual_seed_all = manual_seed

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def synchronize(self, *_: object) -> None:
        synchronize()

    def get_rng_state(self, *_: object) -> Tensor:
        return GENERATOR.get_state()

    def set_rng_state(self, state: Tensor, *_: object) -> None:
        GENERATOR.set_state(state)


MODULE = _Module()


@functools.cache
def simulate() -> torch.device:
    """Register the device for the rest of this process and return it."""
    register = getattr(backend_registration, "_setup_privateuseone_for_python_backend", None)
    if register is None:
        pytest.skip("this version of torch registers no device in Python")
    register(NAME, backend_module=MODULE)
    torch.__future__.set_swap_module_params_on_conversion(False)
    library = torch.library.Library("_", "IMPL")
    library.fallback(lambda func, *args, **kwargs: _run(func, args, kwargs), "PrivateUse1")
    library.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    _KEPT.append(library)
    _autocast()
    _device_constructors()  # of torch, before some are replaced: torch.device("meta") needs them
    for target, name, replacement in (
        (proof, "prove", lambda _, parts, *__, **___: {it: proof.TrialsResult() for it in parts}),
        (torch, "Event", Event),
        (torch, "Stream", Stream),
        (torch.accelerator, "synchronize", synchronize),
        (torch.accelerator, "current_stream", Stream),
        (torch.accelerator, "max_memory_allocated", lambda *_: 0),
        (torch, "tensor", _factory(torch.tensor)),
        (torch, "empty", _factory(torch.empty)),
        (torch, "zeros", _factory(torch.zeros)),
        (Tensor, "backward", _backward),
        (Tensor, "pin_memory", lambda tensor, *_: pinned(tensor.clone())),
        (Tensor, "is_pinned", lambda tensor, *_: is_pinned(tensor)),
    ):
        mock.patch.object(target, name, replacement).start()
    return torch.device(NAME, 0)


def use_graphs() -> None:
    """Allow graphs on the device, with the sums of `late_group`."""
    import late_group

    from largebatch.distributed import torch_distributed

    for target, name in ((largebatch.accelerator, "GRAPHS"), (torch_distributed, "_IN_GRAPHS")):
        mock.patch.object(target, name, {NAME, late_group.BACKEND}).start()


def use_kernels(*, computes: bool = True, of_models: bool = True, of_images: bool = False) -> None:
    """Run Triton's kernels on the device, each counted as one launch.

    Its interpreter computes them, slowly; otherwise their results are never written. Those of
    optimizers are quick; those of models are left out unless `of_models`, the one that crops images
    unless `of_images`.
    """
    launch = largebatch.accelerator.launch
    mock.patch.object(kernels.batchnorm(), "PARTS", 8).start()  # the interpreter is slow

    def launch_on_raw(kernel: Value, grid: Value, *args: Value, **constants: Value) -> None:
        COUNTS.operations[line := _line()] += 1
        COUNTS.launches[line] += Graph.recording is None
        synchronize()  # optimizers' kernels read memory by its address
        for tensor in args:
            if isinstance(tensor, SimTensor):
                require_idle(tensor, kernel.__name__)
        raws = tree_map_only(SimTensor, lambda x: x.raw, args)
        if Graph.recording is not None:
            for tensor in args:
                if isinstance(tensor, SimTensor):
                    Graph.recording.note(tensor)
            work = functools.partial(launch, kernel, grid, *raws, **constants)
            Graph.recording.add(work if computes else lambda: None, [])
        elif computes:
            launch(kernel, grid, *raws, **constants)

    parts = (proof.BATCHNORM, proof.OPTIMIZER, proof.CROPS)
    proof.decide(torch.device(NAME, 0), dict.fromkeys(parts))  # as if they were tried
    mock.patch.object(largebatch.accelerator, "launch", launch_on_raw).start()
    devices = {
        proof.BATCHNORM: {NAME} if of_models else set(),
        proof.OPTIMIZER: {NAME},
        proof.CROPS: {NAME} if of_images else set(),
    }
    mock.patch.object(proof, "KERNEL_DEVICES", devices).start()


_KEPT: list[Any] = []
"""Libraries, whose kernels are removed with them."""


def pinned(tensor: Tensor) -> Tensor:
    """Return the tensor, its memory counted as pinned."""
    _PINNED[tensor.untyped_storage().data_ptr()] = memory_of(tensor)
    return tensor


def memory_of(tensor: Tensor) -> Tensor:
    """Return a tensor of a tensor's values, which does not keep it alive."""
    return tensor.raw if isinstance(tensor, SimTensor) else tensor.detach()


def is_pinned(tensor: Tensor) -> bool:
    """Return True if the memory of a tensor is pinned."""
    return tensor.untyped_storage().data_ptr() in _PINNED


def _factory(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a factory of tensors whose pinned memory is noted, and whose copies are counted."""

    @functools.wraps(make)
    def made(
        *args: Value, pin_memory: bool = False, device: Value = None, **settings: Value
    ) -> Tensor:
        if device is not None and torch.device(device).type == NAME and make is _TENSOR:
            requires_grad = settings.pop("requires_grad", False)
            return make(*args, **settings).to(NAME).requires_grad_(requires_grad)
        tensor = make(*args, device=device, **settings)
        return pinned(tensor) if pin_memory else tensor

    return made


_TENSOR = torch.tensor

_LOWER = ("conv1d", "conv2d", "conv3d", "linear", "matmul", "mm", "addmm", "bmm", "baddbmm")
_FLOAT = ("nll_loss", "mse_loss", "binary_cross_entropy_with_logits", "cumsum", "prod")
"""Operations that autocast carries out in the lower type, and in float32, as on the CPU."""


def _autocast() -> None:
    library = torch.library.Library("aten", "IMPL")
    _KEPT.append(library)
    for names, lower in ((_LOWER, True), (_FLOAT, False)):
        for name in names:
            with suppress(RuntimeError):  # not with this version
                library.impl(name, _cast(getattr(aten, name), lower=lower), "AutocastPrivateUse1")


def _cast(packet: Value, *, lower: bool) -> Callable[..., Value]:
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)  # type: ignore[attr-defined]  # stubs

    def cast(*args: Value, **kwargs: Value) -> Value:
        dtype = torch.get_autocast_dtype(NAME) if lower else torch.float32
        floating = (torch.float32, torch.bfloat16, torch.float16)

        def to(tensor: Tensor) -> Tensor:
            return tensor.to(dtype) if tensor.dtype in floating else tensor

        with torch._C._ExcludeDispatchKeyGuard(keys):
            return packet(*tree_map_only(Tensor, to, args), **kwargs)

    return cast
