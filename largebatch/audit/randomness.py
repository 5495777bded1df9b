"""Measure random numbers that workers, processes of a loader or epochs have in common."""

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from largebatch import accelerator
from largebatch.audit.ranks import Ranks
from largebatch.audit.restoring import generators_of
from largebatch.audit.rules import data as rules
from largebatch.audit.samples import fingerprint, torch_loader
from largebatch.audit.subject import Subject
from largebatch.models.wrappers import device_of
from largebatch.rules import Finding, decide

_DRAWS = 32  # draws of one sample on a worker: of 4e9 pairs of workers, one has 32 equal flips

_WORKERS = 4
"""Largest number of loader processes that draw; each takes a second to start where it spawns."""

SetEpoch = Callable[[int], object]

Draws = npt.NDArray[np.int64]
"""Fingerprints of one sample's draws: epoch x worker x draw."""


class _OneSample:
    """Data set whose every sample is a fingerprint of a new draw of one sample."""

    def __init__(self, dataset: Any) -> None:  # noqa: ANN401 -- of any kind
        self._dataset = dataset

    def __len__(self) -> int:
        return _DRAWS

    def __getitem__(self, _: int) -> int:
        return fingerprint(self._dataset[0])


def check_augmentation(subject: Subject, ranks: Ranks) -> list[Finding]:
    """Draw one sample in each process of a loader, in two epochs, and compare the draws.

    Nothing is returned for data without sample numbers.
    """
    base = torch_loader(subject.loader)
    countable = base is not None and not isinstance(base.dataset, IterableDataset)
    if not all(ranks.gather(countable)):
        return []
    assert base is not None
    set_epoch = subject.set_epoch
    draw = partial(_draws_of_one_sample, base, set_epoch)
    draws = ranks.attempt("augmentation", "a sample", draw)
    of_workers = [np.array(of_worker) for of_worker in ranks.gather(draws.tolist())]
    if all(_is_constant(of_worker) for of_worker in of_workers):
        measure = partial(_measure_epoch, base, set_epoch, by_script=subject.read is not None)
        evidence = ranks.attempt("augmentation", "a sample", measure)
        if findings := decide(evidence, rules.EPOCH_OF_DATA):
            return findings
    return compare_draws(of_workers)


def _measure_epoch(
    base: DataLoader[Any], set_epoch: SetEpoch | None, *, by_script: bool
) -> rules.EpochOfData:
    """Set the epoch of a data set outside of its loader, which may keep copies of the set."""
    by_given = set_epoch is not None and _changes_by(set_epoch, base.dataset)
    own = _epoch_setter_of(base.dataset)
    return rules.EpochOfData(
        draws=_DRAWS,
        changes_by_given=by_given,
        changes_by_own=not by_given and own is not None and _changes_by(own, base.dataset),
        may_be_set=set_epoch is None or by_script,
    )


def _changes_by(set_epoch: SetEpoch, dataset: Any) -> bool:  # noqa: ANN401 -- of any kind
    """Return True if a sample changes with the epoch, with equal states of the generators."""
    restore = generators_of()
    samples = []
    for epoch in range(2):
        restore()
        set_epoch(epoch)
        samples.append(fingerprint(dataset[0]))
    restore()
    return samples[0] != samples[1]


def _epoch_setter_of(dataset: Any) -> SetEpoch | None:  # noqa: ANN401 -- of any kind
    """Return the `set_epoch` of a data set, or of the one within it."""
    while dataset is not None:
        set_epoch: SetEpoch | None = getattr(dataset, "set_epoch", None)
        if set_epoch is not None:
            return set_epoch
        dataset = getattr(dataset, "dataset", None)
    return None


def _draws_of_one_sample(base: DataLoader[Any], set_epoch: SetEpoch | None) -> Draws:
    """Return the draws of one sample as the loader seeds its workers, in two epochs."""
    workers = min(base.num_workers, _WORKERS)
    draws_of_worker = _DRAWS // max(1, workers)
    probe: DataLoader[Any] = DataLoader(
        _OneSample(base.dataset),  # type: ignore[arg-type]  # it has what a data set needs
        # One batch for each worker: a loader gives them out in turn.
        batch_sampler=[list(range(draws_of_worker))] * max(1, workers),
        collate_fn=list,
        num_workers=workers,
        worker_init_fn=base.worker_init_fn,
        generator=base.generator,
        multiprocessing_context=base.multiprocessing_context,
        persistent_workers=base.persistent_workers and workers > 0,
    )
    epochs = []
    for epoch in range(2):
        if set_epoch is not None:
            set_epoch(epoch)
        epochs.append(list(probe))
    return np.array(epochs, dtype=np.int64)


def compare_draws(of_workers: Sequence[Draws]) -> list[Finding]:
    """Compare draws of different workers, of processes of a loader, and of two epochs."""
    first = of_workers[0]
    # Of one process there is nothing to compare, and 1 is not a number that a rule names.
    equal_processes = [len(it[0]) for it in of_workers if (it[0] == it[0][0]).all()]
    evidence = rules.DrawsOfOneSample(
        number=first[0].size,
        in_all=first.size,
        nothing_random=all(_is_constant(it) for it in of_workers),
        by_epoch=all(_is_constant(epoch) for it in of_workers for epoch in it),
        repeating=sum(not _is_constant(it[0]) and (it[0] == it[1]).all() for it in of_workers),
        sharing=sum((it == first).all() for it in of_workers),
        workers=len(of_workers),
        processes=max(equal_processes, default=0),
    )
    return decide(evidence, rules.DRAWS)


def _is_constant(draws: Draws) -> bool:
    return len(np.unique(draws)) == 1


def states_of(model: nn.Module) -> dict[str, int]:
    """Return a fingerprint of each generator that a step may draw from, by its library."""
    device = device_of(model)
    states = {
        "torch": fingerprint(torch.get_rng_state()),
        "NumPy": fingerprint(np.random.get_state()),
        "random": fingerprint(random.getstate()),
    }
    if accelerator.is_remote(device):
        place: Any = torch.get_device_module(device)
        states[device.type] = fingerprint(place.get_rng_state())
    return states


def check_draws(before: dict[str, int], after: dict[str, int], ranks: Ranks) -> list[Finding]:
    """Check whether workers draw the same random numbers in a step: dropout, mixup, noise.

    The states of the generators are those before and after a call of the step. Nothing is returned
    for a step that draws none.
    """
    changed = {name: state for name, state in before.items() if state != after[name]}
    of_workers = ranks.gather(changed)
    if ranks.size == 1:
        return []
    drawn = [name for name in changed if all(name in states for states in of_workers)]
    equal = [name for name in drawn if len({states[name] for states in of_workers}) == 1]
    evidence = rules.DrawsOfStep(drawn=tuple(drawn), equal=tuple(equal), workers=ranks.size)
    return decide(evidence, rules.DRAWS_OF_STEP)
