"""Averaged copies of a model (EMA, SWA), wherever a script keeps them.

A copy has tensors of the model's shapes, which no optimizer has and which are near the model's
weights. It is a module, a dict or a list. Modules are seen when they are made or copied; dicts and
lists are looked for among all objects of the process, which takes a tenth of a second, before
updates 0, 1, 2, 4, 8 and so on. A candidate that never changes (a teacher, the best weights so far)
is not an average; that is known at the end only.
"""

import gc
import math
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from largebatch.audit.resume.record import Trace
from largebatch.audit.resume.traces import trace_of
from largebatch.replacing import replaced

_FARTHEST = 0.9
"""Largest distance of an average from the model's weights, relative to their norm."""

_TENSORS = frozenset({Tensor, nn.Parameter})
_CONTAINERS = frozenset({list, dict, OrderedDict})

Named = Mapping[str, Tensor]


class AverageWatch:
    """Candidates for averaged copies, active within `installed`."""

    def __init__(self) -> None:
        self.changed: set[int] = set()
        """Numbers of the candidates that have changed: averages."""

        self._new: list[weakref.ref[nn.Module]] = []
        """Modules that were made since the update before."""

        self._candidates: list[Callable[[], Named | None]] = []
        self._first: dict[int, list[str]] = {}
        """Digests of a candidate's tensors when it was seen first."""

        self._known: set[int] = set()
        """Addresses of the first tensors of candidates."""

        self._counters: list[weakref.ref[Tensor]] = []

    @contextmanager
    def installed(self) -> Iterator[None]:
        """See new modules within this block; `copy.deepcopy` sets a state instead."""
        with ExitStack() as stack:
            for name in ("__init__", "__setstate__"):
                stack.enter_context(replaced(nn.Module, name, self._seen(name)))
            yield

    def _seen(self, name: str) -> Callable[..., None]:
        own = vars(nn.Module)[name]

        @wraps(own)
        def make(module: nn.Module, *args: Any, **words: Any) -> None:  # noqa: ANN401 -- as torch's
            own(module, *args, **words)
            self._new.append(weakref.ref(module))

        return make

    def add_existing(self) -> None:
        """Take all modules of the process as new ones."""
        for value in gc.get_objects():
            if issubclass(type(value), nn.Module):
                self._new.append(weakref.ref(value))

    def record(
        self, weights: Named, used: Iterable[Tensor], number: int
    ) -> tuple[dict[str, Trace], int | None]:
        """Return the weights of all candidates by `number:name`, and the count of an average.

        `weights` are the parameters of the model by name, `used` the other tensors that an average
        is not: gradients and the optimizer's state.
        """
        taken = {it.data_ptr() for it in (*weights.values(), *used)}
        self._add_modules(weights, taken)
        if number & (number - 1) == 0:  # 0 and the powers of two
            self._add_containers(weights, taken)
        traces: dict[str, Trace] = {}
        for place, candidate in enumerate(self._candidates):
            tensors = candidate()
            if tensors is None:
                continue
            of_candidate = {name: trace_of(it) for name, it in tensors.items()}
            digests = [it.digest for it in of_candidate.values()]
            if self._first.setdefault(place, digests) != digests:
                self.changed.add(place)
            traces |= {f"{place}:{name}": it for name, it in of_candidate.items()}
        counters = [counter() for counter in self._counters]
        counts = [int(it) for it in counters if it is not None]
        return traces, max(counts, default=None)

    def _add_modules(self, weights: Named, taken: set[int]) -> None:
        new = [reference() for reference in self._new]
        self._new = []
        for module in new:
            if module is None:
                continue
            tensors = [*module.parameters()]
            if self._is_average(tensors, [*weights.values()], taken):
                reference = weakref.ref(module)
                names = [*weights]

                def of_module(
                    reference: weakref.ref[nn.Module] = reference, names: Sequence[str] = names
                ) -> Named | None:
                    alive = reference()
                    if alive is None:
                        return None
                    return dict(zip(names, alive.parameters(), strict=True))

                self._add(of_module, tensors)
            counter = getattr(module, "n_averaged", None)
            if isinstance(counter, Tensor) and counter.numel() == 1:
                self._counters.append(weakref.ref(counter))

    def _add_containers(self, weights: Named, taken: set[int]) -> None:
        trained = {name: it for name, it in weights.items() if it.requires_grad}
        sizes = {len(weights), len(trained)}
        # Not isinstance: reading the class of a lazy object may import a package.
        containers = [it for it in gc.get_objects() if type(it) in _CONTAINERS and it]
        for value in containers:
            if type(value) is list:
                if len(value) in sizes and type(value[0]) in _TENSORS:
                    of_list = weights if len(value) == len(weights) else trained
                    self._add_list(value, of_list, taken)
            elif len(value) >= len(trained) > 0:
                self._add_dict(value, trained, taken)

    def _add_list(self, values: list[Any], weights: Named, taken: set[int]) -> None:
        names = [*weights]
        if all(type(it) in _TENSORS for it in values) and self._is_average(
            values, [*weights.values()], taken
        ):
            size = len(values)

            def of_list() -> Named | None:
                return dict(zip(names, values, strict=True)) if len(values) == size else None

            self._add(of_list, values)

    def _add_dict(self, values: dict[Any, Any], trained: Named, taken: set[int]) -> None:
        first = next(iter(values))
        if type(first) is not str or type(values[first]) not in _TENSORS:
            return
        keys = _keys_for(values, [*trained])
        if keys is None and len(values) == len(trained):
            keys = [*values]  # of weights whose module is not known, or by names of its own
        if keys is None:
            return
        tensors = [values[key] for key in keys]
        if all(isinstance(it, Tensor) for it in tensors) and self._is_average(
            tensors, [*trained.values()], taken
        ):
            named = dict(zip(trained, keys, strict=True))

            def of_dict() -> Named | None:
                if not all(isinstance(values.get(key), Tensor) for key in keys):
                    return None
                return {name: values[key] for name, key in named.items()}

            self._add(of_dict, tensors)

    def _is_average(
        self, tensors: Sequence[Tensor], weights: Sequence[Tensor], taken: set[int]
    ) -> bool:
        """Return True if tensors are a copy near the weights that is not known yet."""
        if not tensors or [it.shape for it in tensors] != [it.shape for it in weights]:
            return False
        if not tensors[0].is_floating_point() or tensors[0].data_ptr() in self._known:
            return False
        if any(it.data_ptr() in taken for it in tensors if it.numel()):
            return False
        distance = _norm(a.detach().cpu() - b.detach().cpu() for a, b in zip(tensors, weights))  # noqa: B905
        return distance <= _FARTHEST * _norm(it.detach() for it in weights)

    def _add(self, candidate: Callable[[], Named | None], tensors: Sequence[Tensor]) -> None:
        self._candidates.append(candidate)
        self._known.add(tensors[0].data_ptr())


def _keys_for(values: Mapping[str, object], names: Sequence[str]) -> list[str] | None:
    """Return the keys of a dict that end with the names, in their order; None without them."""
    if all(name in values for name in names):
        return [*names]
    by_name = {}
    for key in values:
        if isinstance(key, str):
            by_name[key.replace("_orig_mod.", "").removeprefix("module.")] = key
    if all(name in by_name for name in names):
        return [by_name[name] for name in names]
    return None


def _norm(tensors: Iterable[Tensor]) -> float:
    squares = [float(torch.linalg.vector_norm(it, dtype=torch.float64)) ** 2 for it in tensors]
    return math.sqrt(sum(squares))
