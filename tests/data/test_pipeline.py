from contextlib import AbstractContextManager, closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from decoding import noting, worker

from largebatch.data.index.index import Index
from largebatch.data.pipeline import open_images
from largebatch.data.types import Batch, Decode, Request, View
from largebatch.distributed.serial import Serial
from largebatch.recipe.arithmetic.plan import make_plan
from largebatch.recipe.loading import load_recipe

DIGITS = Path(__file__).parents[2] / "recipes" / "quickstart" / "digits_96.yaml"
CPU = Serial(torch.device("cpu"))


def requests(
    workers: int,
    rank: int,
    *,
    clean: bool = True,
    steps: range = range(3),
    statistics: int | None = None,
) -> list[Request]:
    """Return one worker's requests to a decoder, for training or statistics."""
    recipe = load_recipe(DIGITS, ["data.source=synthetic"])
    asked: list[Request] = []
    opened = noting(worker(recipe, workers=workers, rank=rank, device_batch=None), asked)
    list(opened.statistics(statistics) if statistics else opened.training(steps, clean=clean))
    return asked


def test_clean_images_have_the_order_of_the_augmented_ones() -> None:
    augmented, clean = (requests(1, 0, clean=clean) for clean in (False, True))
    for one, other in zip(augmented, clean, strict=True):
        np.testing.assert_array_equal(one.samples, other.samples)
    assert len({tuple(box) for request in augmented for box in request.boxes}) > 10
    assert {tuple(box) for request in clean for box in request.boxes} == {(0, 0, 32, 32)}
    assert not any(request.flips.any() for request in clean)


def test_statistics_are_measured_over_whole_spans_even_if_workers_share_them() -> None:
    """Spans of 48, trained on 24 samples a worker: the first 240 of the order, dealt out."""
    whole = requests(1, 0, statistics=240)
    assert [len(request.samples) for request in whole] == [96, 96, 48]
    expected = np.concatenate([request.samples for request in whole])
    spans = [requests(4, rank, statistics=240) for rank in range(4)]
    assert [[len(request.samples) for request in share] for share in spans] == [
        [48, 48],
        *[[48]] * 3,
    ]
    order = [spans[0][0], spans[1][0], spans[2][0], spans[3][0], spans[0][1]]
    np.testing.assert_array_equal(np.concatenate([part.samples for part in order]), expected)


def test_cached_images_are_used_in_every_stage(own_cache: None) -> None:
    def stages(*overrides: str) -> list[Batch]:
        recipe = load_recipe(DIGITS, list(overrides))
        plan = make_plan(recipe, workers=1)
        opened = open_images(recipe, plan, CPU, folder=None)
        return [
            *opened.training(range(2), clean=False),
            *opened.training(range(2), clean=True),
            *opened.validation(),
            *opened.statistics(96),
        ]

    decoded = stages("execution.decoder=torchvision")
    for kind in ("memory", "device"):
        for ours, other in zip(stages(f"execution.cache={kind}"), decoded, strict=True):
            assert torch.equal(ours.labels, other.labels)
            std = min(load_recipe(DIGITS).data.std)
            assert (ours.images - other.images).abs().max() <= 2.01 / 255 / std


def test_all_evaluations_share_one_decoder_unless_one_was_left_early() -> None:
    recipe = load_recipe(DIGITS, ["execution.decoder=torchvision"])
    pipeline = open_images(recipe, make_plan(recipe, workers=1), CPU, folder=None)
    opened: list[Index] = []

    def note(index: Index, view: View) -> AbstractContextManager[Decode]:
        opened.append(index)
        return pipeline.open_decoder(index, view)

    with closing(replace(pipeline, open_decoder=note)) as noting:
        expected = list(noting.validation())
        for again in (noting.validation(), noting.validation()):
            for batch, first in zip(again, expected, strict=True):
                assert torch.equal(batch.images, first.images)
            assert len(opened) == 1
        with closing(noting.validation()) as batches:
            next(batches)
        assert noting.idle == {}, "it has batches that nobody used"
        assert torch.equal(next(noting.validation()).images, expected[0].images)
        assert opened == [pipeline.val_index] * 2
