"""Measure samples that are read twice, never, by every worker, or in one order in all epochs.

The numbers come from the loader
itself, with a data set in it that returns them, so a wrapper that sets the epoch or synchronises
generators (Accelerate's, Lightning Fabric's) does so as in training. Numbers of readings are summed
over the workers, 4 bytes a sample, so that a world of any size has them.
"""

import copy
import hashlib
import inspect
import linecache
import random
import re
import sys
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, IterableDataset, Subset

from largebatch.audit.ranks import Ranks
from largebatch.audit.restoring import (
    INNER_LOADERS,
    generators_of,
    without_iterator,
)
from largebatch.audit.rules import data as rules
from largebatch.audit.subject import Subject
from largebatch.distributed.backend import sum_over_workers
from largebatch.replacing import replaced_items
from largebatch.rules import Finding, decide

_REPEATING = ("RASampler", "RepeatAugSampler")
"""Samplers that repeat samples by design: torchvision's and timm's repeated augmentation."""

_SETS_EPOCH = re.compile(r"\bset_(\w+_)?epoch\b")  # names of functions in a script's source

SampleNumbers = npt.NDArray[np.int64]

_PASS_ON = INNER_LOADERS[:2]
"""Attributes in wrappers that pass batches on as they are."""


class NoNumbersError(Exception):
    """The samples of a loader have no numbers; the text says why, without a final period."""


@dataclass(frozen=True, slots=True)
class Epoch:
    """Sample numbers of one worker in one epoch."""

    samples: SampleNumbers
    """In the order of training, by place in the whole data set (`Subset` is resolved)."""

    sizes: SampleNumbers

    def batches(self) -> list[SampleNumbers]:
        """Return the sample numbers of each batch."""
        return np.split(self.samples, np.cumsum(self.sizes)[:-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Readings:
    """Numbers of readings in an epoch, over all workers."""

    size: int
    """Number of samples that some worker's data set has; those that it repeats count again."""

    twice: int
    """Number of readings of a sample after as many as the data sets have of it."""

    never: int
    by_draw: int
    """Number of those that a worker repeats itself, before its last batch, which may be padded."""

    equal: bool
    """True if all of several workers read the same samples in the same order."""

    global_batch: int
    """Largest number of samples of an update's batches, one from each worker."""

    batches: tuple[int, ...]
    everything: bool
    held: SampleNumbers | None
    """Places in the whole data set of the samples that workers have, if it is one data set."""


def check_samples(subject: Subject, ranks: Ranks) -> list[Finding]:
    """Check which samples are read in two epochs, and in which order.

    Where samples have no numbers, the first batches of the workers are compared.
    """
    try:
        base, epochs, readings = read_epochs(
            subject.loader, 2, ranks, "samples", subject.set_epoch, other=subject.val_loader
        )
    except NoNumbersError as error:
        return _compare_batches(subject, ranks, str(error))
    sampler = getattr(base.batch_sampler, "sampler", base.sampler)
    batches = rules.NumbersOfBatches(min(readings.batches), max(readings.batches))
    return [
        *decide(_coverage(readings, ranks.size, sampler), rules.COVERAGE),
        *decide(batches, rules.NUMBERS_OF_BATCHES),
        *decide(_orders(epochs, subject, ranks), rules.ORDERS),
    ]


def read_epochs(
    loader: object,
    number: int,
    ranks: Ranks,
    check: str,
    set_epoch: Callable[[int], object] | None = None,
    *,
    other: object = None,
) -> tuple[DataLoader[Any], list[Epoch], Readings]:
    """Return the DataLoader in a loader, this worker's epochs, and all readings in the first one.

    Samples that only `other` reads, of the same data set, are not expected in this loader: they
    are the other part of a division by samplers.

    Raises NoNumbersError on all workers if the samples of one of them have no numbers.
    """

    def draw() -> tuple[list[Epoch], str]:
        try:
            return epochs_of(loader, number, set_epoch), ""
        except NoNumbersError as error:
            return [], str(error)

    epochs, problem = ranks.attempt(check, "drawing sample numbers", draw)
    problems = [text for text in ranks.gather(problem) if text]
    base = torch_loader(loader)
    if problems or base is None:
        raise NoNumbersError(problems[0])
    of_other = ranks.attempt(check, "drawing sample numbers", lambda: _read_by(other, base.dataset))
    is_chosen = check == "evaluation samples"
    readings = _count_readings(base.dataset, epochs[0], of_other, ranks, is_chosen=is_chosen)
    return base, epochs, readings


def _read_by(other: object, dataset: Any) -> SampleNumbers:  # noqa: ANN401 -- any kind
    """Return the places that another loader of the same data set reads; none for another one."""
    base = torch_loader(other)
    if base is None or whole(base.dataset)[0] is not whole(dataset)[0]:
        return np.empty(0, dtype=np.int64)
    try:
        return epochs_of(other, 1)[0].samples
    except NoNumbersError:
        return np.empty(0, dtype=np.int64)


def _count_readings(
    dataset: Any,  # noqa: ANN401 -- any kind
    epoch: Epoch,
    of_other: SampleNumbers,
    ranks: Ranks,
    *,
    is_chosen: bool,
) -> Readings:
    """Count readings; if the other loader reads other samples of this data set, those are not
    expected here, and with `is_chosen` only those that are read are.
    """
    root, held = whole(dataset)
    if len(set(ranks.gather(len(root)))) == 1:
        held = held[_expected(len(root), epoch.samples, of_other, ranks, is_chosen=is_chosen)[held]]
    early = np.concatenate([epoch.samples[:0], *epoch.batches()[:-1]])
    read = np.bincount(epoch.samples, minlength=len(root))
    has = np.bincount(held, minlength=len(root))
    read_early = np.bincount(early, minlength=len(root))
    of_workers = ranks.gather(
        {
            "length": len(root),
            "samples": ranks.attempt("samples", "reading a sample", lambda: _fingerprints(root)),
            "held": fingerprint(held),
            "read": fingerprint(epoch.samples),
            "by draw": int((read_early - has.clip(1)).clip(0).sum()),
            "batches": len(epoch.sizes),
            "largest": int(epoch.sizes.max(initial=0)),
            "all": bool(np.isin(held, epoch.samples).all()),
        }
    )

    def is_equal(*keys: str) -> bool:
        return all(worker[key] == of_workers[0][key] for worker in of_workers for key in keys)

    is_one_set = is_equal("length", "samples")
    has_equal_parts = is_one_set and is_equal("held")
    # Samples of data sets that differ have places of their own, one data set behind the other.
    lengths = [worker["length"] for worker in of_workers]
    start = 0 if is_one_set else sum(lengths[: ranks.rank])
    size = lengths[0] if is_one_set else sum(lengths)
    counts = torch.zeros(2, size, dtype=torch.int32)
    counts[:, start : start + len(root)] = torch.from_numpy(np.stack([read, has > 0]))
    sum_over_workers(counts, ranks.backend)
    times = counts[0]
    # A Subset may hold a sample several times; of different subsets each counts once.
    expected = torch.from_numpy(has) if has_equal_parts else counts[1].clamp(max=1)
    is_comparable = has_equal_parts and ranks.size > 1
    return Readings(
        size=int(expected.sum()),
        twice=int((times - expected).clamp(min=0).sum()),
        never=int((expected - times).clamp(min=0).sum()),
        by_draw=max(worker["by draw"] for worker in of_workers),
        equal=is_comparable and is_equal("read"),
        global_batch=sum(worker["largest"] for worker in of_workers),
        batches=tuple(worker["batches"] for worker in of_workers),
        everything=is_comparable and all(worker["all"] for worker in of_workers),
        held=np.flatnonzero(expected) if is_one_set else None,
    )


def _expected(
    size: int, read: SampleNumbers, of_other: SampleNumbers, ranks: Ranks, *, is_chosen: bool
) -> npt.NDArray[np.bool_]:
    """Return which samples this loader is expected to read: not those of the other one alone."""
    counts = torch.zeros(2, size, dtype=torch.int32)
    counts[0, read] = 1
    counts[1, of_other] = 1
    sum_over_workers(counts, ranks.backend)
    is_read = (counts[0] > 0).numpy()
    is_of_other = (counts[1] > 0).numpy() & ~is_read
    return is_read if is_chosen and is_of_other.any() else ~is_of_other


def _fingerprints(dataset: Any) -> list[int]:  # noqa: ANN401 -- a data set of any kind
    """Return fingerprints of three samples, read with equal generators on all workers.

    They show workers that have different files under the same sample numbers. Samples that differ
    at a second reading show nothing.
    """
    size = len(dataset)
    restore = generators_of()
    fingerprints = []
    for number in sorted({0, size // 2, size - 1}) if size else ():
        readings = []
        for _ in range(2):
            for seed in (random.seed, np.random.seed, torch.manual_seed):
                seed(0)
            readings.append(fingerprint(dataset[number]))
        fingerprints.append(readings[0] if readings[0] == readings[1] else 0)
    restore()
    return fingerprints


def fingerprint(sample: object) -> int:
    """Return a number of 56 bits: a digest of the tensors, arrays, images and values in a sample.

    >>> fingerprint((torch.zeros(2), 1)) == fingerprint((torch.zeros(2), 1))
    True
    >>> fingerprint((torch.zeros(2), 1)) == fingerprint((torch.zeros(2), 2))
    False
    """
    digest = hashlib.blake2b(digest_size=7)
    for leaf in tree_leaves(sample):
        value = leaf.detach().cpu().contiguous() if isinstance(leaf, torch.Tensor) else leaf
        if isinstance(value, torch.Tensor):
            value = value.reshape(-1).view(torch.uint8).numpy()
        content = value.tobytes() if hasattr(value, "tobytes") else repr(value).encode()
        digest.update(f"{type(leaf).__name__} {getattr(leaf, 'shape', '')}".encode() + content)
    return int.from_bytes(digest.digest())


def _coverage(readings: Readings, workers: int, sampler: object) -> rules.Coverage:
    kind = type(sampler).__name__
    is_replaced = bool(getattr(sampler, "replacement", False))
    return rules.Coverage(
        size=readings.size,
        twice=readings.twice,
        never=readings.never,
        is_one_set=readings.held is not None,
        equal=readings.equal,
        everything=readings.everything,
        global_batch=readings.global_batch,
        workers=workers,
        sampler=kind,
        draws_again=kind in _REPEATING or is_replaced or readings.by_draw > 0,
    )


def _orders(epochs: list[Epoch], subject: Subject, ranks: Ranks) -> rules.Orders:
    """Compare the orders of two epochs; the order of the data set itself is not shuffled."""
    first, second = (epoch.samples for epoch in epochs)
    half = first[: max(2, len(first) // 2)]  # the end may be padded with the first samples
    is_equal = np.array_equal(first, second) and len(first) > 1
    of_workers = ranks.gather([is_equal, bool((np.diff(half) > 0).all())])
    are_sorted = [is_sorted for is_equal, is_sorted in of_workers if is_equal]
    may_be_set = False
    if subject.set_epoch is None and are_sorted and not all(are_sorted):
        is_script = isinstance(subject.read, int)
        may_be_set = sets_epoch_later() if is_script else may_set_epoch()
    return rules.Orders(
        equal=len(are_sorted),
        workers=ranks.size,
        is_shuffled=not all(are_sorted),
        may_be_set=may_be_set,
    )


def may_set_epoch() -> bool:
    """Return True if a calling module or one that it imports from names a function that sets the
    epoch, or if its source cannot be read.
    """
    frames = [it.frame.f_globals for it in inspect.stack(0)]
    frames = [it for it in frames if not str(it.get("__name__")).startswith("largebatch.")]
    # Without its source nothing is known of a script.
    if not frames or not linecache.getlines(str(frames[0].get("__file__"))):
        return True
    values = frames[0].values()
    names = {getattr(it, "__module__", None) or getattr(it, "__name__", None) for it in values}
    names = {str(it) for it in names if not str(it).startswith("largebatch.")}
    modules = [vars(sys.modules[it]) for it in names if it in sys.modules]
    imported = {str(it.get("__file__")) for it in modules}
    files = {str(it.get("__file__")) for it in frames}  # a framework's loop among them
    files |= {it for it in imported if "-packages" not in it}
    sources = ("".join(linecache.getlines(it)) for it in files)
    return any(_SETS_EPOCH.search(it) for it in sources)


def sets_epoch_later() -> bool:
    """Return True if the script, which waits for a batch, names a function that sets the epoch
    behind the lines at which it is: it may call that when an epoch ends.
    """
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        file = frame.f_code.co_filename
        is_of_script = str(frame.f_globals.get("__name__")).split(".")[0] != "largebatch"
        # What comes behind the present line of each function runs when the epoch ends.
        if is_of_script and "-packages" not in file:
            last = max(line for *_, line in frame.f_code.co_lines() if line)
            rest = linecache.getlines(file)[frame.f_lineno : last]
            if _SETS_EPOCH.search("".join(rest)):
                return True
        frame = frame.f_back
    return False


def _compare_batches(subject: Subject, ranks: Ranks, problem: str) -> list[Finding]:
    """Compare the batches of the workers and their number, where samples have no numbers."""

    def read() -> list[int]:
        batches = islice(without_iterator(subject.loader), rules.MOST_BATCHES + 1)
        return [fingerprint(batch) for batch in batches]

    of_workers = ranks.gather(ranks.attempt("samples", "the loader", read))
    counts = tuple(map(len, of_workers))
    compared = min(*counts, rules.MOST_BATCHES)
    alike = Counter(tuple(batches[:compared]) for batches in of_workers)
    base = torch_loader(subject.loader)
    evidence = rules.BatchContents(
        problem=problem,
        counts=counts,
        workers=ranks.size,
        equal=max(alike.values()),
        again=max(len(batches) - len(set(batches)) for batches in of_workers),
        processes=0 if base is None else base.num_workers,
    )
    return decide(evidence, rules.BATCHES)


def _inner_name(loader: object) -> str | None:
    """Return the attribute in which a wrapper has the inner loader; None for no wrapper."""
    attributes = getattr(loader, "__dict__", {})
    names = (name for name in INNER_LOADERS if hasattr(attributes.get(name), "__iter__"))
    return next(names, None)


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


def whole(dataset: Any) -> tuple[Any, SampleNumbers]:  # noqa: ANN401 -- any data set
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
    if isinstance(base.dataset, IterableDataset) or not hasattr(base.dataset, "__len__"):
        raise NoNumbersError(f"samples of {type(base.dataset).__name__} have no numbers")
    size = len(base.dataset)
    _, places = whole(base.dataset)
    # A data set that returns numbers, read in this process: no sample is loaded. The samplers and
    # the wrappers are the script's.
    changes: dict[str, Any] = {
        "dataset": range(size),
        "collate_fn": lambda batch: batch,
        "num_workers": 0,
        "prefetch_factor": None,
        "pin_memory": False,
        "persistent_workers": False,
        "timeout": 0,
        "_iterator": None,
        "iterator": None,  # of timm's MultiEpochsDataLoader
    }
    epochs = []
    with replaced_items(vars(base), vars(base) | changes):  # DataLoader refuses assignments
        for epoch in range(number):
            if set_epoch is not None:
                set_epoch(epoch)
            outer: Any = loader if _inner_name(loader) in _PASS_ON else base
            batches = [np.empty(0, dtype=np.int64)]  # an epoch may have none
            total = 0
            for batch in outer:
                if total > 2 * size:
                    text = f"the sampler draws {total:,} of {size:,} samples without an end"
                    raise NoNumbersError(text)
                batches.append(np.asarray(batch, dtype=np.int64).reshape(-1))
                total += len(batches[-1])
            sizes = np.array([len(batch) for batch in batches[1:]], dtype=np.int64)
            epochs.append(Epoch(places[np.concatenate(batches)], sizes))
    return epochs
