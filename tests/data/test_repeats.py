"""Repeated augmentation: which images follow, how often, and beside which others."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from decoding import assert_is_part

from largebatch.data.order import occurrences_at, sample_ids, samples_at, unrepeated
from largebatch.data.pipeline import Pipeline, open_images
from largebatch.distributed.serial import Serial
from largebatch.errors import RecipeError
from largebatch.recipe.arithmetic.plan import make_plan
from largebatch.recipe.loading import load_recipe

DIGITS = ("data.repeats=3", "data.flip=true", "data.crop_area=[0.3, 1]")


def opened(*changes: str, workers: int = 1, rank: int = 0) -> Pipeline:
    recipe = load_recipe("digits_96", [*DIGITS, *changes])
    plan = make_plan(recipe, workers=workers)
    return replace(open_images(recipe, plan, Serial(), folder=None), rank=rank)


@pytest.mark.parametrize("repeats", [2, 3, 6, 10])
@pytest.mark.parametrize("num_samples", [64, 66, 127, 128, 193, 210])
def test_no_pair_recurs_and_no_sample_is_its_own_partner(num_samples: int, repeats: int) -> None:
    """All neighbours of a pass: with an odd number of samples, partners begin at odd places too."""
    whole = range(num_samples * repeats)
    samples = samples_at(whole, seed=2, num_samples=num_samples, trained=None, repeats=repeats)
    pairs = Counter(frozenset(pair) for pair in pairwise(samples.tolist()))
    assert max(pairs.values()) == 1
    assert all(len(pair) == 2 for pair in pairs)


def test_copies_of_a_block_follow_each_other_and_an_epoch_has_a_third_of_the_images() -> None:
    """Against the order without repeats: 64 images, three times; the last block has the rest."""
    order = sample_ids(range(200), seed=5, num_samples=200).tolist()
    blocks = [order[:64], order[64:128], order[128:]]
    samples = samples_at(range(600), seed=5, num_samples=200, trained=None, repeats=3).tolist()
    start = 0
    for block in blocks:
        for _ in range(3):
            assert sorted(samples[start : start + len(block)]) == sorted(block)
            start += len(block)
        assert samples[start - 3 * len(block) :][: len(block)] == block  # the first in order
    for first_epoch in (0, 3, 6):
        epochs = range(200 * first_epoch, 200 * (first_epoch + 3))
        three = samples_at(epochs, seed=5, num_samples=200, trained=None, repeats=3)
        assert np.bincount(three, minlength=200).tolist() == [3] * 200


def test_an_update_of_2048_has_about_683_images_three_times() -> None:
    for update in range(20):
        positions = range(2048 * update, 2048 * (update + 1))
        samples = samples_at(positions, seed=0, num_samples=1_281_167, trained=None, repeats=3)
        occurrences = Counter(Counter(samples.tolist()).values())
        assert occurrences[3] == 640
        # The blocks at both ends are shared with the updates before and after.
        assert sum(occurrences.values()) in {704, 768}


def test_a_range_of_positions_has_the_same_samples_as_the_whole_run() -> None:
    """Also from another start, across blocks, copies and passes, and from chosen samples."""
    trained = np.arange(100, 271)
    whole = samples_at(range(1200), seed=1, num_samples=300, trained=trained, repeats=3)
    assert set(whole.tolist()) == set(trained.tolist())
    for start in range(0, 1200, 50):
        positions = range(start, start + 50)
        part = samples_at(positions, seed=1, num_samples=300, trained=trained, repeats=3)
        assert np.array_equal(part, whole[positions.start : positions.stop])
    assert len(samples_at(range(9, 9), seed=1, num_samples=300, trained=None, repeats=3)) == 0


def test_one_repeat_is_the_plain_order() -> None:
    sources, copies = unrepeated(range(5, 25), num_samples=10, repeats=1)
    assert sources.tolist() == list(range(5, 25))
    assert not copies.any()


def test_occurrences_count_the_same_image_and_alternating_flips_follow_them() -> None:
    pipeline = opened("data.flip=alternating")
    index = pipeline.train_index
    positions = range(4 * len(index))
    request = pipeline.training_request(positions, clean=False)
    occurrences = occurrences_at(positions, num_samples=len(index), repeats=3)
    shown: dict[int, list[bool]] = {}
    columns = zip(request.samples, request.flips, occurrences, strict=True)
    for sample, flip, occurrence in columns:
        before = shown.setdefault(int(sample), [])
        assert occurrence == len(before)
        before.append(bool(flip))
    for flips in shown.values():
        assert all(first != second for first, second in pairwise(flips))


def test_copies_have_other_crops() -> None:
    pipeline = opened()
    request = pipeline.training_request(range(192), clean=False)
    for sample in request.samples[:64]:
        boxes = request.boxes[request.samples == sample]
        assert len(np.unique(boxes, axis=0)) > 1


def test_clean_updates_and_statistics_have_every_image_once() -> None:
    """Copies of an image that is not augmented would be equal."""
    pipeline = opened()
    number = len(pipeline.train_index)
    once = pipeline.training_request(range(number, 2 * number), clean=True).samples
    assert sorted(once.tolist()) == list(range(number))
    labels = torch.cat([batch.labels for batch in pipeline.statistics(number)])
    expected = torch.bincount(torch.from_numpy(pipeline.train_index.labels))
    assert torch.equal(torch.bincount(labels), expected)
    plain = sample_ids(range(number), seed=pipeline.seed, num_samples=number)
    assert np.array_equal(pipeline.training_samples(range(number)), plain)


@pytest.mark.parametrize("workers", [2, 3])
def test_workers_share_the_positions_of_one(workers: int) -> None:
    """A batch of 96 is not a multiple of three copies of 64."""
    (alone,) = opened().training(range(1), clean=False)
    for rank in range(workers):
        pipeline = opened(workers=workers, rank=rank)
        assert_is_part(pipeline, alone)


def test_what_repeats_cannot_be_is_refused() -> None:
    small = ["data.train_samples=63", "polish=null"]
    with pytest.raises(RecipeError, match=r"data\.repeats"):
        load_recipe("digits_96", [*DIGITS, *small])
    with pytest.raises(RecipeError, match=r"data\.repeats"):
        load_recipe("digits_96", ["data.repeats=11"])
    with pytest.raises(RecipeError, match=r"monitor: noise_scale .* data\.repeats"):
        load_recipe("digits_96", [*DIGITS, "monitor=noise_scale"])


def test_held_out_images_are_not_repeated() -> None:
    pipeline = opened("data.held_out.samples=200", "polish=null")
    trained = pipeline.train_index.trained
    assert trained is not None
    positions = range(3 * len(trained))
    request = pipeline.training_request(positions, clean=False)
    assert set(request.samples.tolist()) == set(trained.tolist())
