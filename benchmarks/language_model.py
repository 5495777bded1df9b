"""Measure a language model, and the cost of windows that start with a zero hidden state.

    python benchmarks/language_model.py --data data/ptb [--workers 2] [--run FOLDER]

Trains recipes/ptb/ptb_lstm_20.yaml, or takes a run of it, and measures its perplexity on the
validation and the test text: each window with a state of zeros, and with the state carried from
window to window, as Zaremba et al. 2014 (arXiv:1409.2329) do. Writes
benchmarks/results/ptb_lstm_<machine>_<date>.json.
"""

import argparse
import json
import math
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from measuring import write

from largebatch import load_recipe, run
from largebatch.data.text.pipeline import Corpus, read_corpus
from largebatch.data.types import IntArray
from largebatch.models.lstm import LSTM
from largebatch.recipe.text import Text
from largebatch.report.run import read_run
from largebatch.runs.checkpoints import find_checkpoint

RECIPE = Path(__file__).parent.parent / "recipes" / "ptb" / "ptb_lstm_20.yaml"
ROWS = 20
"""Number of windows per batch."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--run", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.run or Path(scratch, "run")
        if args.run is None:
            run(load_recipe(RECIPE), data=args.data, workers=args.workers, out=folder)
        result = measure(folder, read_corpus(args.data))
    write(
        "ptb_lstm",
        f"python benchmarks/language_model.py --data DIR --workers {args.workers}",
        result,
    )
    print(json.dumps(result["perplexity"], indent=2))


def measure(folder: Path, corpus: Corpus) -> dict[str, Any]:
    """Return the summary of a run, its evaluations and the perplexities of its last weights."""
    checkpoint = find_checkpoint(folder)[1]
    arguments: Any = checkpoint.recipe.model.arguments
    model = LSTM(len(corpus.vocabulary), **arguments)
    model.load_state_dict(checkpoint.state["model"])
    model.eval()
    assert corpus.test is not None
    assert isinstance(checkpoint.recipe.data, Text)
    length = checkpoint.recipe.data.window
    found = {
        part: {
            "zeros": in_windows(model, text, length=length),
            "carried": carried(model, text, length=length),
        }
        for part, text in (("val", corpus.val), ("test", corpus.test))
    }
    read = read_run(folder)
    evaluations = [{"epoch": one.epoch, "perplexity": one.perplexity} for one in read.evaluations]
    summary = None if read.summary is None else asdict(read.summary)
    return {"n": 1, "perplexity": found, "evaluations": evaluations, "summary": summary}


@torch.no_grad()
def in_windows(model: LSTM, text: IntArray, *, length: int) -> float:
    """Return the perplexity over all words of a text, each predicted from its window alone."""
    inputs, targets = pairs(text)
    total, size = 0.0, ROWS * length
    for x, y in zip(inputs.split(size), targets.split(size), strict=True):
        whole = len(x) - len(x) % length
        if whole:
            total += _sum(model(x[:whole].view(-1, length)).flatten(0, 1), y[:whole])
        if whole < len(x):
            total += _sum(model(x[None, whole:])[0], y[whole:])
    return math.exp(total / len(text))


@torch.no_grad()
def carried(model: LSTM, text: IntArray, *, length: int) -> float:
    """Return the perplexity of a text in ROWS rows that are read in parallel from a zero state.

    So all but the first words of a row are predicted from all before them. The few words at the end
    that make no row longer are left out.
    """
    size = len(text) // ROWS
    inputs, targets = (side[: ROWS * size].view(ROWS, size) for side in pairs(text))
    total, state = 0.0, None
    for x, y in zip(inputs.split(length, 1), targets.split(length, 1), strict=True):
        hidden, state = model.lstm(model.embedding(x), state)
        total += _sum(model.head(hidden).flatten(0, 1), y.flatten())
    return math.exp(total / (ROWS * size))


def pairs(text: IntArray) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the words and the word before each; the first one follows the end of a sentence."""
    return torch.from_numpy(np.roll(text, 1)), torch.from_numpy(text.copy())


def _sum(logits: torch.Tensor, labels: torch.Tensor) -> float:
    return F.cross_entropy(logits, labels, reduction="none").double().sum().item()


if __name__ == "__main__":
    main()
