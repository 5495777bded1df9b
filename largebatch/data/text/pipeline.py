"""Text as numbered words, cut into windows: the samples of a language model.

Window s of a text has the words from s * length on, each to be predicted from those before it in
the window; before the first word of a text stands the end of a sentence. So every word is predicted
exactly once, whatever the length is. The training text is a circle, in which the last window runs
on at the beginning, so that all have the same length and the mean over a batch is that over its
words; the last window of an evaluation is as short as the text makes it.

A window is read by its number alone and begins with a hidden state of zeros. So windows are samples
like images: the order, the division over workers, batch schedules and resuming are functions of the
position in the run. What that costs against carrying the state from window to window is measured in
docs/text.md.

>>> text = np.arange(7)
>>> windows(text, np.array([0, 2]), length=3).inputs.tolist()
[[6, 0, 1], [5, 6, 0]]
>>> windows(text, np.array([0, 2]), length=3).targets.tolist()
[[0, 1, 2], [6, 0, 1]]
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from largebatch.data.batches import (
    Pipeline,
    Split,
    divide_samples,
    require_described,
    samples_at,
)
from largebatch.data.transfer import Transfer
from largebatch.data.types import Batch, Batches, IntArray
from largebatch.distributed.backend import Backend
from largebatch.errors import CheckpointError, DataError, shorten
from largebatch.recipe.arithmetic.plan import Plan
from largebatch.recipe.recipe import Recipe
from largebatch.recipe.text import Text

END = "<eos>"
"""The word after every sentence."""

PLAIN = {"train": "train.txt", "val": "val.txt", "test": "test.txt"}
PENN_TREEBANK = {"train": "ptb.train.txt", "val": "ptb.valid.txt", "test": "ptb.test.txt"}
"""The names of the files of a text; those of Penn Treebank in Mikolov's form, where rare words are
written <unk> and numbers N."""

VOCABULARY = "vocabulary.txt"
"""The file of a run folder with the words, a line each: line n, counted from 0, is word n."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """A text in three parts. A word's number is its place in the vocabulary."""

    vocabulary: tuple[str, ...]
    """The words of the training part, the most frequent first, equally frequent ones by name."""

    train: IntArray
    val: IntArray
    test: IntArray | None
    """None where the folder has no such file: nothing but `evaluate --test` reads it."""


class Windows(NamedTuple):
    """Windows of one length."""

    inputs: IntArray
    """N x length: the word before each target."""

    targets: IntArray
    """N x length."""


def read_corpus(folder: Path) -> Corpus:
    """Read a text, one sentence a line; END follows every sentence.

    Raises DataError where a file is missing, empty or no text, and where validation or test use
    words that training lacks.
    """
    files = {part: folder / name for part, name in _names(folder).items()}
    words = {part: _read_words(file) for part, file in files.items()}
    counts = Counter(words["train"])
    vocabulary = tuple(sorted(counts, key=lambda word: (-counts[word], word)))
    numbers = {word: number for number, word in enumerate(vocabulary)}
    parts = {part: _number(words[part], numbers, file) for part, file in files.items()}
    return Corpus(
        vocabulary=vocabulary, train=parts["train"], val=parts["val"], test=parts.get("test")
    )


def windows(text: IntArray, samples: IntArray, *, length: int) -> Windows:
    """Return these windows of a text that is a circle."""
    if length < 1:
        raise ValueError(f"length must be at least 1, got {length}")
    last = -(-len(text) // length) - 1
    if len(samples) and not 0 <= samples.min() <= samples.max() <= last:
        raise ValueError(f"samples must be 0 .. {last}, the windows of the text")
    places = samples[:, None] * length + np.arange(-1, length)
    read = text[places % len(text)]
    return Windows(inputs=read[:, :-1], targets=read[:, 1:])


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPipeline(Pipeline):
    """Opens the batches of windows of every stage for one worker."""

    data: Text
    corpus: Corpus
    transfer: Transfer
    trained: IntArray | None
    """The windows of the training text that a run may train on, rising; None: all of them."""

    @property
    def splits(self) -> dict[str, dict[str, object]]:
        """What identifies the words of each split, and the vocabulary that numbers them."""
        corpus = self.corpus
        return {
            "train": _identity("samples", len(corpus.train), corpus.train.tobytes()),
            "val": _identity("samples", len(corpus.val), corpus.val.tobytes()),
            "vocabulary": _identity("words", len(corpus.vocabulary), self.files[VOCABULARY]),
        }

    def require_same_labels(self, origin: Mapping[str, Any], *, source: str) -> None:
        """Raise CheckpointError where the words had other numbers; see Pipeline."""
        if origin.get("vocabulary") != self.splits["vocabulary"]:
            raise CheckpointError(
                f"{source}: was trained with another vocabulary than that of the text here, so "
                "that words have other numbers; give the text of that run with --data"
            )

    @property
    def files(self) -> Mapping[str, bytes]:
        """The vocabulary, a word a line."""
        return {VOCABULARY: "".join(f"{word}\n" for word in self.corpus.vocabulary).encode()}

    def training(self, steps: range, *, clean: bool) -> Batches:  # noqa: ARG002 -- all are clean
        """Return the device batches of these updates, in each as many as its global batch needs."""
        return self.at(self.positions(steps), clean=False)

    def at(self, parts: Iterable[range], *, clean: bool) -> Batches:  # noqa: ARG002 -- all are
        """Return a batch for each of these ranges of positions of the run."""
        return self.clean("train", map(self.training_samples, parts))

    def training_samples(self, positions: range) -> IntArray:
        """Return the windows at these positions of the run: each once an epoch, none held out."""
        number = self.data.train_samples
        return samples_at(positions, seed=self.seed, num_samples=number, trained=self.trained)

    def clean(self, split: Split, parts: Iterator[IntArray]) -> Batches:
        """Return batches of these windows; held-out windows validate where the recipe has some."""
        if split == "train" or self.data.held_out is not None:
            return (self._batch(self.corpus.train, part) for part in parts)
        return self._once(self.corpus.val, parts)

    def test(self) -> Batches:
        """Return this worker's share of the test text; DataError where there is none."""
        text = self.corpus.test
        if text is None:
            raise DataError(f"--test: the text has no {PLAIN['test']} beside {PLAIN['train']}")
        samples = np.arange(-(-len(text) // self.data.window))
        return self._once(text, self._dealt(samples, size=self.plan.device_batch))

    def _once(self, text: IntArray, parts: Iterator[IntArray]) -> Batches:
        """Give every word of a text once: a last window that is shorter is a batch of its own."""
        whole, rest = divmod(len(text), self.data.window)
        for part in parts:
            if len(full := part[part < whole]):
                yield self._batch(text, full)
            if rest and len(short := part[part == whole]):
                batch = self._batch(text, short)
                yield Batch(batch.images[:, :rest], batch.labels[:, :rest])

    def _batch(self, text: IntArray, samples: IntArray) -> Batch:
        tensors = map(torch.from_numpy, windows(text, samples, length=self.data.window))
        return Batch(*self.transfer.send(*tensors))


def open_text(
    recipe: Recipe,
    plan: Plan,
    backend: Backend,
    *,
    folder: Path | None,
    dataset: str | None = None,
) -> TextPipeline:
    """Read the text a recipe names; every worker reads it, and all compare what they have read.

    Raises DataError where the folder is not what the recipe describes, or `dataset` is given.
    """
    assert isinstance(recipe.data, Text)
    if dataset is not None:
        raise DataError(f"--dataset {dataset} opens images, and the recipe's data.source is text")
    if folder is None:
        raise DataError(
            f"this recipe reads a text from a folder; pass --data DIR "
            f"({', '.join(f'DIR/{name}' for name in PLAIN.values())}, one sentence a line)"
        )
    corpus = read_corpus(folder)
    _check(recipe.data, corpus, folder)
    numbers = recipe.data.train_samples, recipe.data.val_samples
    trained, evaluated, held_out = divide_samples(recipe, *numbers)
    return TextPipeline(
        seed=recipe.seed,
        plan=plan,
        rank=backend.rank,
        evaluated_samples=evaluated,
        held_out_samples=held_out,
        data=recipe.data,
        corpus=corpus,
        transfer=Transfer(backend.device),
        trained=trained,
    )


def _check(data: Text, corpus: Corpus, folder: Path) -> None:
    """Refuse a text that is not the one the recipe was written for."""
    found = {
        "vocabulary": len(corpus.vocabulary),
        "train_words": len(corpus.train),
        "val_words": len(corpus.val),
    }
    require_described(data, found, where=f"{folder}", what="the text")


def _identity(unit: str, number: int, content: bytes) -> dict[str, object]:
    return {unit: number, "digest": hashlib.sha256(content).hexdigest()}


def _names(folder: Path) -> dict[str, str]:
    """Return the names of the files that are there, of whichever kind there are more."""
    there = [
        {part: name for part, name in names.items() if (folder / name).is_file()}
        for names in (PLAIN, PENN_TREEBANK)
    ]
    found = max(there, key=len)
    names = PLAIN if found == there[0] else PENN_TREEBANK
    missing = [name for part, name in names.items() if part not in found and part != "test"]
    if missing:
        raise DataError(
            f"{folder}: expected {', '.join(PLAIN.values())}, one sentence a line, or Penn "
            f"Treebank in Mikolov's form ({', '.join(PENN_TREEBANK.values())}); missing: "
            f"{', '.join(missing)}"
        )
    return found


def _read_words(path: Path) -> list[str]:
    try:
        with path.open(encoding="utf-8") as lines:
            words = [word for line in lines for word in (*line.split(), END)]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read as UTF-8 text: {error}") from None
    if not words:
        raise DataError(f"{path}: the file is empty, expected one sentence a line")
    return words


def _number(words: Iterable[str], numbers: Mapping[str, int], path: Path) -> IntArray:
    """Return the words' numbers, which cannot be written to."""
    try:
        text = np.fromiter((numbers[word] for word in words), dtype=np.int64)
    except KeyError:
        unknown = sorted(set(words) - numbers.keys())
        raise DataError(
            f"{path}: {len(unknown)} words do not occur in the training text: "
            f"{shorten(unknown)}; write them as <unk>, there too, as Mikolov's files do with rare "
            "words"
        ) from None
    text.setflags(write=False)
    return text
