"""Text and its next words: the section of a recipe, the task, the settings that do not apply."""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from largebatch.recipe.sections import MAX_SAMPLES, HeldOut, Resolution, Section
from largebatch.recipe.task import TOP1, Metric, Sample, Scores, Task

if TYPE_CHECKING:
    from largebatch.recipe.recipe import Recipe

MAX_WORDS = 2**31
"""Of a split: twenty times WikiText-103's; every worker holds them, in 16 GB for these."""

LANGUAGE_MODEL = "lstm"
"""The one model of ours that reads words."""

Words = Annotated[int, Field(gt=0, le=MAX_WORDS)]


class Text(Section):
    """A text, cut into windows of consecutive words; in each, every word is to be predicted."""

    source: Literal["text"]
    """`text`: words under --data, one sentence a line: train.txt, val.txt and test.txt, or Penn
    Treebank's ptb.train.txt, ptb.valid.txt and ptb.test.txt."""

    window: Annotated[int, Field(gt=0, le=65_536)]
    """Words of a sample. The order of the samples is that of windows; each begins with a hidden
    state of zeros, in training as in evaluation, so no word is seen farther back than this
    (truncated back-propagation through time without a carried state)."""

    vocabulary: Annotated[int, Field(ge=2, le=1_000_000)]
    """Different words of the training text, the end of a sentence included; it must have exactly
    these. They are the classes that are predicted."""

    train_words: Words
    """Words of the training text, with one for the end of each sentence; it must have exactly
    these."""

    val_words: Words
    """Words of the validation text, counted alike; it must have exactly these."""

    held_out: HeldOut | None = None
    """To choose settings without the validation text: so many windows of the training text validate
    and are not trained on. null: none."""

    @property
    def classes(self) -> int:
        """What a word is predicted from."""
        return self.vocabulary

    @property
    def train_samples(self) -> int:
        """Windows of the training text; the last one runs on at its beginning."""
        return -(-self.train_words // self.window)

    @property
    def val_samples(self) -> int:
        """Windows of the validation text; the last one may be shorter."""
        return -(-self.val_words // self.window)

    @property
    def train_split(self) -> int:
        """Training windows less those that are held out to validate."""
        return self.train_samples - (self.held_out.samples if self.held_out else 0)

    @property
    def val_split(self) -> int:
        """Windows that an evaluation measures."""
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


def misfits(recipe: "Recipe") -> Iterator[str]:
    """Yield what of a recipe does not go with its data: settings of images, or the model."""
    if not isinstance(recipe.data, Text):
        if recipe.model.name == LANGUAGE_MODEL:
            yield f"model.name: {LANGUAGE_MODEL} reads words: it needs data.source: text"
        return
    if recipe.data.train_samples > MAX_SAMPLES:
        yield (
            f"data.window ({recipe.data.window}) cuts the text into {recipe.data.train_samples:,} "
            f"samples, expected at most {MAX_SAMPLES:,}: give longer windows"
        )
    if recipe.model.name == LANGUAGE_MODEL and recipe.batch.bn_span is not None:
        yield f"batch.bn_span: {LANGUAGE_MODEL} has no BatchNorm; make it null"
    if recipe.model.name == LANGUAGE_MODEL and recipe.polish is not None:
        yield f"polish is for models with BatchNorm, and {LANGUAGE_MODEL} has none: leave it out"
    execution = recipe.execution
    settings = {
        "execution.decoder": execution.decoder,
        "execution.reads": execution.reads,
        "execution.cache": execution.cache,
        "execution.memory_format": execution.memory_format,
        "tracking: mlperf": "mlperf" in recipe.tracking or None,
    }
    for key, value in settings.items():
        if value is not None:
            yield f"{key} is for images, and data.source is text: leave it out"
