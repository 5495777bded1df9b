"""Random numbers that workers, processes of a loader or epochs have in common.

One process draws new numbers for each sample. Draws that workers share leave the mean gradient as
it is: only the noise of augmentation and dropout no longer averages out over the workers, so that
is a note. Draws that each epoch repeats are a fault: a sample then has one augmentation only.
"""

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
from largebatch.audit.findings import Finding, fault, fine, note, unknown
from largebatch.audit.ranks import Ranks
from largebatch.audit.restoring import generators_of
from largebatch.audit.samples import fingerprint, torch_loader
from largebatch.audit.subject import Subject
from largebatch.formatting import plural
from largebatch.models.wrappers import device_of

_DRAWS = 32  # draws of one sample on a worker: of 4e9 pairs of workers, one has 32 equal flips

_WORKERS = 4
"""Largest number of loader processes that draw; each takes a second to start where it spawns."""

_SEED = "seed by worker, after the model is built: torch.manual_seed(seed + rank)"

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
    advance = subject.set_epoch
    draw = partial(_draws_of_one_sample, base, advance)
    draws = ranks.attempt("augmentation", "a sample", draw)
    everyone = [np.array(own) for own in ranks.gather(draws.tolist())]
    if all(len(np.unique(own)) == 1 for own in everyone):
        repeats = partial(_repeated_epoch, base, advance, by_script=subject.read is not None)
        found = ranks.attempt("augmentation", "a sample", repeats)
        if found is not None:
            return [found]
        text = f"{plural(draws.size, 'draw')} of a sample are identical: nothing is random"
        return [fine("augmentation", text)]
    if all(len(np.unique(epoch)) == 1 for own in everyone for epoch in own):
        return [fine("augmentation", "draws follow from the sample's number and the epoch")]
    return [compare_draws(everyone)]


def _repeated_epoch(
    base: DataLoader[Any], advance: SetEpoch | None, *, by_script: bool
) -> Finding | None:
    """Return a finding on a data set that draws by its epoch, which stays the same in the loader.

    It is called where all draws of the loader in two epochs were equal.
    """
    set_by_data = _epoch_setter_of(base.dataset)
    if advance is not None and _changes_by(advance, base.dataset):
        text = "the data set draws by its epoch, and each epoch of the loader repeats the first one"
        remedy = "its processes keep their copies: persistent_workers=False, or share the epoch"
        return fault("augmentation", text, remedy, float(_DRAWS))
    if set_by_data is None or not _changes_by(set_by_data, base.dataset):
        return None
    if advance is None or by_script:
        text = "the data set draws by its epoch, and what sets that was not given"
        return unknown("augmentation", text, "give set_epoch= with all that your loop sets")
    text = "the data set draws by its epoch, which set_epoch leaves as it is: all epochs repeat"
    remedy = "set the epoch of the data set too, before each epoch"
    return fault("augmentation", text, remedy, float(_DRAWS))


def _changes_by(advance: SetEpoch, dataset: Any) -> bool:  # noqa: ANN401 -- of any kind
    """Return True if a sample changes with the epoch, with equal states of the generators."""
    restore, samples = generators_of(), []
    for epoch in range(2):
        restore()
        advance(epoch)
        samples.append(fingerprint(dataset[0]))
    restore()
    return samples[0] != samples[1]


def _epoch_setter_of(dataset: Any) -> SetEpoch | None:  # noqa: ANN401 -- of any kind
    """Return the `set_epoch` of a data set, or of the one within it."""
    while dataset is not None:
        found: SetEpoch | None = getattr(dataset, "set_epoch", None)
        if found is not None:
            return found
        dataset = getattr(dataset, "dataset", None)
    return None


def _draws_of_one_sample(base: DataLoader[Any], advance: SetEpoch | None) -> Draws:
    """Return the draws of one sample as the loader seeds its workers, in two epochs."""
    workers = min(base.num_workers, _WORKERS)
    each = _DRAWS // max(1, workers)
    probe: DataLoader[Any] = DataLoader(
        _OneSample(base.dataset),  # type: ignore[arg-type]  # it has what a data set needs
        batch_sampler=[list(range(each))] * max(1, workers),  # one batch for each worker, in turn
        collate_fn=list,
        num_workers=workers,
        worker_init_fn=base.worker_init_fn,
        generator=base.generator,
        multiprocessing_context=base.multiprocessing_context,
        persistent_workers=base.persistent_workers and workers > 0,
    )
    epochs = []
    for epoch in range(2):
        if advance is not None:
            advance(epoch)
        epochs.append(list(probe))
    return np.array(epochs, dtype=np.int64)


def compare_draws(ranks: Sequence[Draws]) -> Finding:
    """Compare draws of different workers, of processes of a loader, and of two epochs."""
    number = ranks[0][0].size
    epochs = [rank for rank in ranks if len(np.unique(rank[0])) > 1 and (rank[0] == rank[1]).all()]
    remedy = "seed workers from torch.initial_seed(), not with a constant (worker_init_fn)"
    if epochs:
        text = (
            f"{number} draws of a sample are equal in two epochs on {plural(len(epochs), 'worker')}"
        )
        return fault("augmentation", text, remedy, float(number))
    shared = sum((rank == ranks[0]).all() for rank in ranks[1:])
    if shared:
        text = f"{number} draws of a sample are equal on {shared + 1} of {len(ranks)} workers"
        remedy = f"{_SEED}, and random's and NumPy's generators equally"
        return note("augmentation", text, remedy, float(shared + 1))
    workers = [rank[0] for rank in ranks if len(rank[0]) > 1 and (rank[0] == rank[0][0]).all()]
    if workers:
        text = f"{len(workers[0])} processes of a loader draw the same augmentations"
        return note("augmentation", text, remedy, float(len(workers[0])))
    text = f"{number} draws of a sample differ between workers, loader processes and epochs"
    return fine("augmentation", text)


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
    own = {name: it for name, it in before.items() if it != after[name]}
    everyone = ranks.gather(own)
    drawn = [name for name in own if all(name in it for it in everyone)]
    if ranks.size == 1 or not drawn:
        return []
    equal = [name for name in drawn if all(it[name] == own[name] for it in everyone)]
    if not equal:
        return [fine("dropout", f"workers draw different numbers ({', '.join(drawn)}) in a step")]
    text = f"{ranks.size} of {ranks.size} workers draw the same random numbers in a step "
    text += f"({', '.join(equal)}): dropout, mixup or noise"
    return [note("dropout", text, _SEED, float(ranks.size))]
