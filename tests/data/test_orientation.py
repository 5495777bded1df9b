"""EXIF orientation: every decoder shows what Pillow's exif_transpose shows."""

import io

import numpy as np
import pytest
import torch
from decoding import Decode, both_decoders, photograph, run, run_cached
from PIL import Image, ImageOps

from largebatch.data.augment import clean_request
from largebatch.data.index.headers import measure_bytes
from largebatch.data.index.index import Index, read_folder
from largebatch.data.types import Request

ORIENTATION = 0x0112


def turned(orientation: object, form: str = "jpeg", **options: object) -> bytes:
    """An image of 90 x 140 stored pixels."""
    exif, buffer = Image.Exif(), io.BytesIO()
    exif[ORIENTATION] = orientation
    image = Image.fromarray(photograph(90, 140))
    image.save(buffer, format=form, exif=exif, **options)
    return buffer.getvalue()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Index:
    """All orientations as JPEG, and one as PNG."""
    root = tmp_path_factory.mktemp("turned")
    for split in ("train", "val"):
        (root / split / "a").mkdir(parents=True)
    for orientation in range(1, 9):
        content = turned(orientation, quality=95, subsampling=0)
        (root / f"train/a/{orientation}.jpg").write_bytes(content)
    (root / "train/a/9.png").write_bytes(turned(6, "png"))
    (root / "val/a/0.png").write_bytes(turned(1, "png"))
    return read_folder(root, "train")


def seen(index: Index, sample: int) -> Image.Image:
    with Image.open(index.locate(sample).path) as image:
        found: Image.Image = ImageOps.exif_transpose(image).convert("RGB")
    return found


def test_the_index_lists_displayed_sizes(folder: Index) -> None:
    assert folder.orientations is not None
    assert folder.orientations.tolist() == [*range(1, 9), 6]
    sizes = [seen(folder, sample).size for sample in range(len(folder))]
    assert list(zip(folder.widths.tolist(), folder.heights.tolist(), strict=True)) == sizes


@both_decoders
def test_boxes_are_those_of_the_displayed_image(decode: Decode, folder: Index) -> None:
    """No box is resized, so nothing but decoding can differ; half of them are flipped."""
    number = len(folder)
    boxes = np.tile([11, 23, 64, 64], (number, 1))
    for flip in (False, True):
        request = Request(np.arange(number), boxes, np.full(number, flip))
        (batch,) = run(decode, folder, [request], image_size=64)
        for sample in range(number):
            expected = np.asarray(seen(folder, sample))[11:75, 23:87]
            expected = expected[:, ::-1] if flip else expected
            found = batch.images[sample].permute(1, 2, 0).round().numpy()
            assert np.abs(found - expected).max() <= 1, folder.paths[sample]


def test_cached_pixels_are_the_displayed_ones(folder: Index, own_cache: None) -> None:
    request = clean_request(folder, np.arange(len(folder)), image_size=90, resize=90)
    (batch,) = run_cached(folder, [request], image_size=90)
    for sample, box in enumerate(request.boxes.tolist()):
        top, left, height, width = box
        expected = np.asarray(seen(folder, sample))[top : top + height, left : left + width]
        found = batch.images[sample].permute(1, 2, 0)
        assert torch.equal(found.round().to(torch.uint8), torch.from_numpy(expected.copy()))


@pytest.mark.filterwarnings("ignore")
def test_damaged_exif_is_ignored() -> None:
    content = turned(6)
    place = content.index(b"Exif\0\0")
    for length in range(8, 28):
        damaged = content[: place + 6] + b"\xff" * length + content[place + 6 + length :]
        assert measure_bytes(damaged)[:3] in {(90, 140, 1), (140, 90, 6)}
