"""Translations and alternating flips: exact on any number of workers and after any decoder."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from decoding import needs_dali, png_folder, section, view
from torch import Tensor
from torch.nn import functional as F

from largebatch.data.augment import augment, random_shifts, train_request, translate
from largebatch.data.index.index import load_or_read
from largebatch.data.pipeline import open_images
from largebatch.data.types import Batch
from largebatch.distributed.serial import Serial
from largebatch.recipe.arithmetic.plan import make_plan
from largebatch.recipe.loading import load_recipe
from largebatch.recipe.recipe import Recipe

CPU = Serial(torch.device("cpu"))
MOVED = ("data.translate=2", "data.flip=alternating", "data.crop_area=null")
STILL = ("data.translate=0", "data.flip=false", "data.crop_area=null")
SMALL = ("batch={global_batch: 4, bn_span: 2}", "schedule.warmup=null", "polish=null")
MIRRORED = section(crop_area=None, flip="alternating")
SHIFTED = section(crop_area=None, flip="alternating", translate=2)


@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
def test_an_image_is_a_window_of_the_image_padded_by_reflection(order: torch.memory_format) -> None:
    images = torch.randn(25, 3, 7, 9).contiguous(memory_format=order)
    shifts = torch.cartesian_prod(torch.arange(-2, 3), torch.arange(-2, 3))
    moved = translate(images, shifts)
    padded = F.pad(images, (2, 2, 2, 2), mode="reflect")
    for number, (down, right) in enumerate(shifts.tolist()):
        window = padded[number, :, 2 - down : 9 - down, 2 - right : 11 - right]
        torch.testing.assert_close(moved[number], window, rtol=0, atol=0)
    assert moved.is_contiguous(memory_format=order)


def test_shifts_are_uniform_and_depend_on_the_position_alone() -> None:
    shifts = random_shifts(3, range(20_000), largest=2)
    for axis in shifts.T:
        values, counts = np.unique(axis, return_counts=True)
        assert values.tolist() == [-2, -1, 0, 1, 2]
        assert counts == pytest.approx(4_000, abs=300)
    assert np.corrcoef(shifts[:, 0], shifts[:, 1]).flat[1] == pytest.approx(0.0, abs=0.03)
    assert np.array_equal(random_shifts(3, range(70, 90), largest=2), shifts[70:90])


def test_flips_alternate_by_epoch_also_within_a_batch(tmp_path: Path) -> None:
    index = png_folder(tmp_path, one_size=True)
    shown: dict[int, list[bool]] = {}
    for start in range(0, 52, 4):  # 13 images: the fourth batch ends in the second epoch
        request = train_request(index, range(start, start + 4), MIRRORED, view(), seed=1)
        for sample, flip in zip(request.samples.tolist(), request.flips.tolist(), strict=True):
            shown.setdefault(sample, []).append(flip)
    assert len(shown) == 13
    assert all(flips == [flips[0], not flips[0]] * 2 for flips in shown.values())


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(["execution.decoder=dali"], id="dali", marks=needs_dali),
        pytest.param(["execution.decoder=torchvision"], id="torchvision"),
        pytest.param(["execution.cache=memory"], id="cached"),
    ],
)
def test_every_decoder_shows_the_moved_image_mirrored(settings: list[str], tmp_path: Path) -> None:
    """Against the same images, neither moved nor mirrored, and PyTorch's own padding."""
    png_folder(tmp_path, one_size=True, size=(32, 32))
    shutil.copytree(tmp_path / "train", tmp_path / "val")
    folder = ["data.source=folder", "data.classes=2", "data.image_size=32", *settings]
    sizes = ["data.train_samples=13", "data.val_samples=13"]
    recipe = load_recipe("digits_96", [*MOVED, *SMALL, *folder, *sizes])
    plain = load_recipe("digits_96", [*SMALL, *folder, *sizes, *STILL])
    moved, still = (images(each, range(8), folder=tmp_path) for each in (recipe, plain))
    index = load_or_read(tmp_path, "train")
    request = train_request(index, range(32), SHIFTED, view(), seed=recipe.seed)
    assert request.shifts is not None
    assert request.flips.any()
    for number, (flip, (down, right)) in enumerate(zip(request.flips, request.shifts, strict=True)):
        image = still[number].flip(-1) if flip else still[number]
        padded = F.pad(image, (2, 2, 2, 2), mode="reflect")
        window = padded[:, 2 - down : 34 - down, 2 - right : 34 - right]
        torch.testing.assert_close(moved[number], window, rtol=0, atol=0)


def test_what_is_left_to_apply_travels_with_the_batch(tmp_path: Path) -> None:
    index = png_folder(tmp_path, one_size=True)
    batch = Batch(torch.randn(4, 3, 9, 9), torch.arange(4))
    plain = train_request(index, range(4), MIRRORED, view(), seed=1)
    assert augment(batch, plain) is batch
    request = train_request(index, range(4), SHIFTED, view(), seed=1)
    assert request.shifts is not None
    assert request.shifts.any()
    moved = augment(batch, request)
    expected = translate(batch.images, torch.from_numpy(request.shifts))
    torch.testing.assert_close(moved.images, expected, rtol=0, atol=0)
    assert moved.labels is batch.labels


def images(
    recipe: Recipe, steps: range, *, workers: int = 1, rank: int = 0, folder: Path | None = None
) -> Tensor:
    """Return the images of one worker in these updates."""
    pipeline = open_images(recipe, make_plan(recipe, workers=workers), CPU, folder=folder)
    found = replace(pipeline, rank=rank).training(steps, clean=False)
    return torch.cat([batch.images for batch in found])
