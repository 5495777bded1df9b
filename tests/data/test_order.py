import itertools
from threading import Thread, current_thread, main_thread

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from largebatch.data import order
from largebatch.data.order import Stream, random_words, sample_ids

seeds = st.integers(0, 2**63)


@given(seed=seeds, num_samples=st.integers(1, 200), epoch=st.integers(0, 10**6))
def test_every_sample_occurs_once_per_epoch(seed: int, num_samples: int, epoch: int) -> None:
    positions = range(epoch * num_samples, (epoch + 1) * num_samples)
    ids = sample_ids(positions, seed=seed, num_samples=num_samples)
    assert ids.dtype == np.int64
    assert sorted(ids.tolist()) == list(range(num_samples))


@given(
    seed=seeds,
    num_samples=st.integers(1, 20),
    bounds=st.lists(st.integers(0, 100), min_size=2, max_size=6).map(sorted),
)
def test_a_range_has_the_same_samples_for_any_division(
    seed: int, num_samples: int, bounds: list[int]
) -> None:
    whole = sample_ids(range(bounds[0], bounds[-1]), seed=seed, num_samples=num_samples)
    parts = [
        sample_ids(range(start, stop), seed=seed, num_samples=num_samples)
        for start, stop in itertools.pairwise(bounds)
    ]
    assert whole.tolist() == np.concatenate(parts).tolist()
    assert len(whole) == bounds[-1] - bounds[0]


def test_the_order_never_changes() -> None:
    """A run must resume with its original order, under any version of NumPy."""
    two_epochs = [[8, 9, 7, 3, 0, 1, 4, 2, 5, 6], [9, 8, 0, 5, 3, 2, 1, 7, 6, 4]]
    assert sample_ids(range(20), seed=1234, num_samples=10).reshape(2, 10).tolist() == two_epochs


def test_every_sample_is_equally_likely_at_every_position() -> None:
    """Chi-squared over 10 x 10 cells and 1,000 epochs: 81 degrees of freedom, 150 is 1 in 10^5."""
    ids = sample_ids(range(10_000), seed=0, num_samples=10).reshape(-1, 10)
    counts = np.stack([np.bincount(column, minlength=10) for column in ids.T])
    assert ((counts - 100) ** 2 / 100).sum() < 150


def test_a_thread_draws_the_next_order_and_training_draws_it_where_there_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A forked process has no such thread."""
    expected = sample_ids(range(30), seed=5, num_samples=10).tolist()
    drawn_by_training: list[int] = []

    def noted_words(seed: int, stream: Stream, *, part: int = 0, **size: int) -> np.ndarray:
        if current_thread() is main_thread():
            drawn_by_training.append(part)
        return random_words(seed, stream, part=part, **size)

    def forget() -> None:
        for cached in (order._draw, order._drawing):
            cached.cache_clear()

    monkeypatch.setattr(order, "random_words", noted_words)
    for runs, by_training in ((Thread.run, []), (lambda _: None, [0, 1, 2])):
        forget()
        monkeypatch.setattr(Thread, "run", runs)
        found = [sample_ids(range(at, at + 5), seed=5, num_samples=10) for at in range(0, 30, 5)]
        assert np.concatenate(found).tolist() == expected
        assert drawn_by_training == by_training
        assert order._drawing.cache_info().currsize == 4  # the fourth is drawn ahead
    forget()


def test_no_two_purposes_share_random_numbers() -> None:
    words = [random_words(0, stream, block=0, num_blocks=100) for stream in Stream]
    assert len(np.unique(words)) == len(Stream) * 400
