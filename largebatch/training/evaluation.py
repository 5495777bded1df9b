"""Exact distributed evaluation: every sample counts once.

Each worker counts correct answers over its own share, which may be empty; counts and the sum of the
losses go through one all-reduce. Means of batch means, and samplers that pad, are wrong.
"""

from collections.abc import Iterable
from dataclasses import dataclass

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
) -> Metrics:
    """Measure a model on this worker's batches, together with all other workers.

    A batch is a tuple that begins with images (N x C x ...) and labels (N class numbers), on any
    device, or a mapping (see `models/inputs.py`); N may differ, and a worker may have no batch.
    Without a `backend`, the workers that torch.distributed or Horovod has connected are asked for
    (`running_backend`). The model may be wrapped (DistributedDataParallel, AveragedModel,
    torch.compile) and is in evaluation mode meanwhile. `expected` is the number of samples over all
    workers, where it is known.

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
            totals += _count(model(images), labels)
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
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    best = logits.topk(min(5, logits.shape[1])).indices.eq(labels.unsqueeze(1))
    loss = F.cross_entropy(logits, labels, reduction="sum")
    samples = loss.new_full((), len(labels))
    return torch.stack([part.double() for part in (best[:, 0].sum(), best.sum(), loss, samples)])
