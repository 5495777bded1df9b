"""Exact distributed evaluation: every sample counts once.

Each worker counts over its own share, which may be empty. Counts are summed over batches and
workers. Means of batch means and samplers that pad would give wrong results.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from largebatch import accelerator, proof
from largebatch.distributed.backend import Backend, sum_over_workers
from largebatch.distributed.connection import running_backend
from largebatch.formatting import plural
from largebatch.models.inputs import class_numbers, images_of, labels_of, scores_of
from largebatch.models.wrappers import (
    device_of,
    input_of,
    local_model,
    mode,
    needs_host,
    watch_host,
)
from largebatch.training.losses import at_least_fp32


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """Accuracy and loss over all samples of all workers."""

    top1: float
    """Fraction of samples whose label has the highest score, 0 .. 1. If samples have several
    labels, each label counts as a sample. A sample with a score that is NaN is wrong."""

    top5: float
    """Fraction of samples whose label is among the five highest scores."""

    loss: float
    """Mean cross-entropy, without label smoothing."""

    samples: int
    balanced_top1: float = math.nan
    """Mean over the classes with samples of the fraction of their samples that top1 counts; where
    classes have unequal numbers of samples, all of them count the same."""

    average_confidence: float = math.nan
    """Mean over the correct samples of the highest probability that the model gives to a class:
    LRBench's AC (arXiv:1908.06477). NaN without a correct sample, as the next two."""

    confidence_deviation: float = math.nan
    """Standard deviation of these probabilities over the correct samples (CD)."""

    class_confidence_deviation: float = math.nan
    """Standard deviation over the classes with a correct sample of their mean (CDAC)."""


@torch.no_grad()
def evaluate(  # noqa: PLR0913 -- what is evaluated, and how
    model: nn.Module,
    batches: Iterable[Any],
    backend: Backend | None = None,
    *,
    expected: int | None = None,
    each: Callable[[Tensor, Tensor], object] = lambda *_: None,
    forward: Callable[[nn.Module, Any], Any] | None = None,
    graph: bool = False,
) -> Metrics:
    """Evaluate a model on this worker's batches, together with all other workers.

    A batch is a tuple that begins with images (N x C x ...) and labels (N class numbers of any
    integer type), on any device, or a mapping (see `models/inputs.py`). N may differ, and a worker
    may have no batch. Samples may have several labels each (N x T, with scores N x T x K). Without
    a `backend`, the workers that torch.distributed or Horovod has connected are used. The model may
    be of any kind that `polish` takes, returns scores or an object or mapping with `logits`, and is
    in evaluation mode during the call. `expected` is the number of labels over all workers, if it
    is known. `each` is called with the scores and labels of every batch. `forward(model, batch)`
    runs models of several inputs or outputs: it gets the batch as it is, and the module inside
    wrappers, and returns the scores, or scores and labels. With `graph` the forward pass of batches
    of one size is recorded in a CUDA graph and replayed, where the device has graphs and the model
    does not wait for it; the model must not change within the call.

    Raises ValueError if the number of labels is not `expected`, if there are no labels or some are
    not class numbers, if a batch or an output has another form, if workers have different classes,
    or if the model is sharded (FSDP, tensor parallelism). Raises BackendError if workers are not
    connected.

    >>> scores = torch.tensor([[2.0, 1, 0], [0, 3, 1], [1, 2, 0]])
    >>> metrics = evaluate(nn.Identity(), [(scores, torch.tensor([0, 1, 2]))], expected=3)
    >>> round(metrics.top1, 3), metrics.samples
    (0.667, 3)
    """
    model = local_model(model)
    device = device_of(model)
    if backend is None:
        backend = running_backend(device)
    tally = _Tally(device)
    with mode(model, training=False):
        as_input = input_of(model)
        call: Callable[[Tensor], Any] = model
        if graph and proof.uses(proof.GRAPH, device) and needs_host(model) is None:
            call = accelerator.Replayed(
                lambda images: scores_of(model(images)), device, partial(watch_host, model)
            )
        for batch in batches:
            output = forward(model, batch) if forward else call(as_input(images_of(batch)))
            if forward and isinstance(output, tuple) and len(output) == 2:
                output, labels = output
            else:
                labels = labels_of(batch)
            scores = scores_of(output).to(device)  # the last layers may be elsewhere
            labels = class_numbers(labels, scores).to(device, non_blocking=True)
            labels = tally.add(scores, labels)
            each(scores, labels)
    tally.sum(backend)
    samples = int(tally.table[0].sum().item())
    of_classes, correct_of_classes = tally.table[:2].numpy()
    correct, top5, loss = tally.table[1:4].numpy().sum(axis=1).tolist()
    if expected is not None and samples != expected:
        raise ValueError(
            f"{samples} samples were counted on {plural(backend.world_size, 'worker')}, expected "
            f"{expected}; a sampler that pads or drops (DistributedSampler, drop_last) changes it"
        )
    if not samples:
        raise ValueError("there is nothing to evaluate: no worker was given a batch")
    return Metrics(
        top1=correct / samples,
        top5=top5 / samples,
        loss=loss / samples,
        samples=samples,
        balanced_top1=_mean_of_classes(correct_of_classes, of_classes),
        **_confidences(tally.table.numpy()),
    )


def _mean_of_classes(correct: npt.NDArray[np.float64], samples: npt.NDArray[np.float64]) -> float:
    present = samples > 0
    return float((correct[present] / samples[present]).mean())


def _confidences(table: npt.NDArray[np.float64]) -> dict[str, float]:
    """Return the metrics of confidence, none without a correct sample; `table` is that of _Tally.

    Deviations divide by the number of samples or classes. The sums are of numbers from 0 to 1 in
    float64, so the difference of squares is exact to 1e-15.
    """
    correct, sums, squares = table[1], table[4], table[5]
    number = correct.sum()
    if not number:
        return {}
    mean = sums.sum() / number
    of_classes = sums[correct > 0] / correct[correct > 0]
    return {
        "average_confidence": float(mean),
        "confidence_deviation": math.sqrt(max(0.0, squares.sum() / number - mean**2)),
        "class_confidence_deviation": float(of_classes.std()),
    }


_ROWS = 6  # of the table of a tally


class _Tally:
    """Counts in float64, where integers below 2**53 are exact; nothing waits until `sum`."""

    def __init__(self, device: torch.device) -> None:
        self.table = torch.zeros(_ROWS, 0, dtype=torch.float64, device=device)
        """By class: samples, correct ones, those whose label is among the five highest scores, the
        sum of the losses, that of the confidences of correct ones, and that of their squares. It
        has no columns until the first batch."""

        self._outside, self._limits = torch.zeros(3, dtype=torch.int64, device=device).split([1, 2])
        """Number of labels that are not classes; the smallest of these and the largest, or 0."""

    def add(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Count one batch; return its labels, those that are not classes moved to one."""
        within = labels.clamp(0, logits.shape[-1] - 1)
        outside = labels.where(within != labels, 0).flatten()
        self._outside = self._outside + outside.count_nonzero()
        self._limits = torch.stack(torch.cat([self._limits, outside]).aminmax())
        logits = logits.flatten(0, -2)
        labels = within.flatten()
        if not self.table.shape[1]:
            self.table = self.table.new_zeros(_ROWS, logits.shape[1])
        best = five_best(logits).eq(labels.unsqueeze(1))
        log_probabilities = logits.double().log_softmax(1)
        loss = F.nll_loss(log_probabilities, labels, reduction="none")
        confidence = log_probabilities.amax(1).exp().where(best[:, 0], 0.0)
        samples = torch.ones_like(loss)
        rows = torch.stack(
            [samples, best[:, 0], best.any(1), loss, confidence, confidence.square()]
        )
        self.table = self.table.index_add(1, labels, rows)
        return within

    def sum(self, backend: Backend) -> None:
        """Sum the table over the workers, to the CPU; raise ValueError for labels of no class."""
        width = self.table.shape[1]
        failed = accelerator.Graph.unshared_failures()
        # One collective for all that workers must agree on; a worker without a batch has no width.
        counts = torch.tensor([width, width**2, width > 0, failed])
        sums = torch.cat([counts.to(self._outside), self._outside]).to(backend.device)
        backend.all_reduce(sums).wait()
        total, squares, counting, failed, outside = sums.tolist()  # sync: how wide the table is
        accelerator.Graph.share_failures(failed)
        common = total // max(1, counting)
        # All widths are equal if they equal their mean, and the squares that of the mean.
        if common * counting != total or common * total != squares:
            widths = backend.all_gather(sums.new_tensor(width)).tolist()  # sync: for the message
            raise ValueError(f"workers have scores for other classes: {sorted({*widths} - {0})}")
        if outside:
            limits = backend.all_gather(self._limits.to(backend.device))
            examples = {limits.min().item(), limits.max().item()} - {0}  # sync: for the message
            named = " and ".join(map(str, examples))
            raise ValueError(
                f"{outside} labels, such as {named}, are not class numbers: "
                f"the model has {common} classes, 0 to {common - 1}; leave unlabelled samples out"
            )
        table = self.table if width else self.table.new_zeros(_ROWS, common)
        sum_over_workers(table, backend)
        self.table = table.cpu()  # sync: the result is wanted


def five_best(scores: Tensor) -> Tensor:
    """Return the classes of the five highest scores, the highest first: N x 5, or fewer.

    A row with a NaN predicts no class: -1. topk would take NaN for the highest score.
    """
    best = at_least_fp32(scores).topk(min(5, scores.shape[1])).indices
    return best.masked_fill(scores.isnan().any(1, keepdim=True), -1)


class Answer(NamedTuple):
    """Predictions of a model for every sample of all workers: columns of one length."""

    sample: npt.NDArray[np.int64]
    """Numbers of the samples, in ascending order."""

    label: npt.NDArray[np.int64]
    predicted: npt.NDArray[np.int64]
    """Classes with the highest score; -1 where a score is NaN."""

    loss: npt.NDArray[np.float64]


class Answers:
    """Collects the predictions for each sample on this worker, without waiting for the device."""

    def __init__(self) -> None:
        self._batches: list[Tensor] = []

    def add(self, logits: Tensor, labels: Tensor) -> None:
        """Add one batch; pass it to `evaluate` as `each`."""
        losses = F.cross_entropy(at_least_fp32(logits), labels, reduction="none")
        columns = (labels, five_best(logits)[:, 0], losses)
        self._batches.append(torch.stack([column.double() for column in columns], dim=1))

    def gather(
        self, samples: npt.NDArray[np.int64], everyone: npt.NDArray[np.int64], backend: Backend
    ) -> Answer:
        """Return the predictions of all workers; `samples` are this worker's, in their order.

        `everyone` has the samples of all workers in ascending order.
        """
        device = backend.device
        # Each worker fills in its own rows, so the sum over the workers has all of them.
        table = torch.zeros(len(everyone), 3, dtype=torch.float64, device=device)
        rows = torch.from_numpy(np.searchsorted(everyone, samples)).to(device)
        table[rows] = torch.cat([table[:0], *(batch.to(device) for batch in self._batches)])
        backend.all_reduce(table).wait()
        label, predicted, loss = table.cpu().numpy().T  # sync: the result is wanted
        return Answer(everyone, label.astype(np.int64), predicted.astype(np.int64), loss)
