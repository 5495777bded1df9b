"""The section of a recipe for text, and what of a recipe a text leaves without a meaning."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from largebatch.recipe.sections import MAX_SAMPLES, Data, HeldOut, Section

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


def labels_per_sample(data: Data | Text) -> int:
    """Return how many labels a training sample has: the words of a window, or one class."""
    return data.window if isinstance(data, Text) else 1


def validation_labels(data: Data | Text) -> int:
    """Return how many labels an evaluation counts: the words of a text, or one for each image."""
    if isinstance(data, Text) and data.held_out is None:
        return data.val_words
    return data.val_split * labels_per_sample(data)


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
