"""Exact distributed evaluation: every sample counts once.

Each worker counts over its own share, which may be empty. Counts are summed over batches and
workers. Means of batch means and samplers that pad would give wrong results.

The confidence of a sample is the highest probability that the model gives to a class. Its mean and
deviation are defined as in LRBench (arXiv:1908.06477). For a very confident model the deviation is
small compared with the mean, and a sum of squares would lose it even in float64. So each class has
the sum and the squared deviations from its own mean, which can be merged exactly (`_about`).
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from largebatch.distributed.backend import Backend, sum_over_workers
from largebatch.distributed.connection import running_backend
from largebatch.models.inputs import class_numbers, images_of, labels_of, scores_of
from largebatch.models.wrappers import (
    device_of,
    evaluation_mode,
    input_of,
    local_model,
    unsharded,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassMetrics:
    """Metrics of each class: columns, by class number."""

    samples: tuple[int, ...]
    correct: tuple[int, ...]
    average_confidence: tuple[float, ...]
    """Mean confidence over the correct samples of a class; NaN where none is correct."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """Accuracy and confidence over all samples of all workers.

    Standard deviations divide by the number of samples, as in LRBench's code: the samples are the
    whole population.
    """

    top1: float
    """Fraction of samples whose label has the highest score, 0 .. 1. If samples have several
    labels, each label counts as a sample."""

    top5: float
    """Fraction of samples whose label is among the five highest scores."""

    loss: float
    """Mean cross-entropy, without label smoothing."""

    samples: int

    average_confidence: float
    """AC: mean confidence over the correct samples; NaN where none is correct."""

    confidence_deviation: float
    """CD: standard deviation of the confidence over the correct samples; NaN if none is correct."""

    class_confidence_deviation: float
    """CDAC: standard deviation of AC over the classes. Classes without a correct sample are left
    out; NaN if all are."""

    classes_never_correct: int | None
    """Number of classes that have samples, none of them correct. If samples have several labels,
    this is None and the confidences are NaN: most classes never have the highest score there."""

    by_class: ClassMetrics


@torch.no_grad()
def evaluate(
    model: nn.Module,
    batches: Iterable[Any],
    backend: Backend | None = None,
    *,
    expected: int | None = None,
    each: Callable[[Tensor, Tensor], object] = lambda *_: None,
    forward: Callable[[nn.Module, Any], Any] | None = None,
) -> Metrics:
    """Evaluate a model on this worker's batches, together with all other workers.

    A batch is a tuple that begins with images (N x C x ...) and labels (N class numbers of any
    integer type), on any device, or a mapping (see `models/inputs.py`). N may differ, and a worker
    may have no batch. Samples may have several labels each (N x T, with scores N x T x K); then
    each label counts. Without a `backend`, the workers that torch.distributed or Horovod has
    connected are used (`running_backend`). The model may be of any kind that `polish` takes,
    returns scores or an object or mapping with `logits`, and is in evaluation mode during the call.
    `expected` is the number of labels over all workers, if it is known. `each` is called with the
    scores and labels of every batch.

    `forward(model, batch)` runs models of several inputs or outputs and takes any batch: it returns
    the scores, or scores and labels. It gets the batch as it is, and the module inside wrappers.

    Raises ValueError if the number of labels is not `expected`, if there are no labels or some are
    not class numbers, if a batch or an output has another form, if workers have different classes,
    or if the model is sharded (FSDP1, tensor parallelism). Raises BackendError if workers are not
    connected.
    """
    model = local_model(model)
    device = device_of(model)
    if backend is None:
        backend = running_backend(device)
    tally = _Tally(device)
    with unsharded(model), evaluation_mode(model):
        as_input = input_of(model)
        for batch in batches:
            output = forward(model, batch) if forward else model(as_input(images_of(batch)))
            if forward and isinstance(output, tuple) and len(output) == 2:
                output, labels = output
            else:
                labels = labels_of(batch)
            scores = scores_of(output).to(device)  # the last layers may be elsewhere
            labels = class_numbers(labels, scores).to(device, non_blocking=True)
            labels = tally.add(scores, labels)
            each(scores, labels)
    tally.sum(backend)
    samples = tally.samples
    if expected is not None and samples != expected:
        raise ValueError(
            f"{samples} samples were counted on {backend.world_size} workers, expected "
            f"{expected}; a sampler that pads or drops (DistributedSampler, drop_last) changes it"
        )
    if not samples:
        raise ValueError("there is nothing to evaluate: no worker was given a batch")
    return tally.metrics()


_SAMPLES, _CORRECT, _TOP5, _LOSS, _CONFIDENCE, _SQUARES = range(6)
"""Rows of a table with a column for each class: number of samples, of correct ones, and of those
whose label is among the five highest scores; sum of the losses; over the correct samples, sum of
the confidences and of their squared deviations from the mean of the class."""


class _Tally:
    """Counts in float64, where integers below 2**53 are exact; nothing waits until `sum`.

    Memory grows with the number of classes, not of samples.
    """

    def __init__(self, device: torch.device) -> None:
        self._table = torch.zeros(6, 0, dtype=torch.float64, device=device)
        """Table of counts; it has no columns until the first batch gives the number of classes."""

        self._several_labels = False
        self._outside, self._limits = torch.zeros(3, dtype=torch.int64, device=device).split([1, 2])
        """Number of labels that are not classes; the smallest of these and the largest, or 0."""

    def add(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Count one batch; return its labels, those that are not classes moved to one."""
        self._several_labels = labels.ndim > 1
        within = labels.clamp(0, logits.shape[-1] - 1)
        outside = labels.where(within != labels, 0).flatten()
        self._outside = self._outside + outside.count_nonzero()
        self._limits = torch.stack(torch.cat([self._limits, outside]).aminmax())
        self._count(logits.flatten(0, -2), within.flatten())
        return within

    def _count(self, logits: Tensor, labels: Tensor) -> None:
        if not self._table.shape[1]:
            self._table = self._table.new_zeros(6, logits.shape[1])
        best = _best(_at_least_fp32(logits)).eq(labels.unsqueeze(1))
        correct = best[:, 0]
        log_probabilities = logits.double().log_softmax(1)
        loss = F.nll_loss(log_probabilities, labels, reduction="none")
        confidence = log_probabilities.amax(1).exp().where(correct, 0.0)
        rows = torch.stack([torch.ones_like(loss), correct, best.any(1), loss, confidence])
        sums = self._table[:_SQUARES].index_add(1, labels, rows)
        means = _means(sums)
        deviations = (confidence - means[labels]).where(correct, 0.0)
        squares = _about(means, self._table).index_add(0, labels, deviations.square())
        self._table = torch.cat([sums, squares.unsqueeze(0)])

    def sum(self, backend: Backend) -> None:
        """Sum the counts over all workers and copy them to the CPU."""
        width = self._table.shape[1]
        own = torch.tensor([width, width**2, width > 0, self._several_labels])
        found = torch.cat([own.to(self._outside), self._outside]).to(backend.device)
        backend.all_reduce(found).wait()
        total, squares, counting, several, outside = found.tolist()  # sync: how wide the table is
        self._several_labels = several > 0
        common = total // max(1, counting)
        if (common * counting, common * total) != (total, squares):  # some differ from their mean
            widths = backend.all_gather(found.new_tensor(width)).tolist()  # sync: for the message
            raise ValueError(f"workers have scores for other classes: {sorted({*widths} - {0})}")
        if outside:
            limits = backend.all_gather(self._limits.to(backend.device))
            such = {limits.min().item(), limits.max().item()} - {0}  # sync: for the message
            raise ValueError(
                f"{outside} labels, such as {' and '.join(map(str, such))}, are not class numbers: "
                f"the model has {common} classes, 0 to {common - 1}; leave unlabelled samples out"
            )
        if not width:
            self._table = self._table.new_zeros(6, common)
        sums = self._table[:_SQUARES].clone()
        sum_over_workers(sums, backend)
        squares = _about(_means(sums), self._table)
        sum_over_workers(squares, backend)
        self._table = torch.cat([sums, squares.unsqueeze(0)]).cpu()  # sync: the result is wanted

    @property
    def samples(self) -> int:
        """Number of samples."""
        return int(self._table[_SAMPLES].sum())

    def metrics(self) -> Metrics:
        """Return the metrics of at least one sample."""
        by_class = self._table.numpy()
        _, num_correct, top5, loss, confidence, _ = by_class.sum(axis=1).tolist()
        samples, correct = by_class[_SAMPLES], by_class[_CORRECT]
        known = correct > 0
        own = np.where(known, by_class[_CONFIDENCE] / np.maximum(correct, 1), np.nan)
        average = confidence / num_correct if num_correct else math.nan
        squares = _about(torch.tensor(average, dtype=torch.float64), self._table).sum().item()
        found = Metrics(
            top1=num_correct / self.samples,
            top5=top5 / self.samples,
            loss=loss / self.samples,
            samples=self.samples,
            average_confidence=average,
            confidence_deviation=math.sqrt(squares / num_correct) if num_correct else math.nan,
            class_confidence_deviation=own[known].std().item() if num_correct else math.nan,
            classes_never_correct=int(np.count_nonzero((samples > 0) & ~known)),
            by_class=ClassMetrics(
                samples=tuple(samples.astype(np.int64).tolist()),
                correct=tuple(correct.astype(np.int64).tolist()),
                average_confidence=tuple(own.tolist()),
            ),
        )
        if not self._several_labels:
            return found
        return replace(
            found,
            average_confidence=math.nan,
            confidence_deviation=math.nan,
            class_confidence_deviation=math.nan,
            classes_never_correct=None,
        )


def _means(sums: Tensor) -> Tensor:
    """Return the mean confidence of each class; 0 where no sample is correct."""
    return sums[_CONFIDENCE] / sums[_CORRECT].clamp(min=1)


def _about(mean: Tensor, table: Tensor) -> Tensor:
    """Return the sums of squared deviations from `mean` instead of the mean of each class.

    Each grows by the number of samples times the squared distance between the means, as in the
    formula of Chan, Golub and LeVeque (1979) for merging two variances.
    """
    return table[_SQUARES] + table[_CORRECT] * (_means(table) - mean).square()


def _at_least_fp32(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _best(logits: Tensor) -> Tensor:
    """Return the classes of the five highest scores: N x 5, or fewer."""
    return logits.topk(min(5, logits.shape[1])).indices


class Answer(NamedTuple):
    """Predictions of a model for every sample of all workers: columns of one length."""

    sample: npt.NDArray[np.int64]
    """Numbers of the samples, in ascending order."""

    label: npt.NDArray[np.int64]
    predicted: npt.NDArray[np.int64]
    loss: npt.NDArray[np.float64]


class Answers:
    """Collects the predictions for each sample on this worker, without waiting for the device."""

    def __init__(self) -> None:
        self._parts: list[Tensor] = []

    def add(self, logits: Tensor, labels: Tensor) -> None:
        """Add one batch; pass it to `evaluate` as `each`."""
        logits = _at_least_fp32(logits)
        losses = F.cross_entropy(logits, labels, reduction="none")
        columns = (labels, _best(logits)[:, 0], losses)
        self._parts.append(torch.stack([column.double() for column in columns], dim=1))

    def gather(
        self, samples: npt.NDArray[np.int64], everyone: npt.NDArray[np.int64], backend: Backend
    ) -> Answer:
        """Return the predictions of all workers; `samples` are this worker's, in their order.

        `everyone` has the samples of all workers in ascending order: each has a row in a table that
        is summed over the workers.
        """
        device = backend.device
        table = torch.zeros(len(everyone), 3, dtype=torch.float64, device=device)
        places = torch.from_numpy(np.searchsorted(everyone, samples)).to(device)
        table[places] = torch.cat([table[:0], *(part.to(device) for part in self._parts)])
        backend.all_reduce(table).wait()
        label, predicted, loss = table.cpu().numpy().T  # sync: the result is wanted
        return Answer(
            sample=everyone,
            label=label.astype(np.int64),
            predicted=predicted.astype(np.int64),
            loss=loss,
        )
