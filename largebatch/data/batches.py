"""Batches of one run: the samples of each worker in every stage, in order.

Everything here is a function of the recipe, the plan and the worker's rank. Only the pipelines that
extend `Pipeline` know what a sample is.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import product
from typing import Literal

import numpy as np

from largebatch.data.order import Stream, divide, sample_ids
from largebatch.data.types import Batch, Batches, IntArray
from largebatch.errors import DataError
from largebatch.recipe.arithmetic.plan import Plan
from largebatch.recipe.recipe import Recipe
from largebatch.recipe.section import Section

Split = Literal["train", "val"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline(ABC):
    """Batches of every stage for one worker."""

    seed: int
    plan: Plan
    rank: int
    evaluated_samples: IntArray
    """Rows of the validation data that an evaluation measures."""

    held_out_samples: IntArray
    """Training samples excluded from training and statistics; they decide which stages are kept."""

    dropped: set[int] = field(default_factory=set)
    """Workers that the run goes on without; they get no samples."""

    @property
    @abstractmethod
    def splits(self) -> dict[str, dict[str, object]]:
        """Identity of the samples of each split."""

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes, by label; empty if errors are not listed by class."""
        return ()

    @property
    def unusable(self) -> int:
        """Number of samples left out because they cannot be used."""
        return 0

    @property
    def remarks(self) -> list[str]:
        """Remarks about the data, logged at the start of a run."""
        return []

    def close(self) -> None:  # noqa: B027 -- most have nothing to release
        """Release the resources that stay open between passes over samples."""

    @abstractmethod
    def training(self, steps: range, *, clean: bool) -> Batches:
        """Yield the device batches of these updates, `accumulation` per update.

        Clean samples are prepared like validation samples, in the same order.
        """

    @abstractmethod
    def at(self, parts: Iterable[range], *, clean: bool) -> Batches:
        """Yield a training batch for each of these ranges of positions of the run.

        Clean batches are prepared like validation samples.
        """

    @abstractmethod
    def training_samples(self, positions: range) -> IntArray:
        """Return the samples at these positions of the run: each once per epoch, none held out."""

    @abstractmethod
    def clean(self, split: Split, parts: Iterator[IntArray]) -> Batches:
        """Yield batches of these samples, prepared as in validation."""

    def validation(self) -> Batches:
        """Yield this worker's share of the validation samples, which may be empty."""
        return self.clean("val", self._dealt(self.evaluated_samples, size=self.plan.device_batch))

    def statistics(self, num_samples: int) -> Batches:
        """Yield this worker's share of the first `num_samples` of the training order, clean.

        Every batch holds whole BatchNorm spans, even if several workers share a span in training.
        """
        samples = self.training_samples(range(num_samples))
        return self.clean("train", self._dealt(samples, size=self.plan.statistics_batch))

    def held_out(self) -> Batches:
        """Yield this worker's share of the held-out training samples, clean; it may be empty."""
        return self.clean("train", self._dealt(self.held_out_samples, size=self.plan.device_batch))

    @property
    def workers(self) -> Sequence[int]:
        """Workers that share the samples, in rising order."""
        return [worker for worker in range(self.plan.workers) if worker not in self.dropped]

    @property
    def validation_samples(self) -> IntArray:
        """Rows of the validation data in this worker's share, in the order of `validation`."""
        samples = self.evaluated_samples
        parts = self._dealt(samples, size=self.plan.device_batch)
        return np.concatenate([*parts, samples[:0]])

    def positions(self, steps: range) -> Iterator[range]:
        """Yield the positions of this worker's device batches in these updates, in order."""
        for part, _, accumulation in self.plan.within(steps):
            for step, micro in product(part, range(accumulation)):
                yield self.plan.positions(step, micro, self.rank)

    def _dealt(self, samples: IntArray, *, size: int) -> Iterator[IntArray]:
        """Yield every n-th batch of `size` for n workers; only the very last may be smaller."""
        place, step = self.workers.index(self.rank), len(self.workers) * size
        for start in range(place * size, len(samples), step):
            yield samples[start : start + size]


@dataclass(frozen=True, slots=True)
class CleanSamples:
    """Clean training samples; each iteration is a new pass."""

    pipeline: Pipeline
    samples: int

    def __iter__(self) -> Iterator[Batch]:
        with closing(self.pipeline.statistics(self.samples)) as batches:
            yield from batches


def samples_at(
    positions: range, *, seed: int, num_samples: int, trained: IntArray | None
) -> IntArray:
    """Return the samples at these positions of the run, from `trained` or, if None, from all."""
    if trained is None:
        return sample_ids(positions, seed=seed, num_samples=num_samples)
    return trained[sample_ids(positions, seed=seed, num_samples=len(trained))]


def divide_samples(
    recipe: Recipe, num_train: int, num_val: int
) -> tuple[IntArray | None, IntArray, IntArray]:
    """Return the training samples (None: all), the validation samples and the deciding ones.

    The validation samples are training samples if the recipe holds some out for validation; the
    deciding ones decide which stages of polishing are kept.
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
    """Raise DataError unless the counts in `found`, by key of the section, match the recipe.

    `what` names the data in the message.
    """
    wrong = {key: number for key, number in found.items() if number != getattr(data, key)}
    if wrong:
        expected = ", ".join(f"{key} {getattr(data, key)}" for key in wrong)
        actual = ", ".join(f"{key} {number}" for key, number in wrong.items())
        change = " ".join(f"--set data.{key}={number}" for key, number in wrong.items())
        raise DataError(
            f"{where}: the recipe describes {expected}, {what} has {actual}; if that is intended, "
            f"add {change}"
        )
