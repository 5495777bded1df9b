"""Sample numbers of a loader are those of its next epochs."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    Sampler,
    TensorDataset,
)

from largebatch.audit.samples import NoNumbersError, epochs_of, torch_loader


def loader_of(number: int, **words: object) -> DataLoader[object]:
    return DataLoader(TensorDataset(torch.arange(number)), **words)  # type: ignore[arg-type]


def test_the_epoch_is_set_and_the_loader_restored() -> None:
    loader = loader_of(10, batch_size=4)
    sampler: DistributedSampler[object] = DistributedSampler(loader.dataset, 2, 0)
    loader = loader_of(10, batch_size=4, sampler=sampler)
    before = dict(vars(loader))
    first, second = epochs_of(loader, 2, sampler.set_epoch)
    assert vars(loader) == before
    sampler.set_epoch(1)
    assert list(sampler) == second.samples.tolist() != first.samples.tolist()


class Endless(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        while True:
            yield 0


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter([1, 2])


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        pytest.param([1, 2], "list is not a DataLoader", id="list"),
        pytest.param(DataLoader(Stream()), "samples of Stream have no numbers", id="iterable"),
        pytest.param(loader_of(4, sampler=Endless()), "draws 9 of 4 samples", id="endless"),
    ],
)
def test_a_loader_without_numbers_says_why(loader: object, message: str) -> None:
    with pytest.raises(NoNumbersError, match=message):
        epochs_of(loader, 1)


@pytest.mark.long
def test_accelerates_loader_sets_its_own_epochs() -> None:
    accelerate = pytest.importorskip("accelerate")
    loader = loader_of(12, batch_size=4, shuffle=True)
    prepared = accelerate.Accelerator(cpu=True).prepare(loader)
    first, second = epochs_of(prepared, 2)
    assert sorted(first.samples) == sorted(second.samples) == list(range(12))
    assert not np.array_equal(first.samples, second.samples)
    assert torch_loader(prepared) is prepared.base_dataloader
