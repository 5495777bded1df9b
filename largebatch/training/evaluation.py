"""Exact distributed evaluation: every sample counts once.

Each worker counts correct answers over its own share, which may be empty; counts and the sum of the
losses go through one all-reduce. Means of batch means, and samplers that pad, are wrong.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from largebatch.distributed.backend import Backend, sum_over_workers
from largebatch.distributed.connection import running_backend
from largebatch.models.inputs import AnyBatch, images_of, labels_of
from largebatch.models.wrappers import device_of, evaluation_mode, local_model


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """Accuracy over all samples of all workers."""

    top1: float
    """Part of the samples whose label has the highest score, 0 .. 1."""

    top5: float
    """Part of the samples whose label is among the five highest scores."""

    loss: float
    """Mean cross-entropy, without label smoothing."""

    samples: int


@torch.no_grad()
def evaluate(
    model: nn.Module,
    batches: Iterable[AnyBatch],
    backend: Backend | None = None,
    *,
    expected: int | None = None,
    each: Callable[[Tensor, Tensor], object] = lambda *_: None,
) -> Metrics:
    """Measure a model on this worker's batches, together with all other workers.

    A batch is a tuple that begins with images (N x C x ...) and labels (N class numbers), on any
    device, or a mapping (see `models/inputs.py`); N may differ, and a worker may have no batch.
    Without a `backend`, the workers that torch.distributed or Horovod has connected are asked for
    (`running_backend`). The model may be wrapped (DistributedDataParallel, AveragedModel,
    torch.compile) and is in evaluation mode meanwhile. `expected` is the number of samples over all
    workers, where it is known. `each` is called with the logits and the labels of every batch.

    Raises ValueError if another number was counted, if there was nothing to count, if a batch is
    something else or the model is sharded (FSDP); BackendError if workers are not connected.
    """
    model = local_model(model)
    device = device_of(model)
    if backend is None:
        backend = running_backend(device)
    # Counts below 2**53 are exact in float64, so one tensor holds them and the loss.
    totals = torch.zeros(4, dtype=torch.float64, device=device)
    with evaluation_mode(model):
        for batch in batches:
            images = images_of(batch).to(device, non_blocking=True)
            labels = labels_of(batch).to(device, non_blocking=True)
            logits = model(images)
            totals += _count(logits, labels)
            each(logits, labels)
    sum_over_workers(totals, backend)
    top1, top5, loss, samples = totals.tolist()  # sync: the result is wanted
    if expected is not None and samples != expected:
        raise ValueError(
            f"{samples:.0f} samples were counted on {backend.world_size} workers, expected "
            f"{expected}; a sampler that pads or drops (DistributedSampler, drop_last) changes it"
        )
    if not samples:
        raise ValueError("there is nothing to evaluate: no worker was given a batch")
    return Metrics(
        top1=top1 / samples, top5=top5 / samples, loss=loss / samples, samples=int(samples)
    )


def _count(logits: Tensor, labels: Tensor) -> Tensor:
    """Return top-1 and top-5 hits, the sum of the losses and the number of samples: 4, float64."""
    if labels.shape != logits.shape[:1]:
        raise ValueError(
            f"labels are {' x '.join(map(str, labels.shape))} for scores of "
            f"{' x '.join(map(str, logits.shape))}; expected one class number for each sample"
        )
    logits = _at_least_fp32(logits)
    best = _best(logits).eq(labels.unsqueeze(1))
    loss = F.cross_entropy(logits, labels, reduction="sum")
    samples = loss.new_full((), len(labels))
    return torch.stack([part.double() for part in (best[:, 0].sum(), best.sum(), loss, samples)])


def _at_least_fp32(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _best(logits: Tensor) -> Tensor:
    """Return the classes of the five highest scores: N x 5, or fewer."""
    return logits.topk(min(5, logits.shape[1])).indices


class Answer(NamedTuple):
    """What a model made of every sample of all workers: columns of one length."""

    sample: npt.NDArray[np.int64]
    """Rising."""

    label: npt.NDArray[np.int64]
    predicted: npt.NDArray[np.int64]
    loss: npt.NDArray[np.float64]


class Answers:
    """Collects what a model makes of each sample on this worker, without waiting for the device."""

    def __init__(self) -> None:
        self._parts: list[Tensor] = []

    def add(self, logits: Tensor, labels: Tensor) -> None:
        """Note one batch: the `each` of `evaluate`."""
        logits = _at_least_fp32(logits)
        losses = F.cross_entropy(logits, labels, reduction="none")
        columns = (labels, _best(logits)[:, 0], losses)
        self._parts.append(torch.stack([column.double() for column in columns], dim=1))

    def gather(self, samples: npt.NDArray[np.int64], backend: Backend) -> Answer:
        """Return the answers of all workers; `samples` are those of this one, in their order."""
        device = backend.device
        rows = torch.cat([torch.empty(0, 3, dtype=torch.float64, device=device), *self._parts])
        own = torch.cat([torch.from_numpy(samples).to(rows).unsqueeze(1), rows], dim=1)
        number = torch.tensor([len(own)], device=device)
        lengths = backend.all_gather(number).flatten().tolist()  # sync: how much is to come
        padded = own.new_zeros(max(lengths), 4)
        padded[: len(own)] = own
        parts = zip(backend.all_gather(padded), lengths, strict=True)
        everyone = torch.cat([part[:length] for part, length in parts])
        table = everyone.cpu().numpy()  # sync: the result is wanted
        sample, label, predicted, loss = table[table[:, 0].argsort()].T
        return Answer(
            sample=sample.astype(np.int64),
            label=label.astype(np.int64),
            predicted=predicted.astype(np.int64),
            loss=loss,
        )
