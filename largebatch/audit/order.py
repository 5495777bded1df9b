"""Sample numbers that a loader draws in an epoch, without reading a sample.

The loader itself is iterated, with a data set in it that returns the numbers. So a wrapper that
sets the epoch or synchronises generators (Accelerate's, Lightning Fabric's) does so as in training.
The audit restores samplers and generators when the check ends.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

from largebatch.audit.restoring import INNER_LOADERS

Numbers = npt.NDArray[np.int64]

_PASS_ON = INNER_LOADERS[:2]
"""Attributes in wrappers that pass batches on as they are."""


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


def _inner_name(loader: object) -> str | None:
    """Return the attribute in which a wrapper has the inner loader; None for no wrapper."""
    own = getattr(loader, "__dict__", {})
    return next((name for name in INNER_LOADERS if hasattr(own.get(name), "__iter__")), None)


def torch_loader(loader: object) -> DataLoader[Any] | None:
    """Return the DataLoader inside the wrappers of a loader; None if there is none."""
    while name := _inner_name(loader):
        loader = vars(loader)[name]
    return loader if isinstance(loader, DataLoader) else None


def around(loader: object, inner: Any) -> Any:  # noqa: ANN401 -- a wrapper, or `inner`
    """Return `inner` in copies of the wrappers of a loader that compute on batches."""
    name = _inner_name(loader)
    if name is None:
        return inner
    within = around(vars(loader)[name], inner)
    if name in _PASS_ON:
        return within
    twin = copy.copy(loader)
    vars(twin)[name] = within
    return twin


def whole(dataset: Any) -> tuple[Any, Numbers]:  # noqa: ANN401 -- any data set
    """Return the data set that a `Subset` is of, and the places of its samples in that one."""
    chain = [dataset]
    while isinstance(chain[-1], Subset):
        chain.append(chain[-1].dataset)
    places = np.arange(len(chain[-1]))
    for part in chain[-2::-1]:
        places = places[np.asarray(part.indices, dtype=np.int64)]
    return chain[-1], places


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
    kind, size = type(base.dataset).__name__, getattr(base.dataset, "__len__", None)
    if isinstance(base.dataset, IterableDataset) or size is None:
        raise NoNumbersError(f"samples of {kind} have no numbers")
    places, found = whole(base.dataset)[1], []
    with _reading_numbers(base, size()):
        for epoch in range(number):
            if set_epoch is not None:
                set_epoch(epoch)
            outer = loader if _inner_name(loader) in _PASS_ON else base
            found.append(_one_epoch(outer, places, size()))
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
def _reading_numbers(base: DataLoader[Any], size: int) -> Iterator[None]:
    """Make a loader return sample numbers, in this process, in this block.

    DataLoader refuses assignments to its attributes, hence `vars`.
    """
    changes: dict[str, Any] = {
        "dataset": _Numbers(size),
        "collate_fn": lambda batch: batch,
        "num_workers": 0,
        "prefetch_factor": None,
        "pin_memory": False,
        "persistent_workers": False,
        "timeout": 0,
        "_iterator": None,
    }
    if "iterator" in vars(base):  # timm's MultiEpochsDataLoader keeps one
        changes["iterator"] = None
    before = dict(vars(base))
    vars(base).update(changes)
    try:
        yield
    finally:
        vars(base).clear()
        vars(base).update(before)
