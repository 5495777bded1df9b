"""A short text, a recipe for it, and the windows of it as they are cut by hand."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from largebatch.recipe.loading import parse_recipe
from largebatch.recipe.recipe import Recipe

WINDOW, BATCH = 5, 8
SENTENCES = {"train": 60, "val": 9, "test": 8}

_RECIPE = """
name: short-text
seed: 3
duration: {{steps: 6}}
data:
  source: text
  window: {window}
  vocabulary: {vocabulary}
  train_words: {train}
  val_words: {val}
model: {{name: lstm, arguments: {{embedding: 6, hidden: 6}}}}
batch: {{global_batch: {batch}, bn_span: null}}
optimizer: {{kind: sgd, momentum: 0.9, weight_decay: 0.01}}
schedule: {{peak_lr: 0.5, warmup: {{steps: 2}}, decay: {{kind: polynomial}}}}
"""


def write_text(folder: Path) -> Path:
    """Write train.txt, val.txt and test.txt: words in which the next one mostly follows."""
    draws = np.random.default_rng(1)
    for part, number in SENTENCES.items():
        lines = []
        for _ in range(number):
            word, words = int(draws.integers(20)), []
            for _ in range(int(draws.integers(3, 9))):
                words.append(f"w{word}")
                word = (word + 1) % 20 if draws.random() < 0.8 else int(draws.integers(20))
            lines.append(" ".join(words))
        (folder / f"{part}.txt").write_text("\n".join([*lines, ""]), encoding="utf-8")
    return folder


def words_of(folder: Path, part: str) -> list[str]:
    """Return the words of a part, one for the end of each sentence included."""
    return (folder / f"{part}.txt").read_text(encoding="utf-8").replace("\n", " <eos> ").split()


def text_recipe(folder: Path, *overrides: str) -> Recipe:
    """Return a recipe for the text of a folder."""
    train, val = (words_of(folder, part) for part in ("train", "val"))
    text = _RECIPE.format(
        window=WINDOW, vocabulary=len(set(train)), train=len(train), val=len(val), batch=BATCH
    )
    return parse_recipe(text, overrides)


def cut_by_hand(
    words: list[str], numbers: dict[str, int], *, circle: bool
) -> list[tuple[Tensor, Tensor]]:
    """Return the windows, inputs and targets of each; the last one may be short, or runs on."""
    inputs, targets = ["<eos>", *words[:-1]], list(words)
    if circle:
        more = -len(words) % WINDOW
        inputs, targets = inputs + [words[-1], *words][:more], targets + words[:more]
    pairs = []
    for start in range(0, len(targets), WINDOW):
        part = (side[start : start + WINDOW] for side in (inputs, targets))
        x, y = (torch.tensor([numbers[word] for word in side]) for side in part)
        pairs.append((x, y))
    return pairs
