"""Copies of a script's objects, from which they are restored in place and bit for bit.

Containers keep their identity and get their items back; tensors keep their identity and get their
content back. So everything that refers to them (a wrapper, an optimizer, a closure) stays valid.
Objects of the script's own classes are copied with all within them; those of libraries only where
the audit knows that a step changes them. Of loaders and data sets only attributes are copied, since
they hold the data.
"""

import copy
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
    `skip` are objects that need no copy. Of `loaders` and what they read from only the attributes
    are copied.
    """

    def __init__(
        self,
        objects: Iterable[object],
        *,
        skip: Iterable[object] = (),
        loaders: Iterable[object] = (),
    ) -> None:
        self._seen = {id(value): value for value in skip}
        self._restores: list[Callable[[], object]] = []
        waiting = [(value, False) for value in objects]
        waiting += [(loader, True) for loader in loaders]
        # The loaders are last, so they are copied first: what an object of the script holds of
        # them must not be copied as a whole, with all the data.
        while waiting:
            value, is_data = waiting.pop()
            if id(value) not in self._seen and not isinstance(value, _PLAIN):
                self._seen[id(value)] = value  # keeps it alive, so the number stays its own
                if is_data or isinstance(value, (DataLoader, Dataset)):
                    waiting += self._copy_data(value)
                else:
                    waiting += [(it, False) for it in self._copy(value)]

    @torch.no_grad()
    def restore(self) -> None:
        """Restore every object in place."""
        for restore in self._restores:
            restore()

    def _copy_data(self, part: object) -> list[tuple[object, bool]]:
        """Copy the attributes of a loader, a data set or a transform, but not the data."""
        inside: list[tuple[object, bool]] = []
        attributes = getattr(part, "__dict__", {})
        self._seen[id(attributes)] = attributes
        self._copy(attributes)
        for name, value in attributes.items():
            if isinstance(value, Sampler) or name in _SAMPLERS:
                inside.insert(0, (value, False))  # popped last: it refers to the data set
                continue
            values = [value]
            if isinstance(value, dict) or (isinstance(value, list) and name in _DATA):
                values += value.values() if isinstance(value, dict) else value
            for item in values:
                is_entered = name in INNER_LOADERS + _DATA
                if is_entered or _is_of_own_class(item) or isinstance(item, Dataset):
                    # A model or a tensor of a data set is data: a network that embeds images.
                    if not isinstance(item, (Tensor, nn.Module)):
                        inside.append((item, True))
                elif not isinstance(item, (Tensor, np.ndarray)):
                    self._copy(item)
        return inside

    def _copy(self, value: Any) -> Iterable[object]:  # noqa: ANN401 -- anything a script holds
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
            case FunctionType():
                named = _globals_of(value)
                plain = {name: it for name, it in named.items() if isinstance(it, _PLAIN)}
                self._restores.append(partial(value.__globals__.update, plain))
                inside = value.__closure__ or ()
            case CellType():
                content = _content(value)
                self._restores.append(lambda: setattr(value, "cell_contents", content))
            case _ if (restore := _generator_restore(value)) is not None:
                self._restores.append(restore)
            case _ if isinstance(value, _ENTERED) or _is_of_own_class(value):
                inside = [vars(value)]
        return inside

    def _copy_tensor(self, tensor: Tensor) -> Iterable[object]:
        data = tensor.data
        content = tensor.detach().clone()
        gradient = tensor.grad if tensor.is_leaf else None

        def restore() -> None:
            # A step may have given it other memory, while a bucket still refers to this one.
            if tensor.layout is torch.strided and tensor.data_ptr() != data.data_ptr():
                tensor.data = data
            tensor.copy_(content)
            if tensor.is_leaf and tensor.grad is not gradient:
                tensor.grad = gradient

        self._restores.append(restore)
        return [gradient]


@contextmanager
def restored(
    objects: Iterable[object], loaders: Iterable[object], functions: Iterable[object]
) -> Iterator[None]:
    """Restore these objects, all generators, and what functions and loaders hold, on exit."""
    loaders = list(loaders)
    collate = [it.collate_fn for it in loaders if isinstance(it, DataLoader)]
    held = held_by([*functions, *collate])
    # An iterator of a library cannot be set back; one of the script is an object with attributes.
    held = [it for it in held if not isinstance(it, Iterator) or _is_of_own_class(it)]
    # These have a way of their own to be copied, or none.
    others = (type, ModuleType, FunctionType, Tensor, Dataset, DataLoader, *_ENTERED)
    attributes = [vars(it) for it in held if hasattr(it, "__dict__") and not isinstance(it, others)]
    # Accelerate counts micro-batches in a state that all of its objects share.
    state = sys.modules.get("accelerate.state")
    shared = [] if state is None else [state.GradientState._shared_state]
    loaders += [it for it in held if isinstance(it, DataLoader)]
    snapshot = Snapshot([*objects, *held, *attributes, *shared], loaders=loaders)
    restore_random = generators_of()
    try:
        yield
    finally:
        snapshot.restore()
        restore_random()


def held_by(functions: Iterable[object]) -> list[object]:
    """Return the objects that functions refer to, in closures, arguments and globals."""
    waiting = list(functions)
    seen: dict[int, object] = {}
    while waiting:
        value = waiting.pop()
        if id(value) in seen or isinstance(value, _PLAIN):
            continue
        seen[id(value)] = value
        match value:
            case partial():
                waiting += [value.func, *value.args, *value.keywords.values()]
            case MethodType():
                waiting += [value.__func__, value.__self__]
            case FunctionType():
                waiting += map(_content, value.__closure__ or ())
                waiting += _globals_of(value).values()
                waiting += value.__defaults__ or ()
    return list(seen.values())


def without_iterator(loader: Any) -> Any:  # noqa: ANN401 -- any loader
    """Return a loader with workers of its own, so that those of the script keep their state."""
    if not isinstance(loader, DataLoader):
        return loader
    twin = copy.copy(loader)
    vars(twin)["_iterator"] = None  # DataLoader refuses assignments of its attributes
    return twin


def endless(loader: Iterable[Any]) -> Iterator[Any]:
    """Yield the batches of a loader, again and again; ValueError if it has none."""
    number = 1
    while number:
        number = 0
        for number, batch in enumerate(without_iterator(loader), 1):  # noqa: B007 -- used above
            yield batch
    raise ValueError("the loader has no batch on this worker")


def generators_of(model: nn.Module | None = None) -> Callable[[], None]:
    """Return a function that restores the generators of Python, NumPy and torch, and of layers."""
    restores: list[Callable[[], object]] = [
        partial(random.setstate, random.getstate()),
        partial(np.random.set_state, np.random.get_state()),
        partial(torch.set_rng_state, torch.get_rng_state()),
    ]
    device = accelerator.kind()
    if device is not None:
        module = torch.get_device_module(device)
        restores.append(partial(module.set_rng_state_all, module.get_rng_state_all()))
    layers = () if model is None else model.modules()
    attributes = [value for layer in layers for value in vars(layer).values()]
    of_layers = map(_generator_restore, attributes)
    restores += [restore_one for restore_one in of_layers if restore_one is not None]

    def restore() -> None:
        for restore_one in restores:
            restore_one()

    return restore


def _generator_restore(value: Any) -> Callable[[], object] | None:  # noqa: ANN401 -- anything
    """Return a function that restores a generator of random numbers; None for another object."""
    match value:
        case torch.Generator():
            return partial(value.set_state, value.get_state())
        case np.random.RandomState():
            return partial(value.set_state, value.get_state())
        case random.Random():
            return partial(value.setstate, value.getstate())
        case np.random.Generator():
            bits = value.bit_generator
            return partial(setattr, bits, "state", copy.deepcopy(bits.state))
    return None


def _content(cell: CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _globals_of(function: FunctionType) -> dict[str, object]:
    """Return the global objects that a function names, and functions of the same module."""
    known = function.__globals__
    values = {name: known[name] for name in _names_in(function.__code__) if name in known}
    return {
        name: value
        for name, value in values.items()
        if not isinstance(value, FunctionType) or not _is_of_library(value.__module__)
    }


def _names_in(code: CodeType) -> set[str]:
    """Return the global names in a function, and in functions and comprehensions within it."""
    inner = [_names_in(it) for it in code.co_consts if isinstance(it, CodeType)]
    return set(code.co_names).union(*inner)


def _is_of_own_class(value: object) -> bool:
    """Return True for an object of a class that no library defines, other than its data."""
    if isinstance(value, (type, ModuleType, Dataset, DataLoader)) or not hasattr(value, "__dict__"):
        return False
    return not _is_of_library(type(value).__module__)


@cache
def _is_of_library(module: str) -> bool:
    """Return True for a module of Python, or one in a folder in which packages are installed."""
    if module == "__main__":
        return False
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None:  # of Python's built-in modules
        return True
    if module.partition(".")[0] == "largebatch":  # also in a source checkout
        return True
    folders = list(Path(file).parents)
    # pip writes the metadata of a package beside it, wherever that is.
    return Path(sysconfig.get_path("stdlib")) in folders or any(
        any(folder.glob("*.dist-info")) for folder in folders
    )


def _refill_dict(container: dict[Any, Any], content: dict[Any, Any]) -> None:
    flag = {name: container[name] for name in (_REDUCER_FLAG,) if name in container}
    container.clear()
    container.update(content | flag)
