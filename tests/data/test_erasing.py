"""Random erasing: the boxes of timm and torchvision, and noise that any device computes alike."""

import random
from dataclasses import replace
from typing import Any

import accelerator
import numpy as np
import plain_augment
import pytest
import torch
from on_forked_workers import on_forked_workers
from scipy import stats

from largebatch.data.augment import augment
from largebatch.data.erasing import boxes_in_pixels, draw_erasures, erase, noise
from largebatch.data.order import Stream, random_words
from largebatch.data.pipeline import open_images
from largebatch.data.types import Batch, BoolArray, Erasures, FloatArray, IntArray
from largebatch.distributed.serial import Serial
from largebatch.errors import RecipeError
from largebatch.optional import require_torchvision
from largebatch.recipe.arithmetic.plan import make_plan
from largebatch.recipe.data import Erase
from largebatch.recipe.loading import load_recipe

DRAWS = 20_000
SIDE = 224
NOISY = Erase(probability=0.7, fill="noise", count=3)
PLAIN = Erase(probability=0.25, fill="constant")


def masks(erasures: Erasures, *, num_images: int, side: int) -> BoolArray:
    """Return True for every pixel that is erased, N x S x S, one box after the other."""
    erased = np.zeros((num_images, side, side), dtype=np.bool_)
    boxes = boxes_in_pixels(erasures.boxes, side=side).tolist()
    for row, (top, left, height, width) in zip(erasures.rows.tolist(), boxes, strict=True):
        erased[row, top : top + height, left : left + width] = True
    return erased


@pytest.mark.parametrize("settings", [PLAIN, NOISY], ids=["constant", "noise"])
@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
def test_a_box_has_the_mean_colour_or_noise_and_other_pixels_are_untouched(
    settings: Erase, order: torch.memory_format
) -> None:
    positions = range(100, 116)
    images = torch.randn(16, 3, 8, 8).contiguous(memory_format=order)
    before = images.clone()
    erasures = draw_erasures(3, positions, settings)
    assert len(erasures.rows) > 0
    result = erase(images, erasures)
    assert result is images
    assert result.is_contiguous(memory_format=order)
    erased = masks(erasures, num_images=16, side=8)
    expected = before.clone()
    for row, y, x in np.argwhere(erased).tolist():
        values = [0.0] * 3
        if settings.fill == "noise":
            values = plain_augment.noise(3, positions[row], 8 * y + x)
        expected[row, :, y, x] = torch.tensor(values)
    torch.testing.assert_close(result, expected, rtol=1e-6, atol=1e-6)


def test_half_precision_is_rounded_once() -> None:
    erasures = draw_erasures(3, range(16), NOISY)
    exact = erase(torch.zeros(16, 3, 24, 24), erasures)
    for dtype in (torch.bfloat16, torch.float16):
        rounded = erase(torch.zeros(16, 3, 24, 24, dtype=dtype), erasures)
        assert torch.equal(rounded, exact.to(dtype))


@pytest.mark.parametrize("settings", [PLAIN, NOISY], ids=["constant", "noise"])
def test_an_image_is_erased_alike_in_any_batch(settings: Erase) -> None:
    """So workers and micro-batches, which divide the positions, see the same images."""
    images = torch.randn(60, 3, 12, 12)
    whole = erase(images.clone(), draw_erasures(9, range(60), settings))
    for size in (1, 7, 20):
        for start in range(0, 60, size):
            positions = range(start, min(start + size, 60))
            part = erase(
                images[start : positions.stop].clone(), draw_erasures(9, positions, settings)
            )
            assert torch.equal(part, whole[start : positions.stop])


def test_a_box_follows_the_size_of_the_image() -> None:
    erasures = draw_erasures(1, range(200), PLAIN)
    small = boxes_in_pixels(erasures.boxes, side=64)
    large = boxes_in_pixels(erasures.boxes, side=256)
    assert np.abs(4 * small - large).max() <= 8
    tiny = boxes_in_pixels(np.array([[0.999, 0.01, 0.99, 0.99]]), side=4)
    assert tiny.tolist() == [[1, 4, 3, 0]]


def assert_equal_shares(ours: FloatArray, theirs: FloatArray) -> None:
    """Compare two samples in ten parts that are equally frequent in both together."""
    edges = np.unique(np.quantile(np.concatenate([ours, theirs]), np.linspace(0, 1, 11)))
    counts = [np.histogram(values, edges)[0] for values in (ours, theirs)]
    assert stats.chi2_contingency(counts).pvalue > 0.01


def measures(boxes: IntArray) -> tuple[FloatArray, ...]:
    """Return area, shape and place of boxes: top, left, height and width in pixels."""
    tops, lefts, heights, widths = boxes.astype(np.float64).T
    return heights * widths, heights / widths, tops / (SIDE - heights), lefts / (SIDE - widths)


def assert_same_boxes(settings: Erase, theirs: IntArray) -> None:
    ours = boxes_in_pixels(draw_erasures(5, range(DRAWS), settings).boxes, side=SIDE)
    for our_values, their_values in zip(measures(ours), measures(theirs), strict=True):
        assert_equal_shares(our_values, their_values)


class Recorder:
    """Stands for an image, and records the boxes that timm fills."""

    def __init__(self) -> None:
        self.boxes: list[tuple[int, int, int, int]] = []

    def __setitem__(self, key: tuple[slice, slice, slice], fill: object) -> None:
        _, rows, columns = key
        height = rows.stop - rows.start
        width = columns.stop - columns.start
        self.boxes.append((rows.start, columns.start, height, width))


@pytest.mark.parametrize("count", [1, 3])
def test_boxes_are_distributed_as_timms(count: int) -> None:
    """Also how many there are in an image, of which several share the area."""
    require_torchvision()  # imported by timm
    from timm.data.random_erasing import RandomErasing

    random.seed(0)
    recorder = Recorder()
    erasing = RandomErasing(probability=0.7, max_count=count, device="cpu")
    numbers = []
    for _ in range(DRAWS):
        before = len(recorder.boxes)
        erasing._erase(recorder, 1, SIDE, SIDE, torch.float32)
        numbers.append(len(recorder.boxes) - before)
    settings = Erase(probability=0.7, fill="constant", count=count)
    rows = draw_erasures(5, range(DRAWS), settings).rows
    counts = [np.bincount(numbers), np.bincount(np.bincount(rows, minlength=DRAWS))]
    assert len(counts[0]) == len(counts[1]) == count + 1
    assert stats.chi2_contingency(counts).pvalue > 0.01
    assert_same_boxes(settings, np.array(recorder.boxes))


def test_boxes_are_distributed_as_torchvisions() -> None:
    draw = require_torchvision().transforms.RandomErasing.get_params
    torch.manual_seed(0)
    image = torch.empty(1).expand(1, SIDE, SIDE)
    boxes = [draw(image, (0.02, 0.33), (0.3, 3.3), [0.0])[:4] for _ in range(DRAWS)]
    settings = Erase(probability=1, fill="constant", area=(0.02, 0.33), aspect=(0.3, 3.3))
    assert_same_boxes(settings, np.array(boxes))


def test_noise_is_normal_and_independent_of_pixel_channel_and_image() -> None:
    keys = random_words(0, Stream.ERASE_NOISE, block=0, num_blocks=8)[:, 0]
    pixel = torch.arange(50_000)
    values = []
    for key in keys.tolist():
        first = torch.full_like(pixel, key % 2**32)
        second = torch.full_like(pixel, key >> 32)
        values.append(noise(first, second, pixel=pixel))
    drawn = torch.stack(values).double().numpy()  # image x pixel x channel
    assert stats.kstest(drawn.ravel()[::40], stats.norm.cdf).pvalue > 0.01
    edges = stats.norm.ppf(np.linspace(0, 1, 65))
    for channel in range(3):
        counts = np.histogram(drawn[:, :, channel], edges)[0]
        assert stats.chisquare(counts).pvalue > 0.01
    assert drawn.std() == pytest.approx(1, abs=0.003)
    # Each of these is within 5 deviations of zero if independent: 400,000 pairs and more.
    pairs = {
        "neighbours": (drawn[:, 1:], drawn[:, :-1]),
        "rows": (drawn[:, 224:], drawn[:, :-224]),
        "a power of two apart": (drawn[:, 1024:], drawn[:, :-1024]),
        "channels": (drawn[..., 1:], drawn[..., :-1]),
        "images": (drawn[1:], drawn[:-1]),
    }
    for name, (left, right) in pairs.items():
        for power in (1, 2):  # squares: also their sizes are unrelated
            related = np.corrcoef(left.ravel() ** power, right.ravel() ** power)[0, 1]
            assert abs(related) < 5 / np.sqrt(left.size), name


def test_a_run_erases_training_images_only() -> None:
    changes = ["data.erase={probability: 1, fill: constant}", "data.crop_area=null"]
    recipe = load_recipe("digits_96", changes)
    erased = open_images(recipe, make_plan(recipe, workers=1), Serial(), folder=None)
    plain = replace(erased, data=recipe.data.model_copy(update={"erase": None}))
    (images, labels), (whole, same_labels) = (
        next(pipeline.training(range(1), clean=False)) for pipeline in (erased, plain)
    )
    assert torch.equal(labels, same_labels)
    request = erased.training_request(range(len(images)), clean=False)
    assert request.erasures is not None
    erased_pixels = masks(request.erasures, num_images=len(images), side=images.shape[3])
    where = torch.from_numpy(erased_pixels)[:, None]
    assert torch.equal(images, whole.masked_fill(where, 0.0))
    for clean in (
        erased.training_request(range(4), clean=True),
        erased.clean_request(erased.val_index, np.arange(4)),
    ):
        assert clean.erasures is None


def _erase_there() -> tuple[bool, int, int]:
    device = accelerator.simulate()
    request = _request()
    images = torch.randn(8, 3, 16, 16)
    there = Batch(images.to(device), torch.arange(8).to(device))
    augment(there, request)  # copies the table of the noise; the second time changes nothing
    accelerator.COUNTS.clear()
    result = augment(there, request).images
    syncs = sum(accelerator.COUNTS.syncs.values())
    pageable = sum(accelerator.COUNTS.pageable.values())
    expected = augment(Batch(images, torch.arange(8)), request).images
    return torch.equal(result.cpu(), expected), syncs, pageable


def _request() -> Any:  # noqa: ANN401 -- only its erasures matter
    recipe = load_recipe("digits_96", ["data.erase={probability: 1, fill: noise, count: 2}"])
    pipeline = open_images(recipe, make_plan(recipe, workers=1), Serial(), folder=None)
    return pipeline.training_request(range(8), clean=False)


@pytest.mark.long  # a process of its own
def test_on_a_device_the_pixels_are_the_same_and_the_host_does_not_wait() -> None:
    assert on_forked_workers(_erase_there, workers=1) == (True, 0, 0)


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ("data.erase={probability: 0, fill: noise}", "data.erase.probability"),
        ("data.erase={probability: 1.5, fill: noise}", "data.erase.probability"),
        ("data.erase={fill: noise}", "data.erase.probability"),
        ("data.erase={probability: 0.5, fill: black}", "data.erase.fill"),
        ("data.erase={probability: 0.5, fill: noise, area: [0.3, 0.2]}", "erase.area"),
        ("data.erase={probability: 0.5, fill: noise, area: [0.3, 1.2]}", "data.erase.area"),
        ("data.erase={probability: 0.5, fill: noise, aspect: [3, 0.3]}", "erase.aspect"),
        ("data.erase={probability: 0.5, fill: noise, count: 0}", "data.erase.count"),
        ("data.erase={probability: 1, fill: noise, area: [1, 1]}", "data.erase: area"),
        (
            "data.erase={probability: 1, fill: noise, area: [0.5, 1], aspect: [2.5, 9]}",
            "data.erase: area",
        ),
    ],
)
def test_a_bad_setting_is_refused_with_its_key(change: str, key: str) -> None:
    with pytest.raises(RecipeError, match=key):
        load_recipe("digits_96", [change])
