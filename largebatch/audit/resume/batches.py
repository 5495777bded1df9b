"""Which batches a training loop reads from torch's loaders, and for which update.

The methods of torch's own iterators over a DataLoader are observed, so nothing is wrapped around a
loader. A loader may read ahead of the loop (Accelerate, Lightning and timm do), skip batches, or be
evaluated, so a batch belongs to an update if a training forward pass computes on it: the rows of
the inputs are compared. Where the loop changes all rows before the pass, it is the newest batch
that the loop has.
"""

import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data import dataloader as torch_loaders

from largebatch.audit.resume.record import Batch
from largebatch.audit.resume.traces import digest_of, digest_of_bytes, digest_of_tensor, rows_of
from largebatch.audit.samples import whole
from largebatch.models.inputs import labels_of
from largebatch.replacing import replaced

FROM_FORWARD = -1
"""Number of the loader of batches that no DataLoader gave: they are inputs of the model."""

_MAY_READ_AHEAD = ("accelerate.", "lightning.", "pytorch_lightning.", "timm.")
"""Modules with loaders that may read one batch before they give the one before it to the loop."""

_Iterator = torch_loaders._BaseDataLoaderIter


@dataclass(slots=True, eq=False)
class _Reading:
    """A batch that was read, and the digests of its rows."""

    batch: Batch
    rows: frozenset[str]
    number: int
    """Number of the reading, of all loaders."""


@dataclass(slots=True, eq=False)
class Source:
    """What is known of a loader. It is not kept alive, nor its data set and its processes."""

    number: int
    """In the order in which the process first read from loaders."""

    root: Callable[[], object]
    """Return the data set that the loader reads, or that its Subset is of; None if it is gone."""

    reads: tuple[object, ...]
    """How it reads: a loader that reads as an earlier one is the same, made again."""

    processes: int
    epochs: int = 0


@dataclass(slots=True, eq=False)
class _Iteration:
    """One iteration over a loader."""

    source: Source
    epoch: int
    places: Any
    """Places of the loader's samples in the whole data set; None without sample numbers."""

    indices: deque[tuple[int, ...] | None] = field(default_factory=deque)
    """Sample numbers of the batches that were requested and have not been read."""

    pending: list[_Reading] = field(default_factory=list)
    """Batches that were read, on which no training forward pass has computed."""

    read: int = 0
    has_ended: bool = False
    trains: bool = False
    """True if a training forward pass computed on one of its batches."""

    caller: str = ""
    """Module that reads the batches."""

    ahead: int | None = None
    """Number of batches that a wrapper reads before it gives one to the loop; None before the
    first training forward pass."""


class BatchWatch:
    """Batches that the loops of this process read, active within `installed`."""

    def __init__(self) -> None:
        self.training: Source | None = None
        """The loader of the first batch that a training forward pass computed on."""

        self._iterations: list[_Iteration] = []
        self._by_iterator: WeakKeyDictionary[Any, _Iteration] = WeakKeyDictionary()
        self._sources: list[Source] = []
        self._last: _Iteration | None = None
        """The iteration that was read last."""

        self._used: list[Batch] = []
        self._tentative: list[Batch] = []
        """Batches of forward passes with gradients in evaluation mode: of training if an update
        has no others."""

        self._readings = 0
        self._passes = 0

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Observe torch's loaders within this block."""
        own_iter: Callable[..., Any] = DataLoader.__iter__
        own_next: Callable[..., Any] = _Iterator.__next__
        own_next_index: Callable[..., Any] = _Iterator._next_index

        @wraps(own_iter)
        def iterate(loader: DataLoader[Any]) -> Any:  # noqa: ANN401 -- as torch's
            # Persistent loader processes request their first batches here.
            iteration = self._begin(loader)
            before = loader._iterator
            if before is not None:
                self._by_iterator[before] = iteration
            iterator = own_iter(loader)
            self._by_iterator[iterator] = iteration
            return iterator

        @wraps(own_next_index)
        def next_index(iterator: Any) -> Any:  # noqa: ANN401 -- as torch's
            index = own_next_index(iterator)
            self._request(iterator, index)
            return index

        @wraps(own_next)
        def next_batch(iterator: Any) -> Any:  # noqa: ANN401 -- as torch's
            caller = str(sys._getframe(1).f_globals.get("__name__"))
            try:
                batch = own_next(iterator)
            except StopIteration:
                self._end(iterator)
                raise
            self._read(iterator, batch, caller)
            return batch

        with ExitStack() as stack:
            stack.enter_context(replaced(DataLoader, "__iter__", iterate))
            stack.enter_context(replaced(_Iterator, "_next_index", next_index))
            stack.enter_context(replaced(_Iterator, "__next__", next_batch))
            yield

    def enter_forward(self, arguments: object, *, training: bool) -> None:
        """Find the batch of a forward pass with gradients; `training` is the model's mode."""
        batches = self._batches_of(arguments)
        (self._used if training else self._tentative).extend(batches)

    def take(self) -> tuple[Batch, ...]:
        """Return the batches since the call before that were trained on."""
        used = self._used or self._tentative
        self._used = []
        self._tentative = []
        for iteration in list(self._iterations):
            is_past = iteration.has_ended or iteration is not self._last
            if is_past and not iteration.trains:
                iteration.pending = []
            # A loader that read ahead has one batch more for the loop when it has ended.
            if iteration.has_ended and (not iteration.pending or iteration is not self._last):
                self._iterations.remove(iteration)
        return tuple(used)

    def _begin(self, loader: DataLoader[Any]) -> _Iteration:
        root: object = loader.dataset
        places = None
        if not isinstance(root, IterableDataset) and hasattr(root, "__len__"):
            root, places = whole(root)
        source = self._source_of(loader, root)
        has_order = getattr(loader, "in_order", True)
        iteration = _Iteration(source, source.epochs, places if has_order else None)
        source.epochs += 1
        self._iterations.append(iteration)
        return iteration

    def _source_of(self, loader: DataLoader[Any], root: object) -> Source:
        # A loop may make a new loader in each epoch, and a data set: they are those of before if
        # they read the same way, and the data set of before is gone.
        samples = _length_of(loader.dataset)
        reads = (type(root), samples, loader.batch_size, type(loader.sampler))
        for source in self._sources:
            before = source.root()
            if source.reads == reads and (before is root or before is None):
                source.root = _reference_to(root)
                return source
        source = Source(len(self._sources), _reference_to(root), reads, loader.num_workers)
        self._sources.append(source)
        return source

    def _request(self, iterator: object, index: object) -> None:
        # The first batches are requested while the iterator is made.
        iteration = self._by_iterator.get(iterator) or self._iterations[-1]
        places = iteration.places
        numbers = index if isinstance(index, list | tuple) else [index]
        known = None
        if places is not None and all(isinstance(it, int | np.integer) for it in numbers):
            known = tuple(int(places[it]) for it in numbers)
        iteration.indices.append(known)

    def _read(self, iterator: object, batch: object, caller: str) -> None:
        iteration = self._by_iterator.get(iterator)
        if iteration is None:  # it was made before this block
            return
        indices = iteration.indices.popleft() if iteration.indices else None
        samples, labels, rows = describe(batch)
        reading = Batch(
            loader=iteration.source.number,
            epoch=iteration.epoch,
            position=iteration.read,
            indices=indices,
            samples=samples,
            labels=labels,
        )
        iteration.pending.append(_Reading(reading, rows, self._readings))
        iteration.read += 1
        iteration.caller = caller
        self._readings += 1
        self._last = iteration

    def _end(self, iterator: object) -> None:
        iteration = self._by_iterator.pop(iterator, None)
        if iteration is not None:
            iteration.has_ended = True
            self._last = iteration

    def _batches_of(self, arguments: object) -> list[Batch]:
        """Return the batches that these inputs of a model are of, and no longer keep them."""
        if self._last is None:
            return self._from_forward(arguments)
        tensors = [it for it in tree_leaves(arguments) if isinstance(it, Tensor) and it.ndim]
        rows = {digest for tensor in tensors for digest in rows_of(tensor)}
        readings = [(it, iteration) for iteration in self._iterations for it in iteration.pending]
        shared = {it.number: len(it.rows & rows) for it, _ in readings}
        most = max(shared.values(), default=0)
        # Two batches may be joined for one pass: those of different loaders.
        matching: dict[int, tuple[_Reading, _Iteration]] = {}
        for reading, iteration in readings:
            if most and shared[reading.number] == most:
                matching.setdefault(iteration.source.number, (reading, iteration))
        if not most:
            return self._newest(self._last)
        for reading, iteration in matching.values():
            iteration.trains = True
            iteration.pending.remove(reading)
            self.training = self.training or iteration.source
        return [reading.batch for reading, _ in matching.values()]

    def _newest(self, iteration: _Iteration) -> list[Batch]:
        """Return the newest batch that the loop has from an iteration, if it is not used."""
        if iteration.ahead is None:
            may_read_ahead = f"{iteration.caller}.".startswith(_MAY_READ_AHEAD)
            iteration.ahead = int(may_read_ahead and iteration.read > 1)
        ahead = 0 if iteration.has_ended else iteration.ahead
        position = iteration.read - 1 - ahead
        result = [it for it in iteration.pending if it.batch.position == position]
        for reading in result:
            iteration.pending.remove(reading)
            iteration.trains = True
            self.training = self.training or iteration.source
        return [it.batch for it in result]

    def _from_forward(self, arguments: object) -> list[Batch]:
        samples, labels, _ = describe(arguments)
        batch = Batch(
            loader=FROM_FORWARD, epoch=0, position=self._passes, samples=samples, labels=labels
        )
        self._passes += 1
        return [batch]


def describe(batch: Any) -> tuple[tuple[str, ...], tuple[str, ...], frozenset[str]]:  # noqa: ANN401
    """Return digests of a batch's samples, of its labels, and of each row of its inputs."""
    labels: object = None
    try:
        labels = labels_of(batch)
    except (ValueError, IndexError, TypeError, AttributeError):
        labels = None  # of a batch without labels, or in another form
    leaves = tree_leaves(batch)
    inputs = [it for it in leaves if it is not labels and isinstance(it, Tensor) and it.ndim]
    size = len(inputs[0]) if inputs else 0
    columns = [rows_of(it) for it in inputs if len(it) == size]
    rows = frozenset(digest for column in columns for digest in column)
    samples = tuple(_joined(digests) for digests in zip(*columns, strict=True))
    if not inputs and leaves:
        samples = (digest_of(batch),)
    of_labels: list[str] = []
    if isinstance(labels, Tensor):
        of_labels = rows_of(labels) if labels.ndim else [digest_of_tensor(labels)]
    return samples, tuple(of_labels), rows


def _joined(digests: Sequence[str]) -> str:
    return digests[0] if len(digests) == 1 else digest_of_bytes("".join(digests).encode())


def _reference_to(dataset: object) -> Callable[[], object]:
    """Return a reference that does not keep a data set alive, unless it is a list."""
    try:
        return weakref.ref(dataset)
    except TypeError:
        return lambda: dataset


def _length_of(dataset: object) -> int | None:
    try:
        return len(dataset)  # type: ignore[arg-type]  # that is what is tried
    except (TypeError, NotImplementedError):
        return None
