from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from largebatch.data.augment import (
    center_boxes,
    clean_request,
    random_boxes,
    random_flips,
)
from largebatch.data.index.index import Index
from largebatch.data.types import IntArray
from largebatch.optional import require_torchvision

INCEPTION: Any = {"area": (0.08, 1.0), "aspect": (3 / 4, 4 / 3)}


def index_of(sizes: list[tuple[int, int]]) -> Index:
    heights, widths = np.array(sizes, dtype=np.int64).T
    return Index(
        root=Path(),
        classes=("a", "b"),
        paths=tuple(f"{i}.jpg" for i in range(len(sizes))),
        labels=np.arange(len(sizes)) % 2,
        heights=heights,
        widths=widths,
    )


def same_size(number: int, height: int, width: int) -> tuple[IntArray, IntArray]:
    return np.full(number, height), np.full(number, width)


def ordered(bounds: st.SearchStrategy[float]) -> st.SearchStrategy[tuple[float, float]]:
    return st.tuples(bounds, bounds).map(lambda pair: (min(pair), max(pair)))


@given(
    sizes=st.lists(st.tuples(st.integers(1, 3000), st.integers(1, 3000)), min_size=1, max_size=8),
    area=ordered(st.floats(0.001, 1.0)),
    aspect=ordered(st.floats(0.05, 20.0)),
    seed=st.integers(0, 2**63),
    start=st.integers(0, 2**40),
)
def test_a_random_box_is_inside_its_image(
    sizes: list[tuple[int, int]],
    area: tuple[float, float],
    aspect: tuple[float, float],
    seed: int,
    start: int,
) -> None:
    heights, widths = np.array(sizes, dtype=np.int64).T
    positions = range(start, start + len(sizes))
    boxes = random_boxes(seed, positions, heights, widths, area=area, aspect=aspect)
    tops, lefts, box_heights, box_widths = boxes.T
    assert boxes.dtype == np.int64
    assert (boxes >= [0, 0, 1, 1]).all()
    assert (tops + box_heights <= heights).all()
    assert (lefts + box_widths <= widths).all()


@pytest.mark.parametrize(
    ("height", "width", "area", "aspect"),
    [
        pytest.param(375, 500, (0.08, 1.0), (3 / 4, 4 / 3), id="an ImageNet image"),
        pytest.param(8, 8, (0.3, 1.0), (3 / 4, 4 / 3), id="a digit"),
        pytest.param(300, 900, (0.4, 0.9), (2 / 3, 3 / 2), id="wide, often without a fit"),
    ],
)
def test_boxes_are_distributed_like_torchvisions(
    height: int, width: int, area: tuple[float, float], aspect: tuple[float, float]
) -> None:
    """Means of the box's area, shape and place agree within five standard errors."""
    require_torchvision()
    from torchvision.transforms import RandomResizedCrop

    number = 3000
    torch.manual_seed(0)
    image = torch.empty(1, height, width)
    theirs = np.array(
        [RandomResizedCrop.get_params(image, list(area), list(aspect)) for _ in range(number)]
    )
    sizes = same_size(number, height, width)
    ours = random_boxes(0, range(number), *sizes, area=area, aspect=aspect)

    def features(boxes: IntArray) -> list[np.ndarray]:
        tops, lefts, heights, widths = boxes.T.astype(float)
        return [heights * widths, np.log(widths / heights), heights, widths, tops, lefts]

    for mine, reference in zip(features(ours), features(theirs), strict=True):
        error = np.sqrt((mine.var() + reference.var()) / number)
        assert abs(mine.mean() - reference.mean()) < 5 * error
        assert mine.std() == pytest.approx(reference.std(), rel=0.1)


@pytest.mark.parametrize(
    ("height", "width"),
    [
        pytest.param(10, 1000, id="much too wide"),
        pytest.param(1000, 10, id="much too narrow"),
        pytest.param(101, 1000, id="odd margins"),
        pytest.param(1, 1, id="one pixel"),
    ],
)
def test_if_no_attempt_fits_the_box_is_torchvisions_central_one(height: int, width: int) -> None:
    require_torchvision()
    from torchvision.transforms import RandomResizedCrop

    limits: Any = {"area": (0.9, 1.0), "aspect": (3 / 4, 4 / 3)}
    theirs = RandomResizedCrop.get_params(
        torch.empty(1, height, width), list(limits["area"]), list(limits["aspect"])
    )
    ours = random_boxes(0, range(20), *same_size(20, height, width), **limits)
    assert (ours == theirs).all()


def test_the_augmentation_never_changes() -> None:
    boxes = random_boxes(3, range(7, 9), *same_size(2, 375, 500), **INCEPTION)
    assert boxes.tolist() == [[126, 241, 179, 163], [57, 165, 279, 280]]
    flips = random_flips(3, range(7, 19))
    assert "".join("01"[flip] for flip in flips.astype(int)) == "101000010010"


@given(
    height=st.integers(1, 4000),
    width=st.integers(1, 4000),
    image_size=st.integers(1, 300),
    margin=st.integers(0, 60),
)
def test_a_center_box_shows_the_same_as_resize_and_center_crop(
    height: int, width: int, image_size: int, margin: int
) -> None:
    """Compared in source pixels with the integers of torchvision's Resize and CenterCrop."""
    resize = image_size + margin
    short, long = min(height, width), max(height, width)
    resized_long = int(resize * long / short)
    resized = (resize, resized_long) if height <= width else (resized_long, resize)
    scales = np.array([height, width]) / resized
    corner = np.array([round((side - image_size) / 2) for side in resized]) * scales

    sizes = same_size(1, height, width)
    top, left, box_height, box_width = center_boxes(*sizes, image_size=image_size, resize=resize)[0]
    assert box_height == box_width
    assert 0 <= top <= height - box_height
    assert 0 <= left <= width - box_width
    assert abs(box_height - image_size * short / resize) <= 0.5 or box_height == 1
    assert (np.abs([top, left] - corner) <= 1 + scales).all()


def test_a_clean_request_shows_the_center_or_the_whole_and_never_flips() -> None:
    index = index_of([(300, 500), (400, 400)])
    samples = np.array([1, 0, 1])
    center = clean_request(index, samples, image_size=224, resize=256)
    whole = clean_request(index, samples, image_size=224, resize=None)
    assert center.boxes.tolist() == [[25, 25, 350, 350], [19, 119, 262, 262], [25, 25, 350, 350]]
    assert whole.boxes.tolist() == [[0, 0, 400, 400], [0, 0, 300, 500], [0, 0, 400, 400]]
    for request in (center, whole):
        assert request.samples.tolist() == [1, 0, 1]
        assert not request.flips.any()
