"""Words in place of images, for studies of servers: the LSTM of Jaeger et al. (DIDL 2018).

Their larger model is the language model of Zaremba et al. 2014 (arXiv:1409.2329): two LSTM layers
of 200 units on the Penn Treebank. A study times its gradients and updates in each layout of the
servers. It trains no language model: nothing evaluates it, and it starts every window with a hidden
state of zeros, so that a window is a sample like an image and the core orders both alike.

A recipe whose `model.name` is `lstm` has it: `data.classes` is the number of words in the
vocabulary, `data.train_samples` that of the windows, and --data names the folder of FILE.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from largebatch.address import Place
from largebatch.data.decoders.synthetic import synthetic_index
from largebatch.data.pipeline import Pipeline
from largebatch.data.types import Batch, DecodedBatches, Request
from largebatch.distributed.agreement import share_weights
from largebatch.errors import DataError, RecipeError
from largebatch.models.of_recipe import model_without_memory
from largebatch.recipe.arithmetic.plan import make_plan
from largebatch.recipe.loading import validate_tree
from largebatch.recipe.recipe import Recipe
from largebatch.recipe.section import Section
from largebatch.runs.build import join
from largebatch.runs.options import Options
from largebatch.runs.state import build_session, build_state
from largebatch.training.loop import Criterion
from largebatch.training.session import Session

NAME = "lstm"
"""Name of the model in a recipe."""

FILE = "ptb.train.txt"
"""Name of the file with the words: one sentence per line, as Mikolov's split of the Treebank."""

END = "<eos>"
"""Word at the end of each sentence."""

INITIAL = 0.1
"""All initial weights are drawn between -INITIAL and INITIAL (Zaremba et al., section 4.1)."""


Count = Annotated[int, Field(ge=1, le=10_000)]


class Arguments(Section):
    """The arguments of the model in a recipe."""

    units: Count = 200
    """Units of each layer, and length of a word's embedding."""

    layers: Count = 2
    words: Count = 35
    """Number of words in a window."""


class LSTM(nn.Module):
    """Embedding, LSTM layers and a layer over the vocabulary, without dropout.

    Maps word numbers, N x T, to the logits of the next word, N x T x num_words.
    """

    def __init__(self, num_words: int, *, units: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_words, units)
        self.lstm = nn.LSTM(units, units, layers, batch_first=True)
        self.head = nn.Linear(units, num_words)
        for weight in self.parameters():
            nn.init.uniform_(weight, -INITIAL, INITIAL)

    def forward(self, words: Tensor) -> Tensor:
        """Return the logits of the next word at each position."""
        hidden, _ = self.lstm(self.embedding(words))
        logits: Tensor = self.head(hidden)
        return logits


def build_lstm(recipe: Recipe) -> LSTM:
    """Build the model from the recipe's seed; raise RecipeError for wrong arguments."""
    torch.manual_seed(recipe.seed)
    arguments = arguments_of(recipe)
    return LSTM(recipe.data.classes, units=arguments.units, layers=arguments.layers)


def arguments_of(recipe: Recipe) -> Arguments:
    """Return the arguments of the model; raise RecipeError with every mistake."""
    return validate_tree(Arguments, recipe.model.arguments, source=f"model.arguments of {NAME}")


def shapes_of(recipe: Recipe) -> nn.Module:
    """Return the model of a recipe on the meta device: weights with shapes and no numbers."""
    if recipe.model.name == NAME:
        with torch.device("meta"):
            return build_lstm(recipe)
    return model_without_memory(recipe.model, classes=recipe.data.classes)


def read_words(folder: Place | str | None, *, num_words: int) -> Tensor:
    """Return the numbers of all words of FILE in their order; the most frequent word is 0.

    Raises DataError without the file, and if its vocabulary is not `num_words` long.
    """
    path = Path(str(folder or ".")) / FILE
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(
            f"{path}: {error.strerror}; pass --data RECIPE=DIR, the folder of the Penn Treebank's "
            f"{FILE}"
        ) from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: is not UTF-8: {error.reason} at byte {error.start:,}") from None
    words = text.replace("\n", f" {END} ").split()
    number_of = {word: number for number, (word, _) in enumerate(Counter(words).most_common())}
    if len(number_of) != num_words:
        raise DataError(
            f"{path}: has {len(number_of):,} different words, and data.classes is {num_words:,}"
        )
    return torch.tensor([number_of[word] for word in words])


def windows_of(words: Tensor, *, length: int) -> tuple[Tensor, Tensor]:
    """Return the windows of a text, and the word after each of their words: both N x `length`.

    >>> inputs, targets = windows_of(torch.arange(8), length=3)
    >>> inputs.tolist(), targets.tolist()
    ([[0, 1, 2], [3, 4, 5]], [[1, 2, 3], [4, 5, 6]])
    """
    # The last word of the text has no next one.
    number = (len(words) - 1) // length
    inputs, targets = words[: number * length], words[1 : number * length + 1]
    return inputs.view(number, length), targets.view(number, length)


def mean_over_words(criterion: Criterion) -> Criterion:
    """Return a criterion that sums over the windows of a batch the mean of `criterion` over words.

    The loop divides by the number of samples: the gradient is the mean over all words.
    """

    def of_windows(logits: Tensor, targets: Tensor) -> Tensor:
        return criterion(logits.flatten(0, 1), targets.flatten()) / targets.shape[1]

    return of_windows


@contextmanager
def open_words(recipe: Recipe, options: Options) -> Iterator[Session]:
    """Build the objects of a run of the LSTM, on all workers, as `open_session` does of images.

    Raises DataError for another number of windows than data.train_samples.
    """
    arguments = arguments_of(recipe)
    of_images = {
        "data.mix": recipe.data.mix,
        "data.augment": recipe.data.augment,
        "data.erase": recipe.data.erase,
        "loss.class_weights": recipe.loss.class_weights,
    }
    for key, value in of_images.items():
        if value is not None:
            raise RecipeError(f"{key} is for images, and {NAME} is trained on words: leave it out")
    facts = {"command": "study", **recipe.model_dump(mode="json")}
    with join(options, facts, starting=True) as backend:
        plan = make_plan(recipe, workers=backend.world_size, backend=backend.name)
        model = build_lstm(recipe).to(backend.device)
        words = read_words(options.data, num_words=recipe.data.classes)
        length = arguments.words
        inputs, targets = windows_of(words.to(backend.device), length=length)
        if len(inputs) != recipe.data.train_samples:
            raise DataError(
                f"{FILE} has {len(inputs):,} windows of {length} words, and "
                f"data.train_samples is {recipe.data.train_samples:,}"
            )

        def decode(requests: Iterable[Request]) -> DecodedBatches:
            for request in requests:
                samples = torch.from_numpy(request.samples).to(backend.device)
                yield request, Batch(inputs[samples], targets[samples])

        # The index has one pixel for each window: the order of samples needs their number alone.
        content = hashlib.sha256(words.numpy().tobytes())  # all workers must have the same text
        index = replace(
            synthetic_index(len(inputs), recipe.data.classes, 1), digest=content.hexdigest()
        )
        pipeline = Pipeline(
            seed=recipe.seed,
            plan=plan,
            rank=backend.rank,
            evaluated_samples=np.empty(0, dtype=np.int64),
            held_out_samples=np.empty(0, dtype=np.int64),
            data=recipe.data,
            train_index=index,
            val_index=index,
            open_decoder=lambda *_: nullcontext(decode),
        )
        share_weights(model, backend, facts={"plan": asdict(plan), "index": pipeline.splits})
        with closing(build_state(recipe, plan, model, backend)) as state:
            session = build_session(recipe, pipeline, backend, state, folder=options.out)
            yield replace(session, criterion=mean_over_words(session.criterion))
