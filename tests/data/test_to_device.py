"""Transfer of a batch to the device. For a real GPU see tests/test_cuda.py."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerator
import pytest
import torch
from decoding import (
    Decode,
    augmented,
    both_decoders,
    png_folder,
    run,
    run_cached,
    run_on_device,
)
from on_forked_workers import on_forked_workers
from torch import Tensor

from largebatch.data.decoders import torchvision
from largebatch.data.decoders.prefetch import Transfer
from largebatch.data.index.index import Index
from largebatch.data.types import Batch, Batches

IMAGENET: dict[str, Any] = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}


@pytest.fixture
def folder(tmp_path: Path, own_cache: None) -> Index:
    return png_folder(tmp_path, one_size=False)


def assert_same(ours: Batches, other: Batches) -> None:
    for one, expected in zip(ours, other, strict=True):
        assert torch.equal(one.images, expected.images)
        assert torch.equal(one.labels, expected.labels)


@pytest.mark.parametrize("way", ["decoded", "cached"])
def test_images_are_sent_once_as_bytes_with_their_labels(
    way: str, folder: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To a device that is not there, and yet the numbers are those of a CPU to the last bit."""
    requests, real = augmented(folder, 5, 4), Transfer.send
    sent: list[list[Tensor]] = []

    def note(transfer: Transfer, *tensors: Tensor) -> list[Tensor]:
        sent.append(list(tensors))
        return real(transfer, *tensors)

    def decoded() -> Batches:
        if way == "cached":
            return run_cached(folder, requests, **IMAGENET)
        return run(torchvision.open_decoder, folder, requests, **IMAGENET)

    expected = list(decoded())
    monkeypatch.setattr(Transfer, "is_remote", property(lambda _: True))
    monkeypatch.setattr(Transfer, "send", note)
    found = list(decoded())
    assert_same(iter_batches(found), iter_batches(expected))
    _, *batches = sent  # mean and deviation come first
    assert len(batches) == len(requests)
    for images, labels in batches:
        assert (images.dtype, labels.dtype) == (torch.uint8, torch.int64)
        assert images.is_contiguous(memory_format=torch.channels_last)


def sent() -> dict[str, int]:
    transfer = Transfer(accelerator.simulate())
    images, labels = transfer.room(4, 8, 8, 3), torch.arange(4)
    transfer.send(images, labels)
    return accelerator.COUNTS.totals()


def test_a_batch_is_sent_while_the_last_update_runs() -> None:
    """The default stream, in which updates are, launches nothing, and the host does not wait."""
    found = on_forked_workers(sent, workers=1)
    assert (found["transfers"], found["aside"]) == (2, 2)
    assert found["launches"] == found["syncs"] == found["pageable"] == 0


def iter_batches(batches: list[Batch]) -> Batches:
    yield from batches


@both_decoders
def test_decoders_return_the_same_values_in_the_models_memory_format(
    decode: Decode, folder: Index
) -> None:
    assert_reordered(lambda **changes: run(decode, folder, augmented(folder, 5, 4), **changes))


def test_cached_pixels_are_returned_in_the_models_memory_format(tmp_path: Path) -> None:
    folder = png_folder(tmp_path, one_size=True)
    requests = augmented(folder, 5, 4)
    assert_reordered(lambda **changes: run_cached(folder, requests, **changes))
    assert_reordered(lambda **changes: run_on_device(folder, requests, **changes))


def assert_reordered(batches: Callable[..., Batches]) -> None:
    for ours, other in zip(
        batches(channels_last=True, **IMAGENET), batches(**IMAGENET), strict=True
    ):
        assert torch.equal(ours.images, other.images)
        assert ours.images.is_contiguous(memory_format=torch.channels_last)
        assert other.images.is_contiguous()
