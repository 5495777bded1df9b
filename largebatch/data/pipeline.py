"""Batches of images for one worker in every stage, in order.

Everything here is a function of the recipe, the plan and the worker's rank; the chosen decoder
only turns the requests into tensors.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import dataclass, field, replace
from itertools import groupby, product
from typing import Literal

import numpy as np
import torch

from largebatch import accelerator
from largebatch.address import Place
from largebatch.data.augment import augmented, clean_request, open_augmentation, train_request
from largebatch.data.decoding import Decoding, choose_decoding, decoding_threads
from largebatch.data.images import Images, read_images
from largebatch.data.index.index import Index
from largebatch.data.order import samples_at
from largebatch.data.types import (
    Batches,
    Decode,
    HostCache,
    IntArray,
    Request,
    Resources,
    TrainingOrder,
    View,
)
from largebatch.distributed.backend import Backend
from largebatch.recipe.arithmetic.plan import Plan
from largebatch.recipe.data import Data
from largebatch.recipe.recipe import Recipe
from largebatch.storage import ReadProgress, silent

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Types of the images on a GPU, by the recipe's precision."""

READS = 64
"""Images that a worker reads at a time, at most; fast storage uses fewer threads, down to one."""

OpenView = Callable[[Index, View], AbstractContextManager[Decode]]
"""Opens a decoder of the images of an index on this worker's device."""

Split = Literal["train", "val"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """Batches of every stage for one worker.

    The requests of a batch are computed here, from seed and position; the decoder draws nothing.
    """

    seed: int
    plan: Plan
    rank: int
    evaluated_samples: IntArray
    """Rows of the validation data that an evaluation measures."""

    held_out_samples: IntArray
    """Training samples excluded from training and statistics; they decide which stages are kept."""

    data: Data
    train_index: Index
    val_index: Index
    open_decoder: OpenView
    channels_last: bool = False
    """True if images are stored channels last, like the model's weights."""

    dtype: torch.dtype = torch.float32
    operating_threads: int = 0
    """Number of threads that apply data.augment on the host; 0: the device does, or this thread."""

    idle: dict[Split, tuple[ExitStack, Decode]] = field(default_factory=dict)
    """Open decoders of clean images that are not in use: opening one starts threads and, with DALI,
    builds a pipeline and allocates memory; all evaluations share one."""

    @property
    def splits(self) -> dict[str, dict[str, object]]:
        """Identity of the images of each split."""
        return {"train": self.train_index.identity, "val": self.val_index.identity}

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes, by label."""
        return self.val_index.classes

    def training(self, steps: range, *, clean: bool) -> Batches:
        """Yield the device batches of these updates, `accumulation` per update."""
        return self.at(self.positions(steps), clean=clean)

    def at(self, batches: Iterable[range], *, clean: bool) -> Batches:
        """Yield a batch for each of these ranges of positions, in the image size of its first.

        Clean images are prepared like validation images, in the same order of samples. Augmented
        images may change size during the run, with one decoder per size.
        """
        usual = self.data.image_size

        def size_of(positions: range) -> int:
            return usual if clean else self.plan.image_size(positions.start, otherwise=usual)

        for size, of_one_size in groupby(batches, key=size_of):
            requests = (self.training_request(positions, clean=clean) for positions in of_one_size)
            yield from self.decode(self.train_index, requests, image_size=size, clean=clean)

    def decode(
        self,
        index: Index,
        requests: Iterable[Request],
        *,
        image_size: int | None = None,
        clean: bool = True,
    ) -> Batches:
        """Yield a batch for each request, decoded to this size; the default is evaluation's.

        Requests of augmented images need `clean` to be False.
        """
        view = self.view(image_size)
        threads = 0
        if self.data.augment is not None and not clean:
            # Operations are defined on bytes, so images are normalised after them.
            view = view.of_bytes()
            threads = self.operating_threads
        with (
            self.open_decoder(index, view) as decode,
            open_augmentation(threads) as augment,
            closing(augment(decode(requests))) as batches,
        ):
            yield from batches

    def view(self, image_size: int | None = None) -> View:
        """Return how images become the model's input, at this size or the evaluation's."""
        return View(
            image_size=image_size or self.data.image_size,
            mean=self.data.mean,
            std=self.data.std,
            interpolation=self.data.interpolation,
            channels_last=self.channels_last,
            dtype=self.dtype,
        )

    def training_samples(self, positions: range) -> IntArray:
        """Return the images of clean updates at these positions: each once per epoch.

        data.repeats is for augmented images, because clean copies of an image would be equal.
        """
        index = self.train_index
        return samples_at(
            positions,
            seed=self.seed,
            num_samples=len(index),
            trained=index.trained,
            order=self.data.order,
        )

    def random_samples(self, positions: range) -> IntArray:
        """Return the images at these positions of the order without data.order, none held out.

        The first windows of data.order have images of a few chunks, whose statistics are those of
        all images only if the shards are shuffled.
        """
        index = self.train_index
        return samples_at(positions, seed=self.seed, num_samples=len(index), trained=index.trained)

    def clean(self, split: Split, batches: Iterator[IntArray]) -> Batches:
        """Yield batches of these images, prepared as in validation."""
        index = self.train_index if split == "train" else self.val_index
        requests = (self.clean_request(index, samples) for samples in batches)
        if split in self.idle:
            stack, decode = self.idle.pop(split)
        else:
            stack = ExitStack()
            decode = stack.enter_context(self.open_decoder(index, self.view()))
        with stack:  # closes the decoder if it has batches that nobody used
            yield from augmented(decode(requests))
            # Two passes over a split at the same time opened one decoder each; one stays open.
            if split not in self.idle:
                self.idle[split] = stack.pop_all(), decode

    def close(self) -> None:
        """Release the decoders that stay open between evaluations."""
        while self.idle:
            _, (stack, _) = self.idle.popitem()
            stack.close()

    def training_request(self, positions: range, *, clean: bool) -> Request:
        """Return the training request for these positions of the run."""
        if clean:
            return self.clean_request(self.train_index, self.training_samples(positions))
        usual = self.data.image_size
        first = positions.start
        return train_request(
            self.train_index,
            positions,
            self.data,
            self.view(self.plan.image_size(first, otherwise=usual)),
            seed=self.seed,
            mixes=self.plan.is_mixed(first),
        )

    def clean_request(self, index: Index, samples: np.ndarray) -> Request:
        """Return the request for these samples, prepared as in validation."""
        return clean_request(
            index, samples, image_size=self.data.image_size, resize=self.data.eval_resize
        )

    def validation(self) -> Batches:
        """Yield this worker's share of the validation samples, which may be empty."""
        return self.clean("val", self._dealt(self.evaluated_samples, size=self._evaluated_at_once))

    def statistics(self, num_samples: int) -> Batches:
        """Yield this worker's share of `num_samples` random training images, clean.

        Every batch holds whole BatchNorm spans, even if several workers share a span in training.
        """
        samples = self.random_samples(range(num_samples))
        return self.clean("train", self._dealt(samples, size=self.plan.statistics_batch))

    def held_out(self) -> Batches:
        """Yield this worker's share of the held-out training samples, clean; it may be empty."""
        return self.clean("train", self._dealt(self.held_out_samples, size=self._evaluated_at_once))

    @property
    def validation_samples(self) -> IntArray:
        """Rows of the validation data in this worker's share, in the order of `validation`."""
        samples = self.evaluated_samples
        dealt = self._dealt(samples, size=self._evaluated_at_once)
        return np.concatenate([*dealt, samples[:0]])  # of none too, where there are fewer batches

    @property
    def _evaluated_at_once(self) -> int:
        return self.plan.evaluation_batch or self.plan.device_batch

    def positions(self, steps: range) -> Iterator[range]:
        """Yield the positions of this worker's device batches in these updates, in order."""
        for piece, _, accumulation in self.plan.within(steps):
            for step, micro in product(piece, range(accumulation)):
                yield self.plan.positions(step, micro, self.rank)

    def _dealt(self, samples: IntArray, *, size: int) -> Iterator[IntArray]:
        """Yield every n-th batch of `size` for n workers; only the very last may be smaller."""
        # Whole batches are dealt, not single samples: a batch of statistics has whole spans.
        for start in range(self.rank * size, len(samples), self.plan.workers * size):
            yield samples[start : start + size]


def open_images(  # noqa: PLR0913 -- those of read_images
    recipe: Recipe,
    plan: Plan,
    backend: Backend,
    *,
    folder: Place | str | None,
    dataset: str | None = None,
    cache: HostCache | None = None,
    progress: ReadProgress = silent,
) -> Pipeline:
    """Open the images of a recipe for a plan that is known: read, choose a decoding, and join them.

    Arguments and errors are those of read_images and choose_decoding.
    """
    images = read_images(
        recipe, backend, folder=folder, dataset=dataset, cache=cache, progress=progress
    )
    passes = plan.epoch(plan.updates)
    decoding = choose_decoding(recipe, images, backend, passes=passes, progress=progress)
    return open_pipeline(recipe, plan, images, decoding, backend)


def _with_order(index: Index, recipe: Recipe, plan: Plan, backend: Backend) -> Index:
    """Return the index with the order of training, by which its cache keeps blocks."""
    if index.cache is None:
        return index
    first = backend.rank - backend.local_rank
    order = TrainingOrder(
        seed=recipe.seed,
        num_samples=len(index),
        trained=index.trained,
        repeats=recipe.data.repeats,
        order=recipe.data.order,
        device_batch=plan.device_batch,
        ranks=range(first, first + backend.local_size),
        workers=plan.workers,
    )
    return replace(index, cache=replace(index.cache, order=order))


def open_pipeline(
    recipe: Recipe, plan: Plan, images: Images, decoding: Decoding, backend: Backend
) -> Pipeline:
    """Return the batches of one worker: these images, so decoded, in the order of the plan."""
    device = backend.device
    execution = recipe.execution
    resources = Resources(
        device,
        threads=decoding_threads(backend),
        batch_size=max(plan.device_batch, plan.statistics_batch),
        reads=execution.reads or READS,
    )
    return Pipeline(
        seed=recipe.seed,
        plan=plan,
        rank=backend.rank,
        data=recipe.data,
        train_index=_with_order(images.train, recipe, plan, backend),
        val_index=images.validation,
        open_decoder=lambda index, view: decoding.open(index, view, resources),
        channels_last=execution.channels_last(device.type),
        operating_threads=0 if accelerator.is_remote(device) else resources.threads,
        # On a GPU the first layer would convert them itself; so they take half of its memory.
        dtype=DTYPES[recipe.precision] if accelerator.is_remote(device) else torch.float32,
        evaluated_samples=images.evaluated,
        held_out_samples=images.held_out,
    )
