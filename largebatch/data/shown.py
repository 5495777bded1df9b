"""A few pictures of every stage of a run as the model gets them, to look at.

The requests, the order and the decoder are the run's own, so what is wrong with the pictures there
(a wrong mean, a crop that cuts off what matters, a flip that changes the meaning) is wrong here.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import islice

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from largebatch.data.augment import training_samples
from largebatch.data.pipeline import Pipeline
from largebatch.data.types import Batches, IntArray, Request
from largebatch.recipe.sections import Data

CLASSES = 10
"""How many classes are shown, if there are as many."""

PASSES = 6
"""In how many passes over the training data a picture is shown, if the run has as many."""

CHECKS = 2
"""How many validation pictures of each class are shown."""

Rows = tuple[tuple[Tensor, ...], ...]
"""By class: pictures as the model gets them, each 3 x H x W."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """One training picture of each class and what becomes of it; beside it, validation."""

    classes: tuple[str, ...]
    training: Rows
    """The picture in the first passes of the run."""

    clean: Rows
    """The same picture in the clean stage, or where BatchNorm statistics are measured."""

    evaluation: Rows
    """CHECKS validation pictures, or as many as there are."""


def show(pipeline: Pipeline) -> Shown:
    """Decode one picture of each of the classes that the run comes to first."""
    plan, index = pipeline.plan, pipeline.train_index
    samples = _one_of_each_class(pipeline)
    labels = index.labels[samples]
    num_passes = max(1, min(PASSES, math.floor(plan.epoch(plan.train_steps))))
    places = _places(pipeline, samples, num_passes)

    def ask(positions: IntArray, *, clean: bool) -> Iterator[Request]:
        each = positions.ravel().tolist()
        return (pipeline.training_request(range(p, p + 1), clean=clean) for p in each)

    training = _images(pipeline.decode(index, ask(places, clean=False)))
    clean = _images(pipeline.decode_clean(index, ask(places[:, 0], clean=True)))
    return Shown(
        classes=tuple(index.classes[label] for label in labels),
        training=_in_rows(training, [num_passes] * len(samples)),
        clean=_in_rows(clean, [1] * len(samples)),
        evaluation=_validation(pipeline, labels),
    )


def denormalized(image: Tensor, data: Data) -> npt.NDArray[np.uint8]:
    """Return a picture the model gets, 3 x H x W, as H x W x 3 bytes; what is no colour is cut."""
    mean, std = (torch.tensor(value).view(3, 1, 1) for value in (data.mean, data.std))
    values = image.mul(std).add(mean).mul(255).round().clamp(0, 255)
    return values.to(torch.uint8).permute(1, 2, 0).contiguous().numpy()


def _one_of_each_class(pipeline: Pipeline) -> IntArray:
    """Return the first sample of each class in the order of the run, sorted by class."""
    once = range(pipeline.plan.train_samples)
    order = training_samples(pipeline.train_index, once, seed=pipeline.recipe.seed)
    labels = pipeline.train_index.labels[order]
    _, first = np.unique(labels, return_index=True)
    chosen = np.sort(first)[:CLASSES]
    return order[chosen[np.argsort(labels[chosen])]]


def _places(pipeline: Pipeline, samples: IntArray, num_passes: int) -> IntArray:
    """Return len(samples) x num_passes positions of the run at which these samples come."""
    number = pipeline.plan.train_samples
    columns = []
    for start in range(0, num_passes * number, number):
        positions = range(start, start + number)
        order = training_samples(pipeline.train_index, positions, seed=pipeline.recipe.seed)
        columns.append([start + int(np.flatnonzero(order == sample)[0]) for sample in samples])
    return np.array(columns, dtype=np.int64).T


def _validation(pipeline: Pipeline, labels: IntArray) -> Rows:
    """Return the first CHECKS validation pictures of each of these classes, or what there are."""
    index = pipeline.val_index
    chosen = [np.flatnonzero(index.labels == label)[:CHECKS] for label in labels]
    requests = (pipeline.clean_request(index, sample[None]) for row in chosen for sample in row)
    return _in_rows(_images(pipeline.decode_clean(index, requests)), list(map(len, chosen)))


def _images(batches: Batches) -> Iterator[Tensor]:
    """Give the pictures of batches of one on the host; close the batches."""
    with closing(batches):
        for batch in batches:
            # sync: they are drawn by the processor; the copy is ours when the decoder ends
            yield batch.images[0].to("cpu", copy=True)


def _in_rows(images: Iterator[Tensor], lengths: Sequence[int]) -> Rows:
    """Divide all of these pictures into rows."""
    rows = tuple(tuple(islice(images, length)) for length in lengths)
    assert next(images, None) is None, "there are as many pictures as were asked for"
    return rows
