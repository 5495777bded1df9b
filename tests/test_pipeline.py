from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from largebatch.backends.serial import Serial
from largebatch.contracts import Batches, Request
from largebatch.data.index import Index
from largebatch.data.pipeline import open_pipeline
from largebatch.errors import DataError
from largebatch.loading import load_recipe
from largebatch.plan import make_plan

DIGITS = Path(__file__).parent.parent / "recipes" / "digits_96.yaml"
CPU = Serial(torch.device("cpu"))


def requests(workers: int, rank: int, *, clean: bool, steps: range = range(3)) -> list[Request]:
    """Return what one of several workers would ask a decoder for."""
    recipe = load_recipe(DIGITS, ["data.source=synthetic"])
    plan = make_plan(recipe, workers=workers)
    asked: list[Request] = []

    def note(_: Index, wanted: Iterable[Request]) -> Batches:
        asked.extend(wanted)
        yield from ()

    opened = open_pipeline(recipe, plan, CPU, folder=None, decoder=None)
    list(replace(opened, decode=note, rank=rank).training(steps, clean=clean))
    return asked


def test_clean_pictures_come_in_the_order_of_the_augmented_ones() -> None:
    augmented, clean = (requests(1, 0, clean=clean) for clean in (False, True))
    for one, other in zip(augmented, clean, strict=True):
        np.testing.assert_array_equal(one.samples, other.samples)
    assert len({tuple(box) for request in augmented for box in request.boxes}) > 10
    assert {tuple(box) for request in clean for box in request.boxes} == {(0, 0, 32, 32)}
    assert not any(request.flips.any() for request in clean)


@pytest.mark.parametrize("clean", [False, True])
def test_two_workers_see_together_what_one_sees(clean: bool) -> None:
    alone = requests(1, 0, clean=clean)
    shares = [requests(2, rank, clean=clean) for rank in (0, 1)]
    for step, whole in enumerate(alone):
        for field in ("samples", "boxes", "flips"):
            parts = [getattr(share[step], field) for share in shares]
            np.testing.assert_array_equal(np.concatenate(parts), getattr(whole, field))


def test_a_later_step_does_not_depend_on_where_the_run_began() -> None:
    (later,) = requests(1, 0, clean=False, steps=range(20, 21))
    np.testing.assert_array_equal(
        later.boxes, requests(1, 0, clean=False, steps=range(18, 21))[2].boxes
    )


@pytest.mark.parametrize(
    ("overrides", "folder", "decoder", "message"),
    [
        ([], Path("x"), None, "--data x would not be read: the recipe's data.source is digits"),
        (["data.source=synthetic"], None, "dali", "--decoder dali would not be used"),
    ],
)
def test_what_would_not_be_used_is_refused(
    overrides: list[str], folder: Path | None, decoder: str | None, message: str
) -> None:
    recipe = load_recipe(DIGITS, overrides)
    with pytest.raises(DataError, match=message):
        open_pipeline(recipe, make_plan(recipe, workers=1), CPU, folder=folder, decoder=decoder)
