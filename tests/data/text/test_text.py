from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from short_text import BATCH, WINDOW, cut_by_hand, text_recipe, words_of, write_text

from largebatch.data.batches import Pipeline
from largebatch.data.text.pipeline import PENN_TREEBANK, PLAIN, TextPipeline, read_corpus, windows
from largebatch.data.types import Batch
from largebatch.distributed.serial import Serial
from largebatch.errors import DataError
from largebatch.recipe.arithmetic.plan import make_plan, measuring_plan
from largebatch.runs.build import open_pipeline

CPU = Serial(torch.device("cpu"))


@given(text=st.integers(1, 60).map(np.arange), length=st.integers(1, 30))
def test_the_windows_of_a_text_predict_every_word_from_the_one_before(
    text: np.ndarray, length: int
) -> None:
    """All words differ, so a word identifies its position; the last window wraps around."""
    number = -(-len(text) // length)
    found = windows(text, np.arange(number), length=length)
    assert found.inputs.shape == found.targets.shape == (number, length)
    assert found.targets.ravel().tolist() == np.resize(text, number * length).tolist()
    assert found.inputs.ravel().tolist() == np.resize(np.roll(text, 1), number * length).tolist()


@pytest.mark.parametrize(
    ("samples", "length", "message"),
    [
        pytest.param([2], 3, r"samples must be 0 \.\. 1", id="beyond the text"),
        pytest.param([-1], 3, r"samples must be 0 \.\. 1", id="before the text"),
        pytest.param([0], 0, "length must be at least 1, got 0", id="no length"),
    ],
)
def test_windows_that_are_not_there_are_refused(
    samples: list[int], length: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        windows(np.arange(5), np.array(samples), length=length)


def opened(
    folder: Path, *, workers: int = 1, rank: int = 0, overrides: tuple[str, ...] = ()
) -> Pipeline:
    recipe = text_recipe(folder, *overrides)
    pipeline = open_pipeline(recipe, make_plan(recipe, workers=workers), CPU, folder=folder)
    return replace(pipeline, rank=rank)


def tokens(batches: list[Batch]) -> list[tuple[list[int], list[int]]]:
    return [
        (x.tolist(), y.tolist())
        for batch in batches
        for x, y in zip(batch.images, batch.labels, strict=True)
    ]


def by_hand(folder: Path, part: str, *, circle: bool) -> list[tuple[list[int], list[int]]]:
    numbers = {word: n for n, word in enumerate(read_corpus(folder).vocabulary)}
    cut = cut_by_hand(words_of(folder, part), numbers, circle=circle)
    return [(x.tolist(), y.tolist()) for x, y in cut]


def test_an_epoch_holds_every_window_of_the_training_text_once(tmp_path: Path) -> None:
    pipeline = opened(write_text(tmp_path))
    number = pipeline.plan.train_samples
    found = tokens(list(pipeline.training(range(-(-number // BATCH)), clean=False)))
    assert sorted(found[:number]) == sorted(by_hand(tmp_path, "train", circle=True))


@pytest.mark.parametrize("workers", [2, 4])
def test_workers_read_together_what_one_reads(tmp_path: Path, workers: int) -> None:
    write_text(tmp_path)
    alone = tokens(list(opened(tmp_path).training(range(4), clean=False)))
    shares = [
        tokens(list(opened(tmp_path, workers=workers, rank=rank).training(range(4), clean=True)))
        for rank in range(workers)
    ]
    each = BATCH // workers
    together = [share[step * each : (step + 1) * each] for step in range(4) for share in shares]
    assert [one for part in together for one in part] == alone


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_an_evaluation_has_every_word_once_on_any_number_of_workers(
    tmp_path: Path, workers: int
) -> None:
    recipe = text_recipe(write_text(tmp_path), "execution.device_batch=4")
    plan = measuring_plan(recipe, workers=workers)
    whole = open_pipeline(recipe, plan, CPU, folder=tmp_path)
    assert isinstance(whole, TextPipeline)
    each = [replace(whole, rank=rank) for rank in range(workers)]
    found = [tokens(list(own.validation())) for own in each]
    expected = by_hand(tmp_path, "val", circle=False)
    assert len(expected[-1][1]) == len(words_of(tmp_path, "val")) % WINDOW > 0
    assert sorted(one for share in found for one in share) == sorted(expected)
    tested = [tokens(list(own.test())) for own in each]
    assert sorted(one for share in tested for one in share) == sorted(
        by_hand(tmp_path, "test", circle=False)
    )


def test_windows_that_are_held_out_validate_and_are_not_trained_on(tmp_path: Path) -> None:
    pipeline = opened(write_text(tmp_path), overrides=("data.held_out={samples: 10}",))
    number = pipeline.plan.train_samples  # without the held-out ones
    every = by_hand(tmp_path, "train", circle=True)
    held_out = tokens(list(pipeline.validation()))
    trained = tokens(list(pipeline.training(range(-(-number // BATCH)), clean=False)))
    assert len(held_out) == 10
    assert sorted(held_out + trained[:number]) == sorted(every)


def test_what_the_recipe_does_not_describe_is_refused_with_the_way_on(tmp_path: Path) -> None:
    recipe = text_recipe(write_text(tmp_path))
    (tmp_path / "val.txt").write_text("w1 w2\n", encoding="utf-8")
    plan = make_plan(recipe, workers=1)
    with pytest.raises(DataError, match=r"the text has val_words 3; .* --set data.val_words=3$"):
        open_pipeline(recipe, plan, CPU, folder=tmp_path)
    with pytest.raises(DataError, match="pass --data DIR"):
        open_pipeline(recipe, plan, CPU, folder=None)
    with pytest.raises(DataError, match="--dataset mine:open opens images, and .* is text"):
        open_pipeline(recipe, plan, CPU, folder=None, dataset="mine:open")


def test_other_words_under_the_same_numbers_have_another_identity(tmp_path: Path) -> None:
    before = opened(write_text(tmp_path)).splits
    for part in ("train", "val", "test"):
        file = tmp_path / f"{part}.txt"
        file.write_text(file.read_text().replace("w7", "x7"))
    after = opened(tmp_path).splits
    assert before["vocabulary"] != after["vocabulary"]


def write_corpus(folder: Path, **parts: str) -> Path:
    content = {"train": "the cat sat \n the dog \n", "val": "the dog sat\n", "test": "cat\n"}
    for part, text in (content | parts).items():
        (folder / PENN_TREEBANK[part]).write_text(text, encoding="utf-8")
    return folder


def test_words_are_numbered_by_frequency_and_sentences_end(tmp_path: Path) -> None:
    corpus = read_corpus(write_corpus(tmp_path))
    assert corpus.vocabulary == ("<eos>", "the", "cat", "dog", "sat")
    assert corpus.train.tolist() == [1, 2, 4, 0, 1, 3, 0]
    assert corpus.val.tolist() == [1, 3, 4, 0]
    assert corpus.test is not None
    assert corpus.test.tolist() == [2, 0]


def test_a_text_without_a_test_part_is_read_under_plain_names(tmp_path: Path) -> None:
    for part, name in PENN_TREEBANK.items():
        (write_corpus(tmp_path) / name).rename(tmp_path / PLAIN[part])
    (tmp_path / "test.txt").unlink()
    corpus = read_corpus(tmp_path)
    assert (corpus.val.tolist(), corpus.test) == ([1, 3, 4, 0], None)


def test_a_corpus_cannot_be_written_to(tmp_path: Path) -> None:
    corpus = read_corpus(write_corpus(tmp_path))
    with pytest.raises(ValueError, match="read-only"):
        corpus.train[0] = 3


def test_words_that_training_lacks_are_refused_by_name(tmp_path: Path) -> None:
    write_corpus(tmp_path, val="the zebra sat\nthe aardvark zebra\n")
    with pytest.raises(DataError, match=r"ptb.valid.txt: 2 words .*: aardvark, zebra; write them"):
        read_corpus(tmp_path)


def test_what_is_no_text_is_refused_by_path(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"missing: train.txt, val.txt$"):
        read_corpus(tmp_path)
    write_corpus(tmp_path, test="")
    with pytest.raises(DataError, match=r"ptb.test.txt: the file is empty"):
        read_corpus(tmp_path)
    (tmp_path / PENN_TREEBANK["test"]).write_bytes(b"caf\xe9\n")
    with pytest.raises(DataError, match=r"ptb.test.txt: cannot be read as UTF-8"):
        read_corpus(tmp_path)
    (tmp_path / PENN_TREEBANK["train"]).unlink()
    with pytest.raises(DataError, match=r"missing: ptb.train.txt$"):
        read_corpus(tmp_path)


def test_penn_treebank_has_the_published_number_of_words(real_data: Path) -> None:
    """929k, 73k and 82k words of 10k kinds (Zaremba et al. 2014, arXiv:1409.2329, section 4.1)."""
    folder = real_data / "ptb"
    corpus = read_corpus(folder)
    assert corpus.test is not None
    assert [len(part) for part in (corpus.train, corpus.val, corpus.test)] == [
        929_589,
        73_760,
        82_430,
    ]
    assert len(corpus.vocabulary) == 10_000
    content = (folder / "ptb.train.txt").read_text()
    shown = [corpus.vocabulary[number] for number in corpus.train]
    assert " ".join(shown) == " ".join(content.replace("\n", "<eos> ").split())
    assert corpus.vocabulary[0] == Counter(content.split()).most_common(1)[0][0]
