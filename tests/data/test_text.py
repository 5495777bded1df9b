import itertools
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from largebatch.data.text import FILES, Windows, read_corpus, windows
from largebatch.data.types import IntArray
from largebatch.errors import DataError
from largebatch.recipe.loading import load_recipe
from largebatch.recipe.plan import make_plan

DIGITS = Path(__file__).parents[2] / "recipes" / "quickstart" / "digits_96.yaml"

texts = st.integers(2, 60).map(np.arange)  # every word is another, so a place is known by its word
steps = st.integers(0, 40)
lengths = st.integers(1, 30)


def read_by_hand(text: IntArray, row: int, *, rows: int, words: int) -> IntArray:
    """Return the first words that a row reads: the text rolled to its start, and repeated."""
    return np.resize(np.roll(text, -(row * len(text) // rows)), words)


@given(text=texts, step=steps, length=lengths, data=st.data())
def test_every_row_reads_its_part_of_the_text_and_on(
    text: IntArray, step: int, length: int, data: st.DataObject
) -> None:
    rows = data.draw(st.integers(1, len(text)))
    found = windows(text, range(step * rows, (step + 1) * rows), rows=rows, length=length)
    assert found.inputs.shape == found.targets.shape == (rows, length)
    assert found.inputs.dtype == found.targets.dtype == np.int64
    for row in range(rows):
        expected = read_by_hand(text, row, rows=rows, words=(step + 1) * length + 1)
        assert found.inputs[row].tolist() == expected[step * length : -1].tolist()
        assert found.targets[row].tolist() == expected[step * length + 1 :].tolist()


@given(
    text=texts,
    length=lengths,
    bounds=st.lists(st.integers(0, 200), min_size=2, max_size=6).map(sorted),
    data=st.data(),
)
def test_positions_read_the_same_however_they_are_divided(
    text: IntArray, length: int, bounds: list[int], data: st.DataObject
) -> None:
    rows = data.draw(st.integers(1, len(text)))
    whole = windows(text, range(bounds[0], bounds[-1]), rows=rows, length=length)
    parts = [
        windows(text, range(start, stop), rows=rows, length=length)
        for start, stop in itertools.pairwise(bounds)
    ]
    assert len(whole.inputs) == bounds[-1] - bounds[0]
    for ours, pieces in zip(whole, zip(*parts, strict=True), strict=True):
        assert ours.tolist() == np.concatenate(pieces).tolist()


@given(rows=st.integers(1, 12), part=st.integers(1, 30), num_passes=st.integers(1, 3))
def test_a_pass_reads_every_word_once_from_contiguous_parts(
    rows: int, part: int, num_passes: int
) -> None:
    """One word a step, so that a pass is a whole number of steps."""
    text = np.arange(rows * part)
    positions = range((num_passes - 1) * part * rows, num_passes * part * rows)
    read = windows(text, positions, rows=rows, length=1)
    assert sorted(read.inputs[:, 0].tolist()) == text.tolist()
    assert sorted(read.targets[:, 0].tolist()) == text.tolist()
    by_row = read.inputs.reshape(part, rows).T
    assert (np.diff(by_row) % len(text) == 1).all()


@given(text=texts, length=lengths, data=st.data())
def test_any_number_of_steps_reads_all_words_almost_equally_often(
    text: IntArray, length: int, data: st.DataObject
) -> None:
    """Rows start within one word of evenly spaced, also where the text does not divide by them."""
    rows, num_steps = data.draw(st.integers(1, len(text))), data.draw(st.integers(1, 50))
    read = windows(text, range(rows * num_steps), rows=rows, length=length)
    starts = windows(text, range(rows), rows=rows, length=1).inputs[:, 0]
    gaps = np.diff([*starts, len(text)])
    assert gaps.max() - gaps.min() <= 1
    counts = np.bincount(read.inputs.ravel(), minlength=len(text))
    assert counts.max() - counts.min() <= 2


@pytest.mark.parametrize(("workers", "device_batch"), [(1, 96), (1, 48), (2, 48), (4, 12)])
def test_a_worker_reads_the_same_rows_in_every_step(workers: int, device_batch: int) -> None:
    """So the state of a recurrent network can stay where it is."""
    plan = make_plan(load_recipe(DIGITS).with_execution(device_batch=device_batch), workers=workers)
    text, length = np.arange(96 * 100), 7

    def read(step: int, micro: int, rank: int) -> Windows:
        return windows(text, plan.positions(step, micro, rank), rows=96, length=length)

    for rank, micro, step in itertools.product(range(workers), range(plan.accumulation), range(20)):
        before, after = read(step, micro, rank), read(step + 1, micro, rank)
        assert before.targets[:, -1].tolist() == after.inputs[:, 0].tolist()


@pytest.mark.parametrize(
    ("positions", "rows", "length", "message"),
    [
        pytest.param(range(0, 8, 2), 2, 3, "consecutive", id="with gaps"),
        pytest.param(range(8), 0, 3, r"rows must be 1 \.\. 5, .* got 0", id="no rows"),
        pytest.param(range(8), 6, 3, r"rows must be 1 \.\. 5, .* got 6", id="more rows than words"),
        pytest.param(range(8), 2, 0, "length must be at least 1, got 0", id="no length"),
    ],
)
def test_what_cannot_be_read_is_refused(
    positions: range, rows: int, length: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        windows(np.arange(5), positions, rows=rows, length=length)


def write_corpus(folder: Path, **parts: str) -> Path:
    content = {"train": "the cat sat \n the dog \n", "val": "the dog sat\n", "test": "cat\n"}
    for part, text in (content | parts).items():
        (folder / FILES[part]).write_text(text, encoding="utf-8")
    return folder


def test_words_are_numbered_by_frequency_and_sentences_end(tmp_path: Path) -> None:
    corpus = read_corpus(write_corpus(tmp_path))
    assert corpus.vocabulary == ("<eos>", "the", "cat", "dog", "sat")
    assert corpus.train.tolist() == [1, 2, 4, 0, 1, 3, 0]
    assert corpus.val.tolist() == [1, 3, 4, 0]
    assert corpus.test.tolist() == [2, 0]


def test_a_corpus_cannot_be_written_to(tmp_path: Path) -> None:
    corpus = read_corpus(write_corpus(tmp_path))
    with pytest.raises(ValueError, match="read-only"):
        corpus.train[0] = 3


def test_words_that_training_lacks_are_refused_by_name(tmp_path: Path) -> None:
    write_corpus(tmp_path, val="the zebra sat\nthe aardvark zebra\n")
    with pytest.raises(DataError, match=r"ptb.valid.txt: 2 words .*: aardvark, zebra; write them"):
        read_corpus(tmp_path)


def test_what_is_no_text_is_refused_by_path(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"missing: ptb.train.txt, ptb.valid.txt, ptb.test.txt"):
        read_corpus(tmp_path)
    write_corpus(tmp_path, test="")
    with pytest.raises(DataError, match=r"ptb.test.txt: the file is empty"):
        read_corpus(tmp_path)
    (tmp_path / FILES["test"]).write_bytes(b"caf\xe9\n")
    with pytest.raises(DataError, match=r"ptb.test.txt: cannot be read as UTF-8"):
        read_corpus(tmp_path)


def test_penn_treebank_has_the_published_number_of_words(real_data: Path) -> None:
    """929k, 73k and 82k words of 10k kinds (Zaremba et al. 2014, arXiv:1409.2329, section 4.1)."""
    folder = real_data / "ptb"
    corpus = read_corpus(folder)
    assert [len(part) for part in (corpus.train, corpus.val, corpus.test)] == [
        929_589,
        73_760,
        82_430,
    ]
    assert len(corpus.vocabulary) == 10_000
    content = (folder / "ptb.train.txt").read_text()
    said = [corpus.vocabulary[number] for number in corpus.train]
    assert " ".join(said) == " ".join(content.replace("\n", "<eos> ").split())
    assert corpus.vocabulary[0] == Counter(content.split()).most_common(1)[0][0]


def test_an_epoch_of_penn_treebank_drops_nothing(real_data: Path) -> None:
    """Batches of 20 rows of 35 words: 1,327.98 steps, which the next pass rounds up."""
    train = read_corpus(real_data / "ptb").train
    num_steps = -(-len(train) // (20 * 35))
    read = windows(train, range(num_steps * 20), rows=20, length=35)
    by_row = read.inputs.reshape(num_steps, 20, 35).swapaxes(0, 1).reshape(20, -1)
    parts = [
        row[: (b + 1) * len(train) // 20 - b * len(train) // 20] for b, row in enumerate(by_row)
    ]
    assert np.array_equal(np.concatenate(parts), train)
