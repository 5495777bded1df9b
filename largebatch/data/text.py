"""Text as numbered words, and the part of it that every row of a batch reads in every step.

The training text is a circle of words. Of a global batch of `rows` rows, row b starts b/rows of the
way round and reads `length` words a step, so in one pass each row reads a contiguous part of its
own and together they read the text once. A row that comes to the end of its part reads on, into
the next: no word is dropped, no target is made up, and the state of a recurrent network always
belongs to the words that follow. Only where the text ends does one row jump, to its first sentence.

As in `order`, everything is a function of the position in the run, here step * rows + row, so
neither the number of workers nor where a run was interrupted changes what is read.

>>> text = np.arange(10)
>>> windows(text, range(2), rows=2, length=3).inputs.tolist()
[[0, 1, 2], [5, 6, 7]]
>>> windows(text, range(2, 4), rows=2, length=3).targets.tolist()
[[4, 5, 6], [9, 0, 1]]
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from largebatch.data.types import IntArray
from largebatch.errors import DataError, shorten

END = "<eos>"
"""The word after every sentence."""

FILES = {"train": "ptb.train.txt", "val": "ptb.valid.txt", "test": "ptb.test.txt"}
"""Penn Treebank in Mikolov's form, where rare words are written <unk> and numbers N."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """A text in three parts. A word's number is its place in the vocabulary."""

    vocabulary: tuple[str, ...]
    """The words of the training part, the most frequent first, equally frequent ones by name."""

    train: IntArray
    val: IntArray
    test: IntArray


class Windows(NamedTuple):
    """What some rows of a batch read in a step."""

    inputs: IntArray
    """N x length."""

    targets: IntArray
    """N x length: the word after each input."""


def read_corpus(folder: Path) -> Corpus:
    """Read Penn Treebank, one sentence a line; END follows every sentence.

    Raises DataError where a file is missing, empty or no text, and where validation or test use
    words that training lacks.
    """
    missing = [name for name in FILES.values() if not (folder / name).is_file()]
    if missing:
        raise DataError(
            f"{folder}: expected {', '.join(FILES.values())}, one sentence a line (Penn Treebank "
            f"in Mikolov's form, data/ptb.*.txt of his simple-examples.tgz); missing: "
            f"{', '.join(missing)}"
        )
    words = {part: _read_words(folder / name) for part, name in FILES.items()}
    counts = Counter(words["train"])
    vocabulary = tuple(sorted(counts, key=lambda word: (-counts[word], word)))
    numbers = {word: number for number, word in enumerate(vocabulary)}
    parts = {part: _number(words[part], numbers, folder / FILES[part]) for part in FILES}
    return Corpus(vocabulary=vocabulary, **parts)


def windows(text: IntArray, positions: range, *, rows: int, length: int) -> Windows:
    """Return what is read at these consecutive positions, one row each.

    A pass over the text takes len(text) / (rows * length) steps, in general no whole number;
    windows run on over its end.
    """
    if positions.step != 1:
        raise ValueError(f"positions must be consecutive, got {positions}")
    if length < 1:
        raise ValueError(f"length must be at least 1, got {length}")
    if not 1 <= rows <= len(text):
        raise ValueError(f"rows must be 1 .. {len(text)}, the number of words, got {rows}")
    steps, row = np.divmod(np.arange(positions.start, positions.stop), rows)
    first = row * len(text) // rows + steps * length
    read = text[(first[:, None] + np.arange(length + 1)) % len(text)]
    return Windows(inputs=read[:, :-1], targets=read[:, 1:])


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
            f"{path}: {len(unknown)} words do not occur in {FILES['train']}: "
            f"{shorten(unknown)}; write them as <unk>, as Mikolov's files do with rare words"
        ) from None
    text.setflags(write=False)
    return text
