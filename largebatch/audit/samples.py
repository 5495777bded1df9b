"""Samples that are read twice, never, by every worker, or in one order in all epochs.

An epoch of one process reads each sample once, in a new order. Numbers of readings are summed over
the workers, 4 bytes a sample, so that a world of any size has them.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from largebatch.audit.calling import may_set_epoch
from largebatch.audit.findings import Check, Finding
from largebatch.audit.fingerprint import fingerprint, same_generators
from largebatch.audit.order import (
    Epoch,
    NoNumbersError,
    Numbers,
    epochs_of,
    levels,
    torch_loader,
)
from largebatch.audit.ranks import Ranks
from largebatch.audit.restoring import without_iterator
from largebatch.audit.subject import Subject
from largebatch.distributed.backend import Backend, sum_over_workers
from largebatch.formatting import percent, plural

_REPEATING = ("RASampler", "RepeatAugSampler")
"""Samplers that repeat samples by design: torchvision's and timm's repeated augmentation."""

_SMALL_PART = 0.01
"""Part of an epoch that `drop_last` may leave out without a note: an epoch's order changes, so each
sample misses one epoch in 100 at most."""


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
    """Number of batches by worker."""

    everything: bool
    """True if every worker reads every sample."""

    divided: Any
    """The data set that the workers divide: by a sampler, then it is that of every loader, or in
    parts of as many samples together (`Subset`). None if there is no such data set."""

    own_data: bool
    """True if a sample's number means another sample, or none, on some worker."""


def check_samples(subject: Subject, ranks: Ranks) -> list[Finding]:
    """Check which samples are read in two epochs, and in which order.

    Where samples have no numbers, a few batches of the workers are compared.
    """
    epochs, problem = numbered_epochs(subject.loader, 2, ranks, "samples", subject.set_epoch)
    base = torch_loader(subject.loader)
    if problem or base is None:
        return [_compare_batches(subject, ranks, problem)]
    readings = count_readings(base.dataset, epochs[0], ranks)
    findings = [
        _coverage(readings, ranks.size, getattr(base.batch_sampler, "sampler", base.sampler))
    ]
    if len(set(readings.batches)) > 1:
        findings.append(_uneven(readings.batches))
    return [*findings, _order(epochs, subject, ranks)]


def numbered_epochs(
    loader: object,
    number: int,
    ranks: Ranks,
    check: Check,
    set_epoch: Callable[[int], object] | None = None,
) -> tuple[list[Epoch], str]:
    """Return the sample numbers of epochs, and why there are none on some worker."""

    def draw() -> tuple[list[Epoch], str]:
        try:
            return epochs_of(loader, number, set_epoch), ""
        except NoNumbersError as error:
            return [], str(error)

    epochs, problem = ranks.attempt(check, "drawing sample numbers", draw)
    return epochs, next((text for text in ranks.gather(problem) if text), "")


def count_readings(dataset: Any, epoch: Epoch, ranks: Ranks) -> Readings:  # noqa: ANN401 -- any kind
    """Count how often the workers read each sample in an epoch."""
    parts = levels(dataset)
    root, held = parts[-1][0], parts[0][1]
    extra = np.bincount(held, minlength=len(root)) - 1  # a Subset may repeat samples
    read = np.bincount(epoch.samples, minlength=len(root))
    own = {
        "length": len(root),
        "samples": ranks.attempt("samples", "reading a sample", lambda: _fingerprints(root)),
        "held": [[fingerprint(places), len(places)] for _, places in parts],
        "read": fingerprint(epoch.samples),
        "by draw": _repeated_by_draw(epoch, extra),
        "batches": len(epoch.sizes),
        "largest": int(epoch.sizes.max(initial=0)),
        "all": bool(np.isin(held, epoch.samples).all()),
    }
    everyone = ranks.gather(own)
    lengths = [rank["length"] for rank in everyone]
    first = everyone[0]
    shared = all(rank[key] == first[key] for rank in everyone for key in ("length", "samples"))
    level = _divided([rank["held"] for rank in everyone]) if shared else None
    same = level == 0
    start, size = (0, lengths[0]) if shared else (sum(lengths[: ranks.rank]), sum(lengths))
    times, exists, extras = _summed(
        [read, (extra >= 0).astype(np.int64), extra.clip(0)], start, size, ranks.backend
    )
    expected = exists.clamp(max=1) + extras
    if level is not None:
        expected = torch.from_numpy(np.bincount(parts[level][1], minlength=size))
    return Readings(
        size=int(expected.sum()),
        twice=int((times - expected).clamp(min=0).sum()),
        never=int((expected - times).clamp(min=0).sum()),
        by_draw=max(rank["by draw"] for rank in everyone),
        equal=same and ranks.size > 1 and all(it["read"] == first["read"] for it in everyone),
        global_batch=sum(rank["largest"] for rank in everyone),
        batches=tuple(rank["batches"] for rank in everyone),
        everything=same and ranks.size > 1 and all(rank["all"] for rank in everyone),
        divided=None if level is None else parts[level][0],
        own_data=not shared,
    )


def _divided(held: list[list[list[int]]]) -> int | None:
    """Return the level of the data set that the workers divide; see `levels` and `Readings`.

    A level has a fingerprint of its samples and their number, by worker.
    """
    for level, of_workers in enumerate(zip(*held, strict=False)):
        if all(it == of_workers[0] for it in of_workers):
            size = sum(of_worker[0][1] for of_worker in held)
            is_division = abs(size - of_workers[0][1]) < len(held)
            return level if level == 0 or is_division else None
    return None


def _repeated_by_draw(epoch: Epoch, extra: Numbers) -> int:
    """Return how often this worker repeats samples before its last batch, beyond its data set."""
    early = np.concatenate([epoch.samples[:0], *epoch.batches()[:-1]])
    times = np.bincount(early, minlength=len(extra))
    return int((times - 1 - extra.clip(0)).clip(0).sum())


def _summed(own: list[Numbers], start: int, size: int, backend: Backend) -> Tensor:
    """Return sums over all workers of numbers by sample, of which a worker's begin at `start`."""
    counts = torch.zeros(len(own), size, dtype=torch.int32)
    counts[:, start : start + len(own[0])] = torch.from_numpy(np.stack(own))
    sum_over_workers(counts, backend)
    return counts


def _fingerprints(dataset: Any) -> list[int]:  # noqa: ANN401 -- a data set of any kind
    """Return fingerprints of three samples, read with equal generators on all workers.

    They show workers that have different files under the same sample numbers. Samples that differ
    at a second reading show nothing.
    """
    size = len(dataset)
    found = []
    for number in sorted({0, size // 2, size - 1}) if size else ():
        with same_generators():
            first = fingerprint(dataset[number])
        with same_generators():
            found.append(first if first == fingerprint(dataset[number]) else 0)
    return found


def _draws_by_design(sampler: object, readings: Readings) -> bool:
    """Return True for a sampler that draws samples several times by design.

    A fault in the division repeats samples on several workers, not on one of them.
    """
    known = type(sampler).__name__ in _REPEATING or getattr(sampler, "replacement", False)
    return bool(known or readings.by_draw)


def _coverage(readings: Readings, world_size: int, sampler: object) -> Finding:
    text = (
        f"{plural(readings.size, 'sample')}: {readings.never:,} never read in an epoch"
        + f" ({percent(readings.never / max(1, readings.size))} %)" * bool(readings.never)
        + f", {readings.twice:,} read again"
        + ", of data sets that differ between workers" * readings.own_data
    )
    kind = type(sampler).__name__
    if not readings.equal and _draws_by_design(sampler, readings):
        return Finding(
            check="samples",
            level="note",
            text=f"{text}, as {kind} draws them",
            remedy="nothing if this is wanted; then an epoch is not one pass over the data",
        )
    if readings.everything or readings.equal:
        what = "all" if readings.everything else f"the same draws of {kind} from"
        return Finding(
            check="samples",
            level="fault",
            text=f"every worker reads {what} {plural(readings.size, 'sample')} in an epoch: "
            f"{world_size} passes over the data are counted as one",
            remedy="divide the data: DataLoader(..., sampler=DistributedSampler(data))"
            if readings.everything
            else "divide the draws: give worker r of W those with the numbers r, r + W, ...",
            figure=float(world_size),
        )
    most = (
        readings.global_batch + world_size - 2
    )  # of drop_last on every worker, and of the sampler
    left_out = (
        not readings.twice
        and not readings.own_data
        and (world_size == 1 or readings.size - readings.never > readings.size / world_size + most)
    )
    if readings.never > most and left_out:
        remedy = "nothing if the sampler leaves them out on purpose; else read the rest too"
        share = readings.never / readings.size
        return Finding(check="samples", level="note", text=text, remedy=remedy, figure=share)
    if readings.never > most or readings.twice > (world_size - 1 if readings.never else most):
        return Finding(
            check="samples",
            level="fault",
            text=text,
            remedy=_remedy(readings, world_size),
            figure=readings.never / readings.size if readings.never else float(readings.twice),
        )
    few = readings.never <= _SMALL_PART * readings.size and readings.twice < world_size
    remedy = "" if few else "choose a batch that divides the data, or pad instead of drop_last"
    return Finding(check="samples", level="fine" if few else "note", text=text, remedy=remedy)


def _remedy(readings: Readings, world_size: int) -> str:
    read = readings.size - readings.never
    if readings.own_data:
        return "list the same files in the same order on all workers: sorted(...), or divide once"
    if not readings.twice and read <= readings.size / world_size + readings.global_batch:
        return "the data are divided twice: keep DistributedSampler, or what the library divides"
    if readings.twice:
        return "divide one permutation: the same seed, epoch and subset of the data on all workers"
    return "read the rest too: without it these samples do not train"


def _uneven(batches: tuple[int, ...]) -> Finding:
    return Finding(
        check="samples",
        level="fault",
        text=f"workers have {min(batches):,} to {max(batches):,} batches in an epoch: the last "
        "updates wait for workers that have ended",
        remedy="give all workers as many batches: DistributedSampler, drop_last, or DDP's join()",
        figure=float(max(batches) - min(batches)),
    )


def _order(epochs: list[Epoch], subject: Subject, ranks: Ranks) -> Finding:
    """Compare the orders of two epochs; the order of the data set itself is not shuffled."""
    first, second = (epoch.samples for epoch in epochs)
    half = first[: max(2, len(first) // 2)]  # the end may be padded with the first samples
    own = [np.array_equal(first, second), bool((np.diff(half) > 0).all()), len(first)]
    everyone = ranks.gather(own)
    same = [rank for rank in everyone if rank[0] and rank[2] > 1]
    if not same:
        text = "the second epoch has another order than the first"
        return Finding(check="epoch order", level="fine", text=text)
    if all(rank[1] for rank in same):
        return Finding(
            check="epoch order",
            level="note",
            text="both epochs have the order of the data set: nothing is shuffled",
            remedy="shuffle the training data: shuffle=True",
        )
    text = f"{len(same)} of {ranks.size} workers read both epochs in one shuffled order"
    remedy = "call sampler.set_epoch(epoch) before each epoch"
    if subject.set_epoch is None and may_set_epoch():
        return Finding(
            check="epoch order",
            level="unknown",
            text=f"{text} if the script does not set the epoch, which was not given",
            remedy="to check what your loop does: audit(..., set_epoch=sampler.set_epoch)",
        )
    text += ", and no code of the script sets the epoch" * (subject.set_epoch is None)
    return Finding(
        check="epoch order", level="fault", text=text, remedy=remedy, figure=float(len(same))
    )


def _compare_batches(subject: Subject, ranks: Ranks, problem: str) -> Finding:
    """Compare a few batches of the workers, where samples have no numbers."""

    def read() -> list[int]:
        batches = islice(without_iterator(subject.loader), subject.steps)
        return [fingerprint(batch) for batch in batches]

    everyone = ranks.gather(ranks.attempt("samples", "the loader", read))
    number = min(map(len, everyone))
    if number == 0 or ranks.size == 1:
        remedy = "give the audit a DataLoader whose data set has a length"
        return Finding(check="samples", level="unknown", text=problem, remedy=remedy)
    equal = Counter(tuple(own[:number]) for own in everyone)
    most = max(equal.values())
    words = plural(number, "batch", "batches")
    base = torch_loader(subject.loader)
    again = max(len(own) - len(set(own)) for own in everyone)
    if again and base is not None and base.num_workers > 1:
        return Finding(
            check="samples",
            level="fault",
            text=f"{again} of {number} batches repeat one that the same worker has read: each "
            "process of its loader reads all samples",
            remedy="divide an iterable data set by loader process too: get_worker_info()",
            figure=float(again),
        )
    if most > 1:
        return Finding(
            check="samples",
            level="fault",
            text=f"{most} of {ranks.size} workers read the same {words}: the data are not divided",
            remedy="divide an iterable data set by rank: split_dataset_by_node, or its own shards",
            figure=float(most),
        )
    text = f"{words} differ between workers; more cannot be seen: {problem}"
    return Finding(check="samples", level="fine", text=text)
