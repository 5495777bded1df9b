"""The order of `data.order`: chunks of consecutive samples, shuffled within windows of chunks."""

import math
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from decoding import assert_is_part
from hypothesis import given, settings
from hypothesis import strategies as st

from largebatch.cli.main import DONE, USER, main
from largebatch.data.images import Images, read_images
from largebatch.data.order import sample_ids, samples_at, unrepeated
from largebatch.data.pipeline import Pipeline, open_images
from largebatch.data.types import IntArray
from largebatch.distributed.serial import Serial
from largebatch.errors import DataError, RecipeError
from largebatch.recipe.arithmetic.plan import make_plan
from largebatch.recipe.data import Order
from largebatch.recipe.loading import load_recipe

orders = st.builds(Order, chunk=st.integers(1, 20), window=st.integers(1, 6))
seeds = st.integers(0, 2**63)


def opened(*changes: str, workers: int = 1, rank: int = 0) -> Pipeline:
    recipe = load_recipe("digits_96", ["data.order={chunk: 32, window: 4}", *changes])
    plan = make_plan(recipe, workers=workers)
    return replace(open_images(recipe, plan, Serial(), folder=None), rank=rank)


def words(seed: int, stream: int, epoch: int, number: int) -> list[int]:
    """Philox's words by NumPy: the key is the seed and the purpose, the counter has the epoch."""
    key = np.array([seed, stream], dtype=np.uint64)
    philox = np.random.Philox(key=key, counter=np.array([0, epoch, 0, 0], dtype=np.uint64))
    return [int(word) for word in philox.random_raw(number)]


def transcribed(seed: int, epoch: int, num_samples: int, chunk: int, window: int) -> list[int]:
    """Return the order of an epoch by lists: chunks at random, then the samples of each window."""
    chunks = [
        [*range(start, min(start + chunk, num_samples))] for start in range(0, num_samples, chunk)
    ]
    of_chunks = words(seed, 16, epoch, len(chunks))
    numbers = sorted(range(len(chunks)), key=of_chunks.__getitem__)
    of_samples = words(seed, 0, epoch, num_samples)
    num_windows = math.ceil(len(chunks) / window)
    order: list[int] = []
    for start in range(0, len(chunks), window):
        inside = [sample for number in numbers[start : start + window] for sample in chunks[number]]
        # The lowest bits of a word are not used: their place has the number of the window.
        bits = (num_windows - 1).bit_length()
        order += sorted(inside, key=lambda sample: (of_samples[sample] >> bits, sample))
    return order


@settings(max_examples=50, deadline=None)
@given(seed=seeds, epoch=st.integers(0, 10**6), num_samples=st.integers(1, 300), order=orders)
def test_the_order_is_a_permutation_and_equals_a_transcription(
    seed: int, epoch: int, num_samples: int, order: Order
) -> None:
    """Also where the last chunk and the last window are smaller, or one window has everything."""
    positions = range(epoch * num_samples, (epoch + 1) * num_samples)
    samples = sample_ids(positions, seed=seed, num_samples=num_samples, order=order).tolist()
    assert sorted(samples) == list(range(num_samples))
    if order.chunk > 1:
        assert samples == transcribed(seed, epoch, num_samples, order.chunk, order.window)


@pytest.mark.parametrize("order", [Order(chunk=1, window=7), Order(chunk=10, window=100)])
def test_chunks_of_one_image_and_a_window_of_all_are_the_order_without_the_key(
    order: Order,
) -> None:
    plain = sample_ids(range(2000), seed=3, num_samples=1000)
    chunked = sample_ids(range(2000), seed=3, num_samples=1000, order=order)
    assert np.array_equal(chunked, plain)


def test_the_chunked_order_never_changes() -> None:
    """A run must resume with its original order, under any version of NumPy."""
    order = Order(chunk=3, window=2)
    samples = sample_ids(range(20), seed=1234, num_samples=10, order=order).reshape(2, 10)
    assert samples.tolist() == [[9, 0, 1, 2, 8, 7, 3, 4, 5, 6], [8, 0, 2, 1, 7, 6, 9, 5, 3, 4]]


def test_all_pairs_of_a_window_are_neighbours_equally_often() -> None:
    """Pairs of one chunk and of two; chi-squared, 28 - 1 degrees of freedom, 63 is 1 in 10^4."""
    order = Order(chunk=4, window=2)
    samples = sample_ids(range(8 * 4000), seed=0, num_samples=8, order=order).reshape(-1, 8)
    pairs = Counter(frozenset(pair) for epoch in samples.tolist() for pair in pairwise(epoch))
    expected = 7 * 4000 / 28
    assert len(pairs) == 28
    assert sum((count - expected) ** 2 / expected for count in pairs.values()) < 63


def test_every_chunk_is_equally_likely_in_every_window() -> None:
    """Five chunks, the last one smaller, in windows of 2, 2 and 1: over 3,000 epochs."""
    order = Order(chunk=4, window=2)
    samples = sample_ids(range(18 * 3000), seed=0, num_samples=18, order=order).reshape(-1, 18)
    firsts = Counter((samples[:, 0] // 4).tolist())
    lasts = Counter((samples[:, -1] // 4).tolist())
    # In the first window a chunk of four has 4/8 of the places beside one of four, or 4/6.
    small = 2 / 5 * 2 / 6
    assert firsts[4] / 3000 == pytest.approx(small, abs=0.03)  # 3.5 standard deviations
    for chunk in range(4):
        assert firsts[chunk] / 3000 == pytest.approx((1 - small) / 4, abs=0.03)
        assert lasts[chunk] / 3000 == pytest.approx(1 / 5, abs=0.026)


@settings(max_examples=50, deadline=None)
@given(
    seed=seeds,
    num_samples=st.integers(2, 300),
    order=orders,
    data=st.data(),
)
def test_the_images_of_an_update_are_in_few_chunks(
    seed: int, num_samples: int, order: Order, data: st.DataObject
) -> None:
    """Windows at both ends, whole chunks between them, and a smaller chunk in each epoch."""
    batch = data.draw(st.integers(1, num_samples))
    start = data.draw(st.integers(0, 3 * num_samples))
    positions = range(start, start + batch)
    samples = sample_ids(positions, seed=seed, num_samples=num_samples, order=order)
    chunks = set((samples // order.chunk).tolist())
    assert len(chunks) <= 2 * order.window + math.ceil(batch / order.chunk) + 1


@pytest.mark.parametrize(("batch", "chunk", "window"), [(40, 8, 4), (100, 8, 4), (7, 4, 3)])
def test_the_mean_number_of_chunks_of_an_update_is_counted(
    batch: int, chunk: int, window: int
) -> None:
    order = Order(chunk=chunk, window=window)
    number = 100 * order.window_samples
    samples = sample_ids(range(number), seed=1, num_samples=number, order=order)
    starts = range(0, number - batch, 3)
    counts = [len(set((samples[it : it + batch] // chunk).tolist())) for it in starts]
    # Chunks are drawn without replacement within a window: the formula is for large ones.
    assert order.chunks_of(batch) == pytest.approx(np.mean(counts), rel=0.05)


def test_a_range_of_positions_has_the_same_samples_as_the_whole_run() -> None:
    """From other starts, as a resumed run, of chosen samples, with copies of blocks."""
    trained = np.arange(100, 271)
    order = Order(chunk=16, window=3)
    for repeats in (1, 3):
        whole = samples_at(
            range(1200), seed=1, num_samples=300, trained=trained, repeats=repeats, order=order
        )
        assert set(whole.tolist()) == set(trained.tolist())
        for start in range(0, 1200, 50):
            positions = range(start, start + 50)
            part = samples_at(
                positions, seed=1, num_samples=300, trained=trained, repeats=repeats, order=order
            )
            assert np.array_equal(part, whole[start : start + 50])


def test_blocks_of_the_chunked_order_are_repeated() -> None:
    order = Order(chunk=16, window=3)
    positions = range(3 * 200)
    once = sample_ids(range(200), seed=1, num_samples=200, order=order)
    sources, _ = unrepeated(positions, num_samples=200, repeats=3)
    repeated = samples_at(positions, seed=1, num_samples=200, trained=None, repeats=3, order=order)
    assert np.array_equal(repeated, once[sources])


def test_chunks_are_of_images_that_are_not_held_out() -> None:
    pipeline = opened("data.held_out.samples=200", "polish=null")
    trained = pipeline.train_index.trained
    assert trained is not None
    number = len(trained)
    expected = sample_ids(
        range(number), seed=pipeline.seed, num_samples=number, order=pipeline.data.order
    )
    request = pipeline.training_request(range(number), clean=False)
    assert np.array_equal(request.samples, trained[expected])


def test_clean_updates_have_the_order_and_statistics_random_images() -> None:
    """The first windows of sorted shards would be of a few classes."""
    pipeline = opened()
    number = len(pipeline.train_index)
    chunked = sample_ids(
        range(number), seed=pipeline.seed, num_samples=number, order=pipeline.data.order
    )
    plain = sample_ids(range(192), seed=pipeline.seed, num_samples=number)
    assert np.array_equal(pipeline.training_request(range(number), clean=True).samples, chunked)
    labels = torch.cat([batch.labels for batch in pipeline.statistics(192)])
    assert labels.tolist() == pipeline.train_index.labels[plain].tolist()


def test_alternating_flips_show_both_sides_in_two_epochs() -> None:
    pipeline = opened("data.flip=alternating")
    number = len(pipeline.train_index)
    sides = []
    for epoch in (0, 1):
        positions = range(epoch * number, (epoch + 1) * number)
        request = pipeline.training_request(positions, clean=False)
        sides.append(request.flips[np.argsort(request.samples)])
    assert np.array_equal(sides[0], ~sides[1])


@pytest.mark.parametrize("workers", [2, 3])
def test_workers_share_the_positions_of_one(workers: int) -> None:
    (alone,) = opened().training(range(1), clean=False)
    for rank in range(workers):
        pipeline = opened(workers=workers, rank=rank)
        assert_is_part(pipeline, alone)


@pytest.mark.parametrize(
    "order",
    ["{chunk: 0, window: 4}", "{chunk: 4}", "{chunk: 4, window: 0}", "{chunk: 4.5, window: 2}"],
)
def test_what_an_order_cannot_be_is_refused(order: str) -> None:
    with pytest.raises(RecipeError, match=r"data\.order\.(chunk|window)"):
        load_recipe("digits_96", [f"data.order={order}"])


SORTED = np.arange(1437) // 144  # ten classes
IN_WINDOWS = Order(chunk=32, window=4)


@pytest.fixture(scope="module")
def digits() -> Images:
    return read_images(load_recipe("digits_96"), Serial(), folder=None)


def with_labels(images: Images, labels: IntArray) -> Images:
    return replace(images, train=replace(images.train, labels=labels))


def test_images_sorted_by_class_are_refused_unless_the_order_mixes_them(digits: Images) -> None:
    images = with_labels(digits, SORTED)
    with pytest.raises(DataError, match=r"data\.order: 99\.4 %.*largebatch data import"):
        images.check_order(IN_WINDOWS)  # nine of 1,436 pairs of neighbours differ
    for order in (None, Order(chunk=1, window=4), Order(chunk=32, window=1000)):
        assert images.check_order(order) is None


def test_images_that_are_partly_sorted_begin_a_run_with_a_warning(digits: Images) -> None:
    labels = np.random.default_rng(0).permutation(SORTED)
    labels[:430].sort()
    warning = with_labels(digits, labels).check_order(IN_WINDOWS)
    assert warning is not None
    assert "data.order" in warning


@pytest.mark.parametrize("classes", [2, 10, 1000])
@pytest.mark.parametrize("number", [200, 1437])
def test_shuffled_images_are_neither_refused_nor_warned_of(
    classes: int, number: int, digits: Images
) -> None:
    random = np.random.default_rng(classes)
    # Classes of very different sizes, too.
    for labels in (np.arange(number) % classes, random.geometric(0.5, number)):
        for _ in range(20):
            images = with_labels(digits, random.permutation(labels))
            assert images.check_order(IN_WINDOWS) is None


def test_a_run_on_sorted_images_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    changes = ["--set", "data.order={chunk: 32, window: 4}"]
    assert main(["train", "digits_96", *changes, "--out", str(out)]) == USER
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1
    assert "data.order" in printed
    assert not out.exists()


def test_the_plan_names_the_images_of_a_window_and_the_chunks_of_an_update(
    capsys: pytest.CaptureFixture[str],
) -> None:
    changes = ["--set", "data.order={chunk: 32, window: 4}"]
    assert main(["plan", "digits_96", *changes]) == DONE
    (line,) = [it for it in capsys.readouterr().out.splitlines() if it.split()[:1] == ["order"]]
    assert "windows of 128 images" in line
    assert "of 45 chunks" in line
