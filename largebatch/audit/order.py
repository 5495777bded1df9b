"""Sample numbers that a loader draws in an epoch, without reading a sample; nothing stays changed.

The loader itself is iterated, with a data set in it that returns the numbers. So a wrapper that
sets the epoch or synchronises generators (Accelerate's, Lightning Fabric's) does so as in training.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

from largebatch.audit.restoring import INNER_LOADERS, generator_restore

Numbers = npt.NDArray[np.int64]

_PASS_ON = INNER_LOADERS[:2]
"""Attributes in wrappers that pass batches on as they are."""

_PARTS = (*INNER_LOADERS, "batch_sampler", "sampler", "dataset")


class NoNumbersError(Exception):
    """The samples of a loader have no numbers; the text says why, without a final period."""


@dataclass(frozen=True, slots=True)
class Epoch:
    """Sample numbers of one worker in one epoch."""

    samples: Numbers
    """In the order of training, by place in the whole data set (`Subset` is resolved)."""

    sizes: Numbers
    """Number of samples in each batch."""

    def batches(self) -> list[Numbers]:
        """Return the sample numbers of each batch."""
        return np.split(self.samples, np.cumsum(self.sizes)[:-1])


class _Numbers(Dataset[object]):
    """Data set whose samples are their own numbers."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, number: object) -> object:
        return number


def torch_loader(loader: object) -> DataLoader[Any] | None:
    """Return the DataLoader inside the wrappers of a loader; None if there is none."""
    while True:
        own = getattr(loader, "__dict__", {})
        inner = next(
            (own[name] for name in INNER_LOADERS if hasattr(own.get(name), "__iter__")), None
        )
        if inner is None:
            return loader if isinstance(loader, DataLoader) else None
        loader = inner


def around(loader: object, inner: Any) -> Any:  # noqa: ANN401 -- a wrapper, or `inner`
    """Return `inner` in copies of the wrappers of a loader that compute on batches."""
    own = getattr(loader, "__dict__", {})
    name = next((name for name in INNER_LOADERS if hasattr(own.get(name), "__iter__")), None)
    if name is None:
        return inner
    within = around(own[name], inner)
    if name in _PASS_ON:
        return within
    twin = copy.copy(loader)
    vars(twin)[name] = within
    return twin


def levels(dataset: Any) -> list[tuple[Any, Numbers]]:  # noqa: ANN401 -- any data set
    """Return a data set and those that it is a `Subset` of, up to the whole one.

    Each has the places of its samples in the whole one.
    """
    chain = [dataset]
    while isinstance(chain[-1], Subset):
        chain.append(chain[-1].dataset)
    found = [(chain[-1], np.arange(len(chain[-1])))]
    for part in chain[-2::-1]:
        found.insert(0, (part, found[0][1][np.asarray(part.indices, dtype=np.int64)]))
    return found


def epochs_of(
    loader: object, number: int, set_epoch: Callable[[int], object] | None = None
) -> list[Epoch]:
    """Return the samples of the next epochs on this worker, the first of them 0 for `set_epoch`.

    Raises NoNumbersError if the loader is not a DataLoader with a data set that has a length, or if
    its sampler does not end.
    """
    base = torch_loader(loader)
    if base is None:
        raise NoNumbersError(f"{type(loader).__name__} is not a DataLoader")
    kind = type(base.dataset).__name__
    if isinstance(base.dataset, IterableDataset) or not hasattr(base.dataset, "__len__"):
        raise NoNumbersError(f"samples of {kind} have no numbers")
    passes_on = any(name in vars(loader) for name in _PASS_ON)
    outer = loader if passes_on else base
    places = levels(base.dataset)[0][1]
    found = []
    with unchanged(loader), _reading_numbers(base):
        for epoch in range(number):
            if set_epoch is not None:
                set_epoch(epoch)
            found.append(_one_epoch(outer, places, len(base.dataset)))
    return found


def _one_epoch(loader: Any, places: Numbers, size: int) -> Epoch:  # noqa: ANN401 -- a wrapper
    drawn: list[Numbers] = []
    total = 0
    for batch in loader:
        try:
            drawn.append(np.asarray(batch, dtype=np.int64).reshape(-1))
        except (TypeError, ValueError):
            raise NoNumbersError("the sampler draws no whole numbers") from None
        total += len(drawn[-1])
        if total > 2 * size + len(drawn[-1]):
            raise NoNumbersError(f"the sampler draws {total:,} of {size:,} samples without an end")
    samples = np.concatenate([np.empty(0, dtype=np.int64), *drawn])
    sizes = np.array([len(batch) for batch in drawn], dtype=np.int64)
    return Epoch(places[samples], sizes)


@contextmanager
def _reading_numbers(base: DataLoader[Any]) -> Iterator[None]:
    """Make a loader return sample numbers, in this process; `unchanged` undoes it.

    DataLoader refuses assignments to its attributes, hence `vars`.
    """
    own = {
        "dataset": _Numbers(len(base.dataset)),  # type: ignore[arg-type]  # was tested for
        "collate_fn": lambda batch: batch,
        "num_workers": 0,
        "prefetch_factor": None,
        "pin_memory": False,
        "persistent_workers": False,
        "timeout": 0,
        "_iterator": None,
    }
    vars(base).update(own)
    if "iterator" in vars(base):  # timm's MultiEpochsDataLoader keeps one
        vars(base)["iterator"] = None
    yield


@contextmanager
def unchanged(loader: object) -> Iterator[None]:
    """Restore the attributes and generators of a loader, its samplers and its data set on exit."""
    parts = list(_parts(loader))
    before = [dict(vars(part)) for part in parts]
    states = [generator_restore(value) for own in before for value in own.values()]
    try:
        yield
    finally:
        for part, own in zip(parts, before, strict=True):
            vars(part).clear()
            vars(part).update(own)
        for restore in filter(None, states):
            restore()


def _parts(loader: object) -> Iterator[object]:
    seen: set[int] = set()
    rest = [loader]
    while rest:
        part = rest.pop()
        if id(part) not in seen and hasattr(part, "__dict__"):
            seen.add(id(part))
            yield part
            rest += [vars(part)[name] for name in _PARTS if name in vars(part)]
