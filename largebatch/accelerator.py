"""The GPU of any vendor (NVIDIA, AMD, Intel): the only module that calls `torch.accelerator`."""

import functools
import logging
import os
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from threading import get_ident
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.random.mtrand import get_bit_generator, set_bit_generator
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from largebatch.errors import clip

_LOG = logging.getLogger(__name__)

CPU = torch.device("cpu")

CUDA = "cuda"
"""Type of NVIDIA's GPUs, and of AMD's: PyTorch calls them so too."""

GRAPHS = {CUDA}
"""Types of devices with graphs: launches that are recorded once and replayed by one launch."""


def kind() -> torch.device | None:
    """Return this machine's accelerator type, without an index; None if there is none.

    Apple GPUs are excluded: they lack float64, in which moments and norms are summed.
    """
    device = torch.accelerator.current_accelerator(check_available=True)
    return None if device is None or device.type == "mps" else device


def count() -> int:
    """Return the number of accelerators visible to this process."""
    return 0 if kind() is None else torch.accelerator.device_count()


def current() -> torch.device:
    """Return this process's current accelerator, or the CPU if there is none."""
    device = kind()
    if device is None:
        return CPU
    return torch.device(device.type, torch.accelerator.current_device_index())


def choose(number: int) -> torch.device:
    """Make accelerator `number` the current one and return its device."""
    torch.accelerator.set_device_index(number)
    return current()


def names() -> list[str]:
    """Return the name of each accelerator visible to this process."""
    device = kind()
    if device is None:
        return []
    module = torch.get_device_module(device)
    return [str(module.get_device_name(number)) for number in range(count())]


def identity(device: torch.device) -> dict[str, str | None]:
    """Return the model of an accelerator, such as NVIDIA H200, its driver, and torch's libraries.

    The driver is None if the system does not name it.
    """
    name = device.type
    driver = None
    if is_remote(device):
        name = str(torch.get_device_module(device).get_device_name(device))
    # torch does not give the driver's version; Linux has it in a file for each vendor.
    for file in ("/proc/driver/nvidia/version", "/sys/module/amdgpu/version"):
        with suppress(OSError):
            driver = Path(file).read_text(encoding="utf-8").partition("\n")[0].strip()
    libraries = {"cuda": torch.version.cuda, "hip": torch.version.hip}
    return {"device": name, "driver": driver, **libraries}


def memory_bytes() -> int:
    """Return the memory of the first accelerator in bytes."""
    device = kind()
    assert device is not None
    return int(torch.get_device_module(device).get_device_properties(0).total_memory)


@functools.cache
def multiprocessors(device: torch.device) -> tuple[int, int]:
    """Return the number of multiprocessors of a GPU and the bytes of its L2 cache; 0 if unknown."""
    if device.type != CUDA:
        return 0, 0
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, int(getattr(properties, "L2_cache_size", 0))


def uuid(device: torch.device) -> str | None:
    """Return the unique identifier of an accelerator; None if it has none."""
    if not is_remote(device):
        return None
    value = getattr(torch.get_device_module(device).get_device_properties(device), "uuid", None)
    return None if value is None else str(value)


def visible_devices_variable() -> str:
    """Return the variable that selects a process's GPUs; AMD's obey CUDA_VISIBLE_DEVICES too."""
    device = kind()
    is_intel = device is not None and device.type == "xpu"
    return "ZE_AFFINITY_MASK" if is_intel else "CUDA_VISIBLE_DEVICES"


def hide(number: int) -> None:
    """Hide one of the visible accelerators from processes that are started from here on."""
    variable = visible_devices_variable()
    visible = os.environ.get(variable) or ",".join(map(str, range(count())))
    devices = visible.split(",")
    del devices[number]
    os.environ[variable] = ",".join(devices)


def is_remote(device: torch.device) -> bool:
    """Return True if a device has its own memory and runs asynchronously to the host."""
    return device.type != "cpu"


def stream(device: torch.device) -> torch.Stream | None:
    """Return a new stream of an accelerator; None for a CPU, which has no streams."""
    return torch.Stream(device) if is_remote(device) else None


def on(stream: torch.Stream | None) -> AbstractContextManager[object]:
    """Return a context that queues operations on `stream`, or on the current one if None."""
    return stream or nullcontext()


def event(device: torch.device, *, enable_timing: bool = False) -> torch.Event:
    """Record an event in the current stream of an accelerator and return it."""
    recorded = torch.Event(device, enable_timing=enable_timing)
    recorded.record()
    return recorded


def synchronize(device: torch.device) -> None:
    """Wait until a device has finished its queue. For measurements and emergencies only."""
    if is_remote(device):
        torch.accelerator.synchronize(device)


def seed(number: int, device: torch.device) -> None:
    """Seed the generators of the CPU and of one device; torch.manual_seed takes half a ms."""
    torch.default_generator.manual_seed(number)
    if is_remote(device):
        torch.get_device_module(device).manual_seed(number)


def save_generators(device: torch.device) -> Callable[[], None]:
    """Return a function that restores the generators of torch, NumPy and Python as they are now.

    Of torch's these are the ones of the CPU and of one device.
    """
    of_python = random.getstate()
    of_numpy = np.random.get_state()
    of_host = torch.get_rng_state()
    module = torch.get_device_module(device) if is_remote(device) else None
    of_device = None if module is None else module.get_rng_state(device)

    def restore() -> None:
        random.setstate(of_python)
        np.random.set_state(of_numpy)
        torch.set_rng_state(of_host)
        if module is not None:
            module.set_rng_state(of_device, device)

    return restore


def free_memory_bytes(device: torch.device) -> int:
    """Return the bytes of an accelerator that this process can still allocate."""
    return sum(_free_and_held(device))


_OUT_OF_MEMORY = (
    "out of memory",  # the driver's, as torch.AcceleratorError, and Triton's
    "CUBLAS_STATUS_ALLOC_FAILED",
    "HIPBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",  # its name from cuDNN 9 on
)
"""Texts of the errors of a device without memory that are RuntimeErrors like any other."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return True for an error of a device that has no memory left: torch's or a library's."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _OUT_OF_MEMORY)


@contextmanager
def memory_errors() -> Iterator[None]:
    """Raise torch.OutOfMemoryError for every error of a device that has no memory left."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError) or not is_out_of_memory(error):
            raise
        raise torch.OutOfMemoryError(str(error)) from error


def is_crowded(device: torch.device) -> bool:
    """Return True if graphs hold more than a quarter of the memory that is free besides."""
    free, held_bytes = _free_and_held(device)
    return 4 * held_bytes > free


def _free_and_held(device: torch.device) -> tuple[int, int]:
    """Return the free bytes of an accelerator, and those that the allocator keeps for tensors."""
    module = torch.get_device_module(device)
    # Cached blocks without tensors go back to the device first: what is then left in the cache is
    # held by graphs.
    module.empty_cache()
    held_bytes = module.memory_reserved(device) - module.memory_allocated(device)
    return int(module.mem_get_info(device)[0]), int(held_bytes)


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak memory of an accelerator's tensors in bytes."""
    return int(torch.get_device_module(device).max_memory_allocated(device))


def measure_peak(device: torch.device, work: Callable[[], object]) -> int:
    """Return the peak of the bytes that some work allocates on an accelerator."""
    module = torch.get_device_module(device)
    before = module.memory_allocated(device)
    module.reset_peak_memory_stats(device)
    work()
    return peak_memory_bytes(device) - int(before)


def usage(device: torch.device) -> tuple[float, float]:
    """Return a GPU's utilization in percent and its memory in use in bytes; NaN if unknown."""
    values = [float("nan")] * 2
    if is_remote(device):
        module = torch.get_device_module(device)
        for place, name in enumerate(("utilization", "device_memory_used")):
            # A missing value must not end a run: it is only shown.
            with suppress(Exception):  # no library, or no such value for a GPU partition
                values[place] = float(getattr(module, name)(device))
    return values[0], values[1]


class Graph:
    """Launches on a device, recorded once; `replay` repeats them on the same memory.

    Graphs with the same `pool` share the memory of their intermediate results, so they must be
    replayed in the order in which they were recorded.
    """

    failures = 0
    """Recordings that failed, after which older graphs no longer draw by the seed that is set.
    Those of evaluations are counted over all workers, whose graphs must be the same."""

    _shared_failures = 0
    """Number of failures that all workers have counted."""

    _recording = False
    _invalid: ClassVar[list[object]] = []

    def __init__(self, device: torch.device, pool: object = None) -> None:
        self._device = device
        self._module = torch.get_device_module(device)
        self._graph = self._module.CUDAGraph()
        self.pool = pool or self._module.graph_pool_handle()

    @contextmanager
    def record(self) -> Iterator[None]:
        """Record what is launched in this block, without running it.

        Nothing may wait for the device, nor keep a number of the host that changes later.
        """
        module = self._module
        # In the default mode a call of any other thread that CUDA forbids while it records, such
        # as the allocation of pinned memory by a decoder, would fail.
        settings = {"pool": self.pool, "capture_error_mode": "thread_local"}  # others load data
        outer = module.stream(module.current_stream())  # again after an error, which leaves torch's
        try:
            with module.device(self._device), outer, module.graph(self._graph, **settings):
                Graph._recording = True
                yield
        # Also for Ctrl-C: an unfinished recording leaves torch's allocator and generator
        # unusable.
        except BaseException:
            Graph.failures += 1
            self._clean_up()
            raise
        finally:
            Graph._recording = False

    @classmethod
    def unshared_failures(cls) -> int:
        """Return the failures on this worker that `share_failures` has not counted."""
        return cls.failures - cls._shared_failures

    @classmethod
    def share_failures(cls, number: int) -> None:
        """Count the failures of all workers, in place of those of this one."""
        cls._shared_failures += number
        cls.failures = cls._shared_failures

    def _clean_up(self) -> None:
        """End an invalid recording where torch, before 2.13, thinks that it goes on.

        Its allocator would not free tensors that two streams have used, such as batches, nor what
        it caches; and its generator would draw nothing.
        """
        module = self._module
        number = self._device.index or 0
        with suppress(RuntimeError, AttributeError):  # it has ended, or torch has other names
            module.memory._cuda_endAllocateToPool(number, self.pool)
            Graph._invalid.append(self._graph)  # the allocator of pinned memory may ask it
            module.memory._cuda_releasePool(number, self.pool)
        # A recording registers the generator's state with the graph; a copy of the state is not.
        generator = module.default_generators[number]
        generator.graphsafe_set_state(generator.clone_state())

    def replay(self) -> None:
        """Run the recorded launches, behind what is queued in the current stream."""
        self._graph.replay()


@runtime_checkable
class Replayable(Protocol):
    """What an object whose work is recorded in a graph offers to who replays it.

    Its tensors and numbers must be on the device, in memory that stays, and so must be its results.
    """

    def refusal(self) -> str | None:
        """Return why its work cannot be recorded as things are; None if it can be."""

    def reads(self) -> object:
        """Return addresses and numbers of the host that are fixed in a recording of its work.

        If they are no longer equal, the recording is of no use.
        """

    def refresh(self) -> None:
        """Do what the host does before its work: send numbers that have changed."""


def is_recording() -> bool:
    """Return True if launches are being recorded by `Graph.record`."""
    return Graph._recording


_DRAWS = "a pass draws random numbers on the host"


class _Draws:
    """Notes that this thread, or autograd for it, uses a random generator of the host.

    Other threads do too, such as the retries of a tracker and the threads of a data set: the states
    of the generators do not tell whose numbers were drawn. Generators that a module owns are
    compared by `watch_host`.
    """

    def __init__(self, found: list[str]) -> None:
        self._found = found
        self._thread = get_ident()
        self._is_on = False

    def note(self) -> None:
        """Note a draw of the calling thread if it is one of the passes' threads."""
        # Backward passes run in threads of autograd, which have a graph task while they work for
        # this thread.
        is_own = get_ident() == self._thread or torch._C._current_graph_task_id() != -1
        if self._is_on and is_own and _DRAWS not in self._found:
            self._found.append(_DRAWS)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Watch the generators of Python and NumPy in this block; those of torch: see `_Copies`."""
        before = sys.getprofile()
        with self._numpys():  # which takes the lock itself, at both ends
            self._is_on = True
            self.follow_calls()
            try:
                yield
            finally:
                self._is_on = False
                sys.setprofile(before)

    def follow_calls(self) -> None:
        """Watch the calls of the calling thread: autograd's has a profile of its own."""
        # Only if it is not set yet: this runs for every operation.
        if sys.getprofile() != self._on_call:
            sys.setprofile(self._on_call)

    def _on_call(self, _: object, event: str, function: object) -> None:
        if not self._is_on:  # a thread of autograd, after the block
            sys.setprofile(None)
        elif event == "c_call":
            owner = getattr(function, "__self__", None)
            name = getattr(function, "__name__", None)
            # The methods in C that move the generator; torch's compiler reads and restores it.
            draws = owner is random._inst and name in {"random", "getrandbits", "seed"}
            if draws or (owner is torch.default_generator and name in {"manual_seed", "seed"}):
                self.note()

    @contextmanager
    def _numpys(self) -> Iterator[None]:
        """Replace NumPy's generator by one with a watched lock, which every draw takes.

        A profile does not see NumPy's functions, which Cython compiles.
        """
        own: Any = get_bit_generator()
        lock = _NotedLock(own.lock, self.note)
        # A state is accepted by generators of the same name only.
        # NumPy's Generator and RandomState take `bit_generator.lock` in C for every draw, so a
        # lock that counts is the only place where a draw can be seen.
        watched = type(type(own).__name__, (type(own),), {"lock": lock})()
        with own.lock:
            watched.state = own.state
        set_bit_generator(watched)
        try:
            yield
        finally:
            with lock.inner:
                own.state = watched.state
            set_bit_generator(own)


class _NotedLock:
    """A lock that calls a function whenever it is taken."""

    def __init__(self, inner: Any, note: Callable[[], None]) -> None:  # noqa: ANN401 -- any lock
        self.inner = inner
        self._note = note

    def __enter__(self) -> object:
        self._note()
        return self.inner.__enter__()

    def __exit__(self, *error: object) -> None:
        self.inner.__exit__(*error)


class _Copies(TorchDispatchMode):
    """Collects operations of a device that read tensors of the host, which a replay reads again.

    It sees the operations of the thread that enters it, and of autograd's for it.
    """

    def __init__(self, found: list[str], draws: _Draws) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._found = found
        self._draws = draws

    supports_higher_order_operators = True

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True  # compiled modules run compiled

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401 -- torch's
        self._draws.follow_calls()
        result = func(*args, **(kwargs or {}))
        aten = torch.ops.aten
        packet = getattr(func, "overloadpacket", None)
        # A scalar tensor of the host that is an argument is passed by value, as in `x *
        # tensor(2)`: a replay keeps its value. A copy of it is read again, and so is memory.
        copies = packet in {aten.copy_, aten._to_copy}
        read = [tensor for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, Tensor)]
        written = [tensor for tensor in tree_leaves(result) if isinstance(tensor, Tensor)]
        draws = torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
        if draws and any(not is_remote(tensor.device) for tensor in written):
            self._draws.note()
        reads = any(not is_remote(tensor.device) and (tensor.dim() or copies) for tensor in read)
        if reads and any(is_remote(tensor.device) for tensor in written):
            self._found.append(f"a pass reads memory of the host ({func})")
        return result


@contextmanager
def passes(device: torch.device, changed: Callable[[], str | None]) -> Iterator[list[str]]:
    """Collect why a graph cannot repeat the passes of this block; full at its end.

    `changed` names what they have changed on the host.
    """
    draw_reasons: list[str] = []
    draws = _Draws(draw_reasons)
    with waits(device) as reasons, draws.watched(), _Copies(reasons, draws):
        yield reasons
    if name := changed():
        reasons.append(f"a pass changes {name}, which a replay would not")
    reasons += draw_reasons


@contextmanager
def waits(device: torch.device) -> Iterator[list[str]]:
    """Collect where this thread or autograd waits for a device in this block; full at its end."""
    reasons: list[str] = []
    caught: list[tuple[Any, ...]] = []
    module = torch.get_device_module(device)
    thread = get_ident()
    before = module.get_sync_debug_mode()

    def note(*warning: Any, **_: Any) -> None:  # noqa: ANN401 -- as showwarning
        is_own = get_ident() == thread or torch._C._current_graph_task_id() != -1
        caught.append((is_own, *warning[:4]))

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        module.set_sync_debug_mode("warn")
        try:
            yield reasons
        finally:
            module.set_sync_debug_mode(before)
    for is_own, message, kind, file, line in caught:
        if "called a synchronizing" not in str(message):
            if not str(message).startswith("Synchronization debug mode"):  # torch's, on first use
                warnings.warn_explicit(message, kind, file, line)
        elif is_own:
            reasons.insert(0, f"the host waits for the device in {Path(file).name}:{line}")


class Replayed:
    """A function of a batch on a device, recorded for each shape and replayed.

    The first two batches of a shape are computed as always, and the second decides: a function in
    which the host waits for the device, or draws random numbers, is never recorded.
    """

    def __init__(
        self,
        function: Callable[[Tensor], Tensor],
        device: torch.device,
        watch: Callable[[], Callable[[], str | None]],
    ) -> None:
        """`watch` returns a function that names what has changed on the host since."""
        self._function = function
        self._device = device
        self._watch = watch
        self._works = device.type in GRAPHS
        self._counts: dict[object, int] = {}
        self._recorded: dict[object, tuple[Graph, Tensor, Tensor]] = {}

    def __call__(self, batch: Tensor) -> Tensor:
        """Return the function of a batch; a replay's is a copy of the graph's memory."""
        form = batch.shape, batch.dtype, batch.stride()
        count = self._counts[form] = self._counts.get(form, 0) + 1
        if not self._works or batch.device != self._device or count == 1:
            return self._function(batch)
        # Not the first: libraries choose and compile kernels then, which waits for the device.
        if count == 2:
            with passes(self._device, self._watch()) as reasons:
                result = self._function(batch)
            self._works = not reasons
            return result
        if form not in self._recorded and not self._record(form, batch):
            return self._function(batch)
        # A graph reads and writes the addresses that it was recorded with.
        graph, source, result = self._recorded[form]
        source.copy_(batch)
        graph.replay()
        return result.clone()

    def _record(self, form: object, batch: Tensor) -> bool:
        graph = Graph(self._device)
        source = torch.empty_like(batch)
        try:
            with graph.record():
                result = self._function(source)
        except Exception as problem:  # torch raises all kinds
            _LOG.info("a forward pass runs without a graph: %s", clip(str(problem), 200))
            self._works = False
            return False
        self._recorded[form] = graph, source, result
        return True


def launch(kernel: Any, grid: tuple[int, ...], *args: object, **constants: object) -> None:  # noqa: ANN401 -- Triton is untyped
    """Launch a Triton kernel on the device of its first argument, with 8 warps a program."""
    assert isinstance(args[0], torch.Tensor)
    with torch.accelerator.device_index(args[0].device.index):
        kernel[grid](*args, num_warps=8, **constants)
