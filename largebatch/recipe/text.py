"""Text and its next words: the section `data`, and the task."""

import math
from typing import Annotated, Literal

from pydantic import Field

from largebatch.recipe.data import HeldOut, Resolution
from largebatch.recipe.section import Section
from largebatch.recipe.task import TOP1, Metric, Sample, Scores, Task

MAX_WORDS = 2**31
"""Words of a split: twenty times WikiText-103's; every worker holds them, 16 GB for these."""

LANGUAGE_MODEL = "lstm"
"""Name of the only built-in model that reads words."""

Words = Annotated[int, Field(gt=0, le=MAX_WORDS)]


class Text(Section):
    """A text, cut into windows of consecutive words; the model predicts every word."""

    source: Literal["text"]
    """`text`: words under --data, one sentence a line: train.txt, val.txt and test.txt, or Penn
    Treebank's ptb.train.txt, ptb.valid.txt and ptb.test.txt."""

    window: Annotated[int, Field(gt=0, le=65_536)]
    """Words of a sample. Samples are shuffled as windows; each starts with a hidden state of zeros,
    in training as in evaluation, so the model sees no word farther back than this (truncated
    back-propagation through time without a carried state)."""

    vocabulary: Annotated[int, Field(ge=2, le=1_000_000)]
    """Number of different words of the training text, the end of a sentence included; it must have
    exactly these. They are the classes that are predicted."""

    train_words: Words
    """Number of words of the training text, with one for the end of each sentence; it must have
    exactly these."""

    val_words: Words
    """Number of words of the validation text, counted alike; it must have exactly these."""

    held_out: HeldOut | None = None
    """For choosing settings without the validation text: this number of windows of the training
    text validate and are not trained on. null: none."""

    @property
    def classes(self) -> int:
        """Number of classes: the words that each prediction chooses from."""
        return self.vocabulary

    @property
    def train_samples(self) -> int:
        """Number of windows of the training text; the last one wraps to its beginning."""
        return -(-self.train_words // self.window)

    @property
    def val_samples(self) -> int:
        """Number of windows of the validation text; the last one may be shorter."""
        return -(-self.val_words // self.window)

    @property
    def train_split(self) -> int:
        """Number of training windows, without those that are held out to validate."""
        return self.train_samples - (self.held_out.samples if self.held_out else 0)

    @property
    def val_split(self) -> int:
        """Number of windows that an evaluation measures."""
        return self.held_out.samples if self.held_out else self.val_samples

    @property
    def val_labels(self) -> int:
        """Words that an evaluation counts."""
        return self.held_out.samples * self.window if self.held_out else self.val_words

    @property
    def resolution(self) -> tuple[Resolution, ...]:
        """None: all windows have the same length."""
        return ()

    def sample(self, image_size: int | None = None) -> Sample:  # noqa: ARG002 -- as in Data
        """Return the shapes of a window."""
        shape = (self.window,)
        return Sample(f"windows of {self.window} words", shape, labels=shape, limit=self.vocabulary)


def _perplexity(found: Scores) -> float:
    try:
        return math.exp(found.loss)
    except OverflowError:
        return math.inf


TEXT = Task(
    data="text",
    samples="windows",
    labelled="words",
    classes="words",
    metrics=(
        Metric(
            key="perplexity",
            name="perplexity",
            title="Perplexity",
            column="Perplexity",
            value=_perplexity,
            lower_is_better=True,
            note="{when}, on {labels}",
            caption="exp(loss) over the {labels} of the validation text, each predicted from those "
            "before it in its window.",
            is_recorded=True,
        ),
        Metric(
            key=TOP1.key,
            name="next word",
            title="Next word",
            column="Next word right",
            value=TOP1.value,
            unit="%",
            note="are the likeliest to the model",
        ),
    ),
    fit=1.0,  # the entropy of a text is not known
    loss_note="Both are means over words.",
)
