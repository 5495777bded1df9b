"""The decoders: what they share, and how far DALI may differ from Pillow.

Decoding agrees to the bit: JPEG with every chroma layout, grey, palette, CMYK, alpha. Resizing does
not. Pillow rounds to bytes between its two passes, DALI does not: one step of 255. And where a
shrinking filter hangs over the edge of the box, Pillow weighs the pixels that are there, DALI
repeats the outermost one: up to 19 steps in the outermost row or column of a real photograph.
"""

import gc
import importlib.util
import os
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from largebatch.contracts import Batch, Batches, Request
from largebatch.data import clean_request, dali, synthetic, torchvision, train_request
from largebatch.data.digits import write_digits
from largebatch.data.index import Index, read_folder
from largebatch.errors import MissingPackageError

Decode = Callable[..., Batches]

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
INCEPTION: dict[str, Any] = {"area": (0.08, 1.0), "aspect": (3 / 4, 4 / 3)}

has_dali = importlib.util.find_spec("nvidia") and importlib.util.find_spec("nvidia.dali")
needs_dali = pytest.mark.skipif(not has_dali, reason="NVIDIA DALI is not installed")
both_decoders = pytest.mark.parametrize(
    "decode",
    [
        pytest.param(dali.decode, id="dali", marks=needs_dali),
        pytest.param(torchvision.decode, id="torchvision"),
    ],
)


def photograph(height: int, width: int) -> np.ndarray:
    """Smooth colours, a hard edge and some noise."""
    y, x = np.mgrid[:height, :width]
    waves = [127 + 90 * np.sin(x / (9 + c) + c) * np.cos(y / (13 - c)) for c in range(3)]
    pixels = np.stack(waves, axis=-1) + np.random.default_rng(0).normal(0, 6, (height, width, 3))
    pixels[height // 3 : height // 2, width // 4 :] = 250
    return pixels.clip(0, 255).round().astype(np.uint8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Index:
    """One picture of each kind that image folders hold, larger than 128 x 128."""
    root = tmp_path_factory.mktemp("pictures")
    for label in ("a", "b"):
        (root / "train" / label).mkdir(parents=True)
    rgb = Image.fromarray(photograph(375, 500))
    tall = Image.fromarray(photograph(431, 229))
    grey = rgb.convert("L")
    alpha = rgb.copy()
    alpha.putalpha(grey)
    turned = Image.Exif()
    turned[0x0112] = 6
    first, second = root / "train/a", root / "train/b"
    rgb.save(first / "4-4-4.jpg", quality=92, subsampling=0)
    rgb.save(first / "4-2-0.jpg", quality=92, subsampling=2)
    tall.save(first / "4-2-2 progressive.JPEG", quality=92, subsampling=1, progressive=True)
    grey.save(first / "grey.jpg")
    rgb.convert("CMYK").save(first / "cmyk.jpg")
    rgb.save(first / "turned.jpg", exif=turned)
    tall.save(first / "rgb.png")
    grey.save(second / "grey.png")
    grey.convert("1").save(second / "black and white.png")
    rgb.convert("P").save(second / "palette.png")
    alpha.save(second / "alpha.png")
    alpha.convert("LA").save(second / "grey with alpha.png")
    rgb.save(second / "rgb.webp")
    rgb.save(second / "rgb.tif")
    rgb.save(second / "rgb.bmp")
    grey.save(second / "grey.pgm")
    tall.save(second / "tall é ✓.ppm")
    return read_folder(root, "train")


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Index:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        return read_folder(write_digits(), "val")


def run(decode: Decode, index: Index, requests: Any, **changes: Any) -> Batches:
    arguments: dict[str, Any] = {
        "image_size": 128,
        "mean": (0.0, 0.0, 0.0),
        "std": (1 / 255, 1 / 255, 1 / 255),
        "device": torch.device("cpu"),
        "threads": 2,
        "batch_size": 64,
    }
    return decode(index, iter(requests), **(arguments | changes))


def augmented(index: Index, size: int, number: int, *, seed: int = 0) -> list[Request]:
    return [
        train_request(
            index, range(n * size, (n + 1) * size), seed=seed, flip=True, **INCEPTION
        )
        for n in range(number)
    ]


def one_by_one(index: Index, box: tuple[int, int, int, int]) -> list[Request]:
    no_flip = np.zeros(1, dtype=np.bool_)
    return [
        Request(samples=np.array([n]), boxes=np.array([box]), flips=no_flip)
        for n in range(len(index))
    ]


def by_hand(index: Index, request: Request, image_size: int) -> Tensor:
    pictures = []
    for sample, (top, left, height, width), flip in zip(
        request.samples, request.boxes.tolist(), request.flips, strict=True
    ):
        with Image.open(index.root / index.paths[sample]) as image:
            part = image.convert("RGB").crop((left, top, left + width, top + height))
        part = part.resize((image_size, image_size), Image.Resampling.BILINEAR)
        pixels = np.asarray(part)
        pictures.append(pixels[:, ::-1] if flip else pixels)
    scaled = torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2).double() / 255
    mean, std = (torch.tensor(x, dtype=torch.float64).view(3, 1, 1) for x in (MEAN, STD))
    return (scaled - mean) / std


def test_torchvision_gives_what_pillow_gives_by_hand(folder: Index) -> None:
    requests = augmented(folder, 17, 3)
    batches = list(run(torchvision.decode, folder, requests, mean=MEAN, std=STD))
    for batch, request in zip(batches, requests, strict=True):
        expected = by_hand(folder, request, 128).float()
        torch.testing.assert_close(batch.images, expected, rtol=0, atol=2e-6)


@both_decoders
def test_pixels_that_are_not_resized_are_exact_for_every_kind_of_picture(
    decode: Decode, folder: Index
) -> None:
    """The box is away from the edges and of odd offset, so JPEG chroma is cut between samples."""
    requests = one_by_one(folder, (101, 53, 128, 128))
    for sample, batch in enumerate(run(decode, folder, requests)):
        with Image.open(folder.root / folder.paths[sample]) as image:
            expected = np.asarray(image.convert("RGB"))[101:229, 53:181]
        found = batch.images[0].permute(1, 2, 0).round().to(torch.uint8).numpy()
        assert (found == expected).all(), folder.paths[sample]


@both_decoders
def test_batches_answer_the_requests_in_order(decode: Decode, folder: Index) -> None:
    requests = augmented(folder, 5, 6)
    last = requests.pop()
    requests.append(Request(last.samples[:2], last.boxes[:2], last.flips[:2]))
    batches = list(run(decode, folder, requests, mean=MEAN, std=STD))
    assert [len(batch.labels) for batch in batches] == [5, 5, 5, 5, 5, 2]
    for batch, request in zip(batches, requests, strict=True):
        assert batch.labels.dtype == torch.int64
        assert batch.labels.tolist() == folder.labels[request.samples].tolist()
        assert batch.images.dtype == torch.float32
        assert batch.images.shape == (len(request.samples), 3, 128, 128)
        assert batch.images.is_contiguous()
        expected = by_hand(folder, request, 128).float()
        assert (batch.images - expected).abs().mean() < 0.01


@both_decoders
def test_a_batch_stays_as_it_was_while_others_come(decode: Decode, folder: Index) -> None:
    requests = augmented(folder, 5, 6)
    copies = [batch.images.clone() for batch in run(decode, folder, requests)]
    kept = [batch.images for batch in run(decode, folder, requests)]
    for copy, images in zip(copies, kept, strict=True):
        assert torch.equal(copy, images)


@both_decoders
def test_a_flip_is_the_mirror_image(decode: Decode, folder: Index) -> None:
    request = augmented(folder, 17, 1)[0]
    all_flipped, none_flipped = (
        Request(request.samples, request.boxes, np.full(17, flip)) for flip in (True, False)
    )
    flipped, plain = run(decode, folder, [all_flipped, none_flipped])
    assert torch.equal(flipped.images.flip(3), plain.images)


@needs_dali
def test_the_decoders_agree_on_the_digits(digits: Index) -> None:
    """Enlarged, no filter hangs over an edge."""
    requests = augmented(digits, 40, 4) + [
        clean_request(digits, np.arange(40), image_size=28, resize=None)
    ]
    for theirs, ours in both(digits, requests, image_size=28):
        assert (theirs.images - ours.images).abs().max() <= 1.01


@needs_dali
def test_the_decoders_agree_on_pictures_of_every_kind(folder: Index) -> None:
    assert_alike(folder, augmented(folder, 17, 4))


@needs_dali
def test_the_decoders_agree_on_real_photographs(real_data: Path, tmp_path: Path) -> None:
    (tmp_path / "train/any").mkdir(parents=True)
    with zipfile.ZipFile(real_data / "imagenet_samples/samples.zip") as samples:
        for name in samples.namelist()[::5]:
            (tmp_path / "train/any" / Path(name).name).write_bytes(samples.read(name))
    index = read_folder(tmp_path, "train")
    assert len(index) == 20
    clean = clean_request(index, np.arange(20), image_size=224, resize=256)
    assert_alike(index, [*augmented(index, 20, 2), clean], image_size=224)


def both(index: Index, requests: list[Request], **changes: Any) -> Iterator[tuple[Batch, Batch]]:
    """Decode with DALI and with torchvision."""
    pairs = [run(decode, index, requests, **changes) for decode in (dali.decode, torchvision.decode)]
    return zip(*pairs, strict=True)


def assert_alike(index: Index, requests: list[Request], **changes: Any) -> None:
    """Compare in steps of 255: two roundings inside, the filter's edge on the outermost pixels."""
    for theirs, ours in both(index, requests, **changes):
        difference = (theirs.images - ours.images).abs()
        assert difference[:, :, 1:-1, 1:-1].max() <= 2.01
        assert difference.max() <= 32
        assert difference.mean() <= 0.25
