"""BatchNorm over workers: samples normalised together, momentum, running statistics.

Statistics are not gradients: no choice of them is what one process with the whole batch computes,
so what differs is a note with its figure. Averaged weights with statistics of other weights are a
fault, because evaluation is then of a model that nobody trained.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from largebatch.audit.findings import Finding, fault, fine, note, unknown
from largebatch.audit.ranks import Ranks
from largebatch.audit.subject import Subject
from largebatch.errors import DataError, MismatchError
from largebatch.formatting import plural, three_digits
from largebatch.models.batchnorm import SpanBatchNorm
from largebatch.models.wrappers import local_model, mode
from largebatch.polish import polish

_FEW = 16
"""Samples per span below which BatchNorm loses accuracy: ResNet-50 on ImageNet has a top-1 error of
23.6 % with 32 samples, 23.7 with 16, 24.8 with 8, 27.3 with 4 and 34.7 with 2 (Wu and He 2018,
arXiv:1803.08494, table 2)."""

_FAR = 0.1
"""Distance of workers' running means, in standard deviations, that is worth a note: the mean of 100
samples has this standard error."""

_WORSE = 0.1  # relative difference of losses that is a fault of averaged weights

WARM = 50
"""Updates after which running statistics have forgotten where they started: 0.9^50 is 0.5 %."""


def layers_of(model: nn.Module) -> list[_BatchNorm]:
    """Return the layers that have running statistics, each once."""
    return [
        it for it in model.modules() if isinstance(it, _BatchNorm) and it.running_mean is not None
    ]


def check_span(model: nn.Module, samples: int, ranks: Ranks) -> list[Finding]:
    """Report how many samples BatchNorm normalises over; `samples` is a worker's least."""
    smallest, spans = min(ranks.gather(samples)), []
    for layer in (it for it in model.modules() if isinstance(it, _BatchNorm)):
        spans.append(layer.span if isinstance(layer, SpanBatchNorm) else smallest)
        if isinstance(layer, nn.SyncBatchNorm):
            group = layer.process_group
            spans[-1] *= ranks.size if group is None else group.size()
    if not smallest or not spans:
        return []
    span = min(spans)
    where = "on each worker" if span <= smallest else "over several workers"
    text = f"BatchNorm normalises over {plural(span, 'sample')} {where}"
    if span >= _FEW:
        return [fine("batch norm span", text, figure=float(span))]
    remedy = "use a larger device batch or SyncBatchNorm (arXiv:1803.08494, table 2)"
    return [note("batch norm span", text, remedy, float(span))]


def check_momentum(
    model: nn.Module, before: Sequence[int], passes: int, *, micros: int
) -> list[Finding]:
    """Report how often the running statistics move per update; `before` is from `tracked`.

    `micros` is the number of micro-batches of an update, and `passes` that of all, also of updates
    that were skipped.
    """
    if not passes or not layers_of(model):
        return []
    moved = [micros * (it - then) / passes for it, then in zip(tracked(model), before, strict=True)]
    most, momentum = max(moved), layers_of(model)[0].momentum
    if most <= 1.5 or momentum is None:
        return []
    text = f"running statistics move {most:.3g} times per update: a momentum of "
    text += f"{momentum:g} acts as {1 - (1 - momentum) ** most:.3g}"
    same = 1 - (1 - momentum) ** (1 / most)
    remedy = f"for the same average over updates set momentum to {same:.3g}"
    return [note("batch norm momentum", text, remedy, most)]


def tracked(model: nn.Module) -> list[int]:
    """Return how often each layer's running statistics have moved."""
    counts = [it.num_batches_tracked for it in layers_of(model)]
    return [0 if it is None else int(it) for it in counts]  # sync: in an audit only


def distance_of_statistics(model: nn.Module, ranks: Ranks) -> float:
    """Return the largest distance of the workers' running means in standard deviations.

    It is the largest over workers and layers of the root mean square over channels.
    """
    own = [0.0]
    for layer in layers_of(model):
        assert layer.running_mean is not None
        assert layer.running_var is not None
        mean = ranks.sum(layer.running_mean) / ranks.size
        var = ranks.sum(layer.running_var) / ranks.size + layer.eps
        shift = (layer.running_mean.double() - mean) / var.sqrt()
        own.append(float(shift.square().mean().sqrt()))
    return float(max(ranks.gather(max(own))))


def check_statistics(model: nn.Module, distances: Sequence[float]) -> list[Finding]:
    """Report how far the workers' running means differ, at the start and after updates."""
    if not layers_of(model):
        return []
    text = "workers' running means differ by up to "
    text += f"{three_digits(max(distances))} standard deviations"
    if max(distances) <= _FAR:
        return [fine("running statistics", text, figure=max(distances))]
    remedy = "before evaluating, pool them on all workers: largebatch.polish.polish"
    return [note("running statistics", text, remedy, max(distances))]


def check_averaged(
    before: Sequence[int], batches: Sequence[Any], subject: Subject, ranks: Ranks
) -> list[Finding]:
    """Compare the running statistics of averaged weights with exact ones over some batches.

    It changes those of the averaged model. `before` are the moves of the model's own statistics.
    """
    assert subject.averaged is not None
    if not layers_of(subject.averaged):
        return []
    if max(before, default=0) <= WARM:
        text = f"the model's have moved {WARM} times at most, too few to compare"
        return [fine("averaged statistics", text)]
    own = local_model(subject.averaged)
    left = _loss_of(own, batches, subject, ranks)
    try:
        words: dict[str, Any] = {"forward": subject.forward} if subject.forward else {}
        drift = polish(own, batches, ranks.backend, **words)
    except (DataError, MismatchError, ValueError) as error:
        text = f"exact statistics: {error}"
        return [unknown("averaged statistics", text, "give the audit `forward`")]
    exact = _loss_of(own, batches, subject, ranks)
    shift = max((layer.mean_shift for layer in drift), default=0.0)
    text = f"means are up to {three_digits(shift)} standard deviations from exact ones; with those "
    text += f"the loss is {exact:.4g}, not {left:.4g}"
    if not left > exact * (1 + _WORSE):
        return [fine("averaged statistics", text, figure=shift)]
    remedy = "measure them on all workers before evaluating: largebatch.polish.polish"
    return [fault("averaged statistics", text, remedy, shift)]


def _loss_of(model: nn.Module, batches: Sequence[Any], subject: Subject, ranks: Ranks) -> float:
    """Return the mean loss over the batches of all workers, in evaluation mode."""

    @torch.no_grad()
    def own() -> list[float]:
        with mode(model, training=False):
            losses = [subject.loss_on(model, batch) for batch in batches]
        return [sum(float(it) * count for it, count in losses), sum(count for _, count in losses)]

    remedy = "loss_fn must accept what the model returns in evaluation mode too"
    what = "the loss in evaluation mode"
    sums = ranks.gather(ranks.attempt("averaged statistics", what, own, remedy=remedy))
    return float(sum(it[0] for it in sums) / sum(it[1] for it in sums))
