"""The batches of one run: which samples one worker sees, in which order, in every stage.

Everything here is a function of the recipe, the plan and the worker's rank. Only the pipelines that
extend `Pipeline` know what a sample is.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, Literal, Self

import numpy as np

from largebatch.data.order import Stream, divide, sample_ids
from largebatch.data.types import Batch, Batches, IntArray
from largebatch.errors import DataError
from largebatch.recipe.arithmetic.plan import Plan
from largebatch.recipe.recipe import Recipe
from largebatch.recipe.sections import Section

Split = Literal["train", "val"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline(ABC):
    """Opens the batches of every stage for one worker."""

    recipe: Recipe
    plan: Plan
    rank: int
    evaluated_samples: IntArray
    """The rows of the validation data that an evaluation measures."""

    held_out_samples: IntArray
    """Training samples that no stage is trained or measured on, and that decide on stages."""

    lost: set[int] = field(default_factory=set)
    """Workers that the others go on without, and that no share is for any more."""

    @property
    @abstractmethod
    def splits(self) -> dict[str, dict[str, object]]:
        """What identifies the samples of each split."""

    @property
    def files(self) -> Mapping[str, bytes]:
        """What a run folder keeps of the data, by the names of the files."""
        return {}

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes, by label, where mistakes are listed by class; else none."""
        return ()

    @property
    def unusable(self) -> int:
        """How many samples were left out because they cannot be used."""
        return 0

    @property
    def remarks(self) -> list[str]:
        """What is to be known about the data when a run begins."""
        return []

    def require_same_labels(self, origin: Mapping[str, Any], *, source: str) -> None:  # noqa: B027
        """Raise CheckpointError where a checkpoint was trained with labels of another meaning.

        `origin` is what the checkpoint has of its data; `source` begins the message. The recipe
        alone identifies the classes of images.
        """

    def close(self) -> None:  # noqa: B027 -- most have nothing to release
        """Release what stays open between two passes over samples."""

    def replica(self, plan: Plan, *, seed: int) -> Self:
        """Return the pipeline of a replica, whose batches this worker alone goes through."""
        recipe = self.recipe.model_copy(update={"seed": seed})
        return replace(self, recipe=recipe, plan=plan, rank=0)

    @abstractmethod
    def training(self, steps: range, *, clean: bool) -> Batches:
        """Return the device batches of these updates, in each as many as its global batch needs.

        Clean samples are prepared like validation samples, in the same order.
        """

    @abstractmethod
    def at(self, parts: Iterable[range], *, clean: bool) -> Batches:
        """Return a batch for each of these ranges of positions of the run, as training shows them.

        Clean ones are those of clean updates.
        """

    @abstractmethod
    def training_samples(self, positions: range) -> IntArray:
        """Return the samples at these positions of the run: each once an epoch, none held out."""

    @abstractmethod
    def clean(self, split: Split, parts: Iterator[IntArray]) -> Batches:
        """Return batches of these samples as validation shows them."""

    def validation(self) -> Batches:
        """Return this worker's share of the validation samples, which may be none."""
        return self.clean("val", self._dealt(self.evaluated_samples, size=self.plan.device_batch))

    def test(self) -> Batches:
        """Return this worker's share of the test data; DataError where there is none."""
        raise DataError(
            f"--test: images have training and validation data alone; data.source is "
            f"{self.recipe.data.source}"
        )

    def statistics(self, num_samples: int) -> Batches:
        """Return this worker's share of the first `num_samples` of the training order, clean.

        Every batch holds whole BatchNorm spans, also where several workers share one in training.
        """
        samples = self.training_samples(range(num_samples))
        return self.clean("train", self._dealt(samples, size=self.plan.statistics_batch))

    def held_out(self) -> Batches:
        """Return this worker's share of the training samples held out, clean; it may be none."""
        return self.clean("train", self._dealt(self.held_out_samples, size=self.plan.device_batch))

    @property
    def workers(self) -> Sequence[int]:
        """The workers that samples are dealt out to, rising."""
        return [worker for worker in range(self.plan.workers) if worker not in self.lost]

    @property
    def validation_samples(self) -> IntArray:
        """The rows of the validation data that `validation` shows this worker, in its order."""
        samples = self.evaluated_samples
        parts = self._dealt(samples, size=self.plan.device_batch)
        return np.concatenate([*parts, samples[:0]])

    def positions(self, steps: range) -> Iterator[range]:
        """Give the positions of this worker's device batches in these updates, in order."""
        for part, _, accumulation in self.plan.within(steps):
            for step, micro in product(part, range(accumulation)):
                yield self.plan.positions(step, micro, self.rank)

    def _dealt(self, samples: IntArray, *, size: int) -> Iterator[IntArray]:
        """Deal batches of `size` out to the workers in turn; only the very last may be smaller."""
        place, step = self.workers.index(self.rank), len(self.workers) * size
        for start in range(place * size, len(samples), step):
            yield samples[start : start + size]


@dataclass(frozen=True, slots=True)
class CleanSamples:
    """Clean training samples, which can be gone through again."""

    pipeline: Pipeline
    samples: int

    def __iter__(self) -> Iterator[Batch]:
        with closing(self.pipeline.statistics(self.samples)) as batches:
            yield from batches


def samples_at(
    positions: range, *, seed: int, num_samples: int, trained: IntArray | None
) -> IntArray:
    """Return the samples at these positions of the run, of those that are trained on; None: all."""
    if trained is None:
        return sample_ids(positions, seed=seed, num_samples=num_samples)
    return trained[sample_ids(positions, seed=seed, num_samples=len(trained))]


def divide_samples(
    recipe: Recipe, num_train: int, num_val: int
) -> tuple[IntArray | None, IntArray, IntArray]:
    """Return the samples that are trained on, None for all, those that validate, those that decide.

    Those that validate are of the training samples where the recipe holds some out for that.
    """
    trained, evaluated, decides = None, np.arange(num_val), np.empty(0, dtype=np.int64)
    section = recipe.data.held_out
    if section is not None:
        trained, evaluated = divide(
            num_train, held_out=section.samples, seed=section.seed, stream=Stream.VALIDATION
        )
    number = recipe.polish.held_out if recipe.polish else None
    if number is not None:
        rows = np.arange(num_train) if trained is None else trained
        kept, chosen = divide(len(rows), held_out=number, seed=recipe.seed)
        trained, decides = rows[kept], rows[chosen]
    return trained, evaluated, decides


def require_described(data: Section, found: Mapping[str, int], *, where: str, what: str) -> None:
    """Raise DataError where samples were found that are not those the recipe was written for.

    `found` has numbers by the keys of the section; `what` was found stands in the message.
    """
    wrong = {key: number for key, number in found.items() if number != getattr(data, key)}
    if wrong:
        expected = ", ".join(f"{key} {getattr(data, key)}" for key in wrong)
        actual = ", ".join(f"{key} {number}" for key, number in wrong.items())
        change = " ".join(f"--set data.{key}={number}" for key, number in wrong.items())
        raise DataError(
            f"{where}: the recipe describes {expected}, {what} has {actual}; if that is meant, "
            f"add {change}"
        )
