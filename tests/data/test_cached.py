"""Cached images look like images decoded each time.

Bilinear is compared with Pillow. Bicubic is compared with torchvision's resizing of byte tensors,
since Pillow 13 resizes the height of a tall box first, where the order shows.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from decoding import augmented, open_cache, png_folder, run, run_cached, run_on_device
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from largebatch.data.augment import clean_request
from largebatch.data.decoders import crops, pixel_cache, torchvision
from largebatch.data.decoders.crops import resample
from largebatch.data.index.index import Index
from largebatch.data.types import Batches, Bytes, Request
from largebatch.errors import DataError
from largebatch.optional import require_torchvision
from largebatch.recipe.data import Interpolation

CPU = torch.device("cpu")
either_filter = pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])


FORMS = [(form, way) for form in ("one size", "small") for way in ("memory", "device")]
any_form = pytest.mark.parametrize("form", [*FORMS, ("many sizes", "memory")], indirect=True)


@pytest.fixture
def form(request: pytest.FixtureRequest, tmp_path: Path, own_cache: None) -> tuple[str, Index]:
    """Return the way of caching and the images."""
    name, way = request.param
    size = (30, 38) if name == "small" else (70, 90)
    return way, png_folder(tmp_path, one_size=name != "many sizes", size=size)


def kept_batches(way: str, index: Index, requests: list[Request], **changes: Any) -> Batches:  # noqa: ANN401 -- of any kind, as view's
    if way == "device":
        return run_on_device(index, requests, **changes)
    return run_cached(index, requests, **changes)


def on_bytes(part: Bytes, size: int, interpolation: Interpolation) -> Tensor:
    """Resize H x W x 3 as torchvision does byte tensors."""
    require_torchvision()
    from torchvision.transforms import InterpolationMode
    from torchvision.transforms.v2 import functional

    planes = torch.from_numpy(part.copy()).permute(2, 0, 1)
    mode = InterpolationMode(interpolation)
    return functional.resize(planes, [size, size], mode, antialias=True)  # type: ignore[no-any-return]


@any_form
@pytest.mark.parametrize("size", [20, 200])
def test_cached_images_match_pillow(size: int, form: tuple[str, Index]) -> None:
    way, folder = form
    clean = clean_request(folder, np.arange(13), image_size=size, resize=size + 6)
    requests = [*augmented(folder, 10, 4), clean]
    theirs = run(torchvision.open_decoder, folder, requests, image_size=size)
    for ours, other in zip(
        kept_batches(way, folder, requests, image_size=size), theirs, strict=True
    ):
        difference = (ours.images - other.images).abs()
        assert difference.max() <= 2.01  # two roundings, in another order for a tall box
        assert (difference > 1.01).float().mean() < 1e-4
        assert difference.mean() < 0.15
        assert ours.labels.tolist() == other.labels.tolist()
        assert (ours.images.dtype, ours.labels.dtype) == (torch.float32, torch.int64)
        assert ours.images.is_contiguous()


@any_form
def test_bicubic_matches_torchvision_on_bytes(form: tuple[str, Index]) -> None:
    way, folder = form
    (request,) = augmented(folder, 13, 1)
    images = open_cache(folder)
    (batch,) = kept_batches(way, folder, [request], image_size=48, interpolation="bicubic")
    for image, sample, box, flip in zip(
        batch.images, request.samples.tolist(), request.boxes.tolist(), request.flips, strict=True
    ):
        top, left, height, width = box
        part = images.image(sample)[top : top + height, left : left + width]
        expected = on_bytes(part, 48, "bicubic")
        assert (image - (expected.flip(2) if flip else expected)).abs().max() <= 1.01


@either_filter
@given(data=st.data())
def test_a_batch_is_resized_like_torchvision_resizes_single_images(
    interpolation: Interpolation, data: st.DataObject
) -> None:
    height, width, size = (data.draw(st.integers(1, 60)) for _ in range(3))
    number = data.draw(st.integers(1, 4))
    draw = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    images = draw.integers(0, 256, (number, height, width, 3), dtype=np.uint8)
    tall, wide = draw.integers(1, height + 1, number), draw.integers(1, width + 1, number)
    top, left = draw.integers(0, height - tall + 1), draw.integers(0, width - wide + 1)
    boxes, flips = np.stack([top, left, tall, wide], axis=1), draw.integers(0, 2, number) > 0
    found = resample(
        torch.from_numpy(images),
        torch.from_numpy(boxes),
        torch.from_numpy(flips),
        size=size,
        interpolation=interpolation,
    )
    assert found.shape == (number, 3, size, size)
    for resized, image, box, flip in zip(found, images, boxes.tolist(), flips, strict=True):
        part = image[box[0] : box[0] + box[2], box[1] : box[1] + box[3]]
        expected = on_bytes(part, size, interpolation)
        difference = (resized - (expected.flip(2) if flip else expected)).abs()
        assert difference.max() <= 2.01  # noise meets halves, which weights in int16 round away
        assert (difference > 1.01).sum() <= 0.002 * difference.numel() + 1


def test_a_device_resizes_a_few_images_at_a_time(
    tmp_path: Path, own_cache: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = png_folder(tmp_path / "images", one_size=True)
    requests = augmented(folder, 11, 2)
    whole = [batch.images for batch in kept_batches("device", folder, requests)]
    monkeypatch.setattr(crops, "PIXELS_AT_ONCE", 40_000)
    for a, b in zip(whole, kept_batches("device", folder, requests), strict=True):
        assert torch.equal(a, b.images)


def test_images_that_differ_in_size_are_refused_on_a_device(
    tmp_path: Path, own_cache: None
) -> None:
    with pytest.raises(DataError, match=r"execution\.cache"):
        pixel_cache.upload(open_cache(png_folder(tmp_path, one_size=False)), CPU)
