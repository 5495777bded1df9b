"""Copies of a script's objects, from which they are restored in place and bit for bit.

Containers keep their identity and get their items back; tensors keep their identity and get their
content back. So everything that refers to them (a wrapper, an optimizer, a closure) stays valid.
Objects of the script's own classes are copied with all within them; those of libraries only where
the audit knows that a step changes them. Of loaders and data sets only attributes are copied, since
they hold the data.
"""

import copy
import io
import random
import sys
import sysconfig
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, Sampler

from largebatch import accelerator

_ENTERED = (nn.Module, Optimizer, LRScheduler, Sampler, torch.amp.GradScaler)
"""Classes whose attributes are copied wherever an object of them is found."""

_PLAIN = (bool, int, float, complex, str, bytes, type(None))

INNER_LOADERS = ("base_dataloader", "_dataloader", "loader", "dataloader")
"""Attributes of the inner loader in wrappers: Accelerate's, Fabric's, then timm's, which compute on
batches."""

_SAMPLERS = ("sampler", "batch_sampler")
_DATA = ("dataset", "datasets", "transform", "transforms", "target_transform")
"""Attributes of loaders, samplers and data sets that an epoch may change."""

_REDUCER_FLAG = "_static_graph_delay_allreduce_enqueued"
"""Attribute of DistributedDataParallel that must agree with its C++ reducer, which has no copy."""


class Snapshot:
    """Contents of objects and all containers, modules, optimizers and schedulers within them.

    The same holds for objects of classes that the script defines; others are kept as they are.
    `skip` are objects that need no copy, and `shallow` those of which only containers and
    generators are copied, without what they contain. Raises ValueError for a parameter without a
    size.
    """

    def __init__(
        self,
        objects: Iterable[object],
        *,
        skip: Iterable[object] = (),
        shallow: Iterable[object] = (),
    ) -> None:
        self._seen = {id(value): value for value in skip}
        self._restores: list[Callable[[], object]] = []
        for value in shallow:
            if not isinstance(value, (Tensor, np.ndarray)):
                self._copy(value)
        waiting = list(objects)
        while waiting:
            value = waiting.pop()
            if id(value) not in self._seen and not isinstance(value, _PLAIN):
                self._seen[id(value)] = value  # keeps it alive, so the number stays its own
                waiting += self._copy(value)

    @torch.no_grad()
    def restore(self) -> None:
        """Restore every object in place."""
        for restore in self._restores:
            restore()

    def _copy(
        self,
        value: Any,  # noqa: ANN401 -- anything a script holds
    ) -> Iterable[object]:
        """Copy the content of one object, and return the objects in it."""
        inside: Iterable[object] = ()
        match value:
            case Tensor():
                inside = self._copy_tensor(value)
            case dict():
                items = dict(value)
                self._restores.append(partial(_refill_dict, value, items))
                inside = [*items.keys(), *items.values()]
            case list():
                elements = list(value)
                self._restores.append(lambda: value.__setitem__(slice(None), elements))
                inside = elements
            case set():
                inside = members = set(value)
                self._restores += [value.clear, partial(value.update, members)]
            case deque():
                inside = queue = list(value)
                self._restores += [value.clear, partial(value.extend, queue)]
            case np.ndarray() if value.flags.writeable and not isinstance(value, np.memmap):
                self._restores.append(partial(np.copyto, value, value.copy()))
            case tuple():
                inside = value
            case CellType():
                inside = self._copy_cell(value)
            case _ if (restore := generator_restore(value)) is not None:
                self._restores.append(restore)
            case _ if isinstance(value, _ENTERED) or _is_of_own_class(value):
                inside = [vars(value)]
        return inside

    def _copy_tensor(self, tensor: Tensor) -> Iterable[object]:
        if is_lazy(tensor):
            raise ValueError(
                "a parameter has no size before the first forward pass; run the model once first"
            )
        data, content = tensor.data, tensor.detach().clone()
        gradient = tensor.grad if tensor.is_leaf else None

        def restore() -> None:
            if tensor.layout is torch.strided and tensor.data_ptr() != data.data_ptr():
                tensor.data = data
            tensor.copy_(content)
            if tensor.is_leaf and tensor.grad is not gradient:
                tensor.grad = gradient

        self._restores.append(restore)
        return [gradient]

    def _copy_cell(self, cell: CellType) -> Iterable[object]:
        content = _content(cell)
        self._restores.append(lambda: setattr(cell, "cell_contents", content))
        return [content]


@contextmanager
def restored(
    objects: Iterable[object], loaders: Iterable[object], functions: Iterable[object]
) -> Iterator[None]:
    """Restore these objects, all generators, and what functions and loaders hold, on exit.

    Raises ValueError if an object cannot be copied.
    """
    loaders, functions = list(loaders), list(functions)
    functions += [it.collate_fn for it in loaders if isinstance(it, DataLoader)]
    held = list(_held_by(functions))
    samplers, rest = _parts_of([*loaders, *(it for it in held if isinstance(it, DataLoader))])
    own = [it for it in held if all(it is not part for part in rest)]
    snapshot = Snapshot(
        [*objects, *own, *map(vars, samplers), *_of_accelerate()],
        skip=[*rest, *map(vars, rest)],
        shallow=[it for part in rest for it in _attributes_of(part)],
    )
    restores = [_numbers(value) for value in own if isinstance(value, FunctionType)]
    restores += global_states()
    try:
        yield
    finally:
        snapshot.restore()
        for restore in restores:
            restore()


def objects_of(step: object) -> list[object]:
    """Return the objects in a function's closure, arguments and globals, and its own."""
    held = _held_by([step])
    return [value for value in held if not isinstance(value, (CellType, FunctionType))]


def iterators_of(step: object) -> list[object]:
    """Return iterators that a function refers to, whose position cannot be restored."""
    return [it for it in objects_of(step) if isinstance(it, Iterator) and not _is_of_own_class(it)]


def without_iterator(loader: Any) -> Any:  # noqa: ANN401 -- any loader
    """Return a loader with workers of its own, so that those of the script keep their state."""
    if not isinstance(loader, DataLoader):
        return loader
    twin = copy.copy(loader)
    vars(twin)["_iterator"] = None
    return twin


def global_states() -> list[Callable[[], object]]:
    """Return functions that restore the generators of Python, NumPy and torch."""
    restores: list[Callable[[], object]] = [
        partial(random.setstate, random.getstate()),
        partial(np.random.set_state, np.random.get_state()),
        partial(torch.set_rng_state, torch.get_rng_state()),
    ]
    device = accelerator.kind()
    if device is not None:
        module = torch.get_device_module(device)
        restores.append(partial(module.set_rng_state_all, module.get_rng_state_all()))
    return restores


def generators_of(model: nn.Module) -> Callable[[], None]:
    """Return a function that restores all generators: global ones, and those that layers have."""
    own = (it for layer in model.modules() for it in vars(layer).values())
    restores = global_states() + [it for it in map(generator_restore, own) if it is not None]

    def restore() -> None:
        for each in restores:
            each()

    return restore


def generator_state(device: torch.device) -> Tensor:
    """Return the state of the generator of a device."""
    place: Any = torch.get_device_module(device) if accelerator.is_remote(device) else torch
    state: Tensor = place.get_rng_state()
    return state


def generator_restore(value: Any) -> Callable[[], None] | None:  # noqa: ANN401 -- anything
    """Return a function that restores a generator of random numbers; None for another object."""
    match value:
        case torch.Generator():
            state = value.get_state()
            return partial(_set_state, value, state)
        case random.Random():
            numbers = value.getstate()
            return lambda: value.setstate(numbers)
        case np.random.RandomState():
            legacy = value.get_state()
            return lambda: value.set_state(legacy)
        case np.random.Generator():
            bits = copy.deepcopy(value.bit_generator.state)
            return lambda: setattr(value.bit_generator, "state", bits)
    return None


def _set_state(generator: torch.Generator, state: Tensor) -> None:
    generator.set_state(state)


def _parts_of(loaders: Iterable[object]) -> tuple[list[object], list[object]]:
    """Return samplers of loaders, and the loaders, data sets and transforms."""
    waiting, seen = [("", it) for it in loaders], set()
    samplers: list[object] = []
    rest: list[object] = []
    while waiting:
        name, part = waiting.pop()
        if not hasattr(part, "__dict__") or id(part) in seen:
            continue
        seen.add(id(part))
        is_sampler = isinstance(part, Sampler) or name in _SAMPLERS
        (samplers if is_sampler else rest).append(part)
        for inner in (*INNER_LOADERS, *_SAMPLERS, *_DATA):
            value = vars(part).get(inner)
            waiting += [(inner, it) for it in (value if isinstance(value, list) else [value])]
        if not is_sampler:
            waiting += [("", it) for it in vars(part).values() if _is_inside(it)]
    return samplers, rest


def _is_inside(value: object) -> bool:
    """Return True for a data set in another, or an object of the script, such as a transform."""
    return isinstance(value, Dataset) or (
        _is_of_own_class(value) and not isinstance(value, (Tensor, nn.Module))
    )


def _attributes_of(part: object) -> Iterator[object]:
    """Yield the attributes of an object, their values, and values of dictionaries among them."""
    yield vars(part)
    for value in vars(part).values():
        yield value
        if isinstance(value, dict):
            yield from value.values()


def _held_by(
    functions: Iterable[object],
) -> Iterator[object]:
    """Yield what functions may change: functions called, cells, objects and their attributes."""
    waiting, seen = list(functions), set()
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        match value:
            case partial():
                waiting += [value.func, *value.args, *value.keywords.values()]
            case MethodType():
                waiting += [value.__func__, value.__self__]
            case FunctionType():
                yield value
                yield from value.__closure__ or ()
                waiting += [_content(cell) for cell in value.__closure__ or ()]
                waiting += _globals_of(value).values()
                waiting += value.__defaults__ or ()
            case DataLoader():
                yield value
            case Iterator() if not isinstance(value, io.IOBase) and not _is_of_own_class(value):
                yield value
            case _ if _is_of_script(value):
                yield value
                waiting += _methods_of(value)
                if hasattr(value, "__dict__") and not isinstance(value, _ENTERED):
                    yield vars(value)


def _methods_of(value: object) -> list[object]:
    """Return the methods of an object of the script, whose globals a step may change."""
    own = vars(type(value)).values() if _is_of_own_class(value) else ()
    return [it for it in own if isinstance(it, FunctionType)]


def _content(cell: CellType) -> object:
    """Return the content of a closure's cell; None if it has none yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _globals_of(function: FunctionType) -> dict[str, object]:
    """Return the global objects that a function names, and functions of the same module."""
    names, known = _names_in(function.__code__), function.__globals__
    values = {name: known[name] for name in names if name in known}
    return {
        name: value
        for name, value in values.items()
        if not isinstance(value, FunctionType) or not _is_of_library(value.__module__)
    }


def _names_in(code: CodeType) -> set[str]:
    """Return the global names in a function, and in functions and comprehensions within it."""
    inner = [_names_in(it) for it in code.co_consts if isinstance(it, CodeType)]
    return set(code.co_names).union(*inner)


def _numbers(function: FunctionType) -> Callable[[], object]:
    """Return a function that restores the global numbers, flags and texts a function names."""
    plain = {name: it for name, it in _globals_of(function).items() if isinstance(it, _PLAIN)}
    return partial(function.__globals__.update, plain)


def _is_of_script(value: object) -> bool:
    """Return True for an object whose attributes a training step may change."""
    if isinstance(value, (type, ModuleType, Tensor, Dataset, DataLoader, *_PLAIN)):
        return False
    return hasattr(value, "__dict__") or isinstance(value, (dict, list, set))


def _is_of_own_class(value: object) -> bool:
    """Return True for an object of a class that no library defines, other than its data."""
    if isinstance(value, (type, ModuleType, Dataset, DataLoader)) or not hasattr(value, "__dict__"):
        return False
    return not _is_of_library(type(value).__module__)


@cache
def _is_of_library(module: str) -> bool:
    """Return True for a module of Python, or one in a folder in which packages are installed."""
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None or module == "__main__":
        return module != "__main__"
    if module.partition(".")[0] == "largebatch":  # also in a source checkout
        return True
    folders = list(Path(file).parents)
    return Path(sysconfig.get_path("stdlib")) in folders or any(
        any(folder.glob("*.dist-info")) for folder in folders
    )


def _refill_dict(container: dict[Any, Any], content: dict[Any, Any]) -> None:
    flag = {name: container[name] for name in (_REDUCER_FLAG,) if name in container}
    container.clear()
    container.update(content | flag)


def _of_accelerate() -> list[object]:
    """Return the state of gradient accumulation that Accelerate shares between its objects."""
    state = sys.modules.get("accelerate.state")
    return [] if state is None else [state.GradientState._shared_state]
