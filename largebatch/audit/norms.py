"""BatchNorm over workers: samples normalised together, momentum, running statistics.

Statistics are not gradients: no choice of them is what one process with the whole batch computes,
so what differs is a note with its figure. Averaged weights with statistics of other weights are a
fault, because evaluation is then of a model that nobody trained.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from largebatch.audit.findings import Check, Finding, Level
from largebatch.audit.ranks import Ranks
from largebatch.audit.subject import Subject
from largebatch.errors import DataError, MismatchError
from largebatch.formatting import plural, three_digits
from largebatch.models.batchnorm import SpanBatchNorm
from largebatch.models.wrappers import evaluation_mode, local_model
from largebatch.polish import polish

Kind = Literal["running statistics", "averaged statistics"]

LossOn = Callable[[nn.Module, Any], tuple[Tensor, int]]
"""Function that returns a model's mean loss on a batch, and the number of labels."""

_FEW = 16
"""Samples per span below which BatchNorm loses accuracy: ResNet-50 on ImageNet has a top-1 error of
23.6 % with 32 samples, 23.7 with 16, 24.8 with 8, 27.3 with 4 and 34.7 with 2 (Wu and He 2018,
arXiv:1803.08494, table 2)."""

_FAR = 0.1
"""Distance of workers' running means, in standard deviations, that is worth a note: the mean of 100
samples has this standard error."""

_EQUAL = 1.01
"""Largest factor between variances that are called equal."""

_WORSE = 0.1
"""Relative difference of losses that is worth a note or, for averaged weights, a fault."""

WARM = 50
"""Updates after which running statistics have forgotten where they started: 0.9^50 is 0.5 %."""


def layers_of(model: nn.Module) -> list[_BatchNorm]:
    """Return the layers that have running statistics, each once."""
    return [
        it for it in model.modules() if isinstance(it, _BatchNorm) and it.running_mean is not None
    ]


def check_span(model: nn.Module, samples: int, ranks: Ranks) -> list[Finding]:
    """Report how many samples BatchNorm normalises over; `samples` is a worker's least."""
    smallest = min(ranks.gather(samples))
    kinds = [it for it in model.modules() if isinstance(it, _BatchNorm)]
    if not smallest or not kinds:
        return []
    spans = [_span(layer, smallest, ranks) for layer in kinds]
    span = min(spans)
    where = "on each worker" if span <= smallest else "over several workers"
    text = f"BatchNorm normalises over {plural(span, 'sample')} {where}"
    if span >= _FEW:
        return [Finding(check="batch norm span", level="fine", text=text, figure=float(span))]
    remedy = (
        "use a larger device batch or SyncBatchNorm: ResNet-50's error is 23.6 % with 32 samples, "
        "24.8 with 8, 27.3 with 4, 34.7 with 2 (arXiv:1803.08494, table 2)"
    )
    return [
        Finding(check="batch norm span", level="note", text=text, remedy=remedy, figure=float(span))
    ]


def _span(layer: _BatchNorm, samples: int, ranks: Ranks) -> int:
    if isinstance(layer, SpanBatchNorm):
        return layer.span
    if isinstance(layer, nn.SyncBatchNorm):
        group = layer.process_group
        return samples * (ranks.size if group is None else group.size())
    return samples


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
    most = max(moved, default=0.0)
    momentum = layers_of(model)[0].momentum
    if most <= 1.5 or momentum is None:
        return []
    why = "once per micro-batch"
    if most > 1.5 * micros:
        why = f"more than once for each of {plural(micros, 'micro-batch', 'micro-batches')}, as by "
        why += "gradient checkpointing or passes without gradients"
    text = (
        f"running statistics move {most:.3g} times per update, {why}: a momentum of "
        f"{momentum:g} acts as {1 - (1 - momentum) ** most:.3g}"
    )
    remedy = (
        f"for the same average over updates set momentum to {1 - (1 - momentum) ** (1 / most):.3g}"
    )
    return [
        Finding(check="batch norm momentum", level="note", text=text, remedy=remedy, figure=most)
    ]


def tracked(model: nn.Module) -> list[int]:
    """Return how often each layer's running statistics have moved."""
    counts = [it.num_batches_tracked for it in layers_of(model)]
    return [0 if it is None else int(it) for it in counts]  # sync: in an audit only


def distance_of_statistics(model: nn.Module, ranks: Ranks) -> tuple[float, float]:
    """Return the largest distance of the workers' running statistics; every worker calls this.

    The first number is that of means in standard deviations, the second that of ln(variance): the
    largest over workers and layers of the root mean square over channels.
    """
    own = [(0.0, 0.0)]
    for layer in layers_of(model):
        assert layer.running_mean is not None
        assert layer.running_var is not None
        mean = ranks.sum(layer.running_mean) / ranks.size
        var = ranks.sum(layer.running_var) / ranks.size + layer.eps
        shift = (layer.running_mean.double() - mean) / var.sqrt()
        ratio = torch.log((layer.running_var.double() + layer.eps) / var)
        own.append((_rms(shift), _rms(ratio)))
    everyone = ranks.gather([max(it) for it in zip(*own, strict=True)])
    shift_most, ratio_most = (max(it) for it in zip(*everyone, strict=True))
    return shift_most, ratio_most


def check_statistics(
    model: nn.Module,
    distances: Sequence[tuple[float, float]],
    losses: Callable[[], Sequence[float]],
) -> list[Finding]:
    """Report how far running statistics differ; `losses` are of one batch, by worker."""
    if not layers_of(model):
        return []
    shift, ratio = (max(it) for it in zip(*distances, strict=True))
    factor = math.exp(ratio)
    text = f"workers' running means differ by up to {three_digits(shift)} standard deviations, " + (
        f"variances a factor {factor:.3g}" if factor > _EQUAL else "variances equal to 1 %"
    )
    level: Level = "fine"
    remedy = ""
    if max(shift, ratio) > _FAR:
        every = losses()
        level = "note"
        text += f"; the loss of one batch is {min(every):.4g} to {max(every):.4g}"
        remedy = "before evaluating, pool them on all workers: largebatch.polish.polish"
    return [_finding("running statistics", level, text, remedy, shift)]


def check_exactness(
    model: nn.Module,
    batches: Sequence[Any],
    subject: Subject,
    ranks: Ranks,
    *,
    check: Kind,
    is_trained: bool,
) -> list[Finding]:
    """Compare the running statistics with exact ones over some batches; changes the model's."""
    if not layers_of(model):
        return []
    if not is_trained:
        text = f"the model's have moved {WARM} times at most, too few to compare"
        return [_finding(check, "fine", text)] if check == "averaged statistics" else []
    own = local_model(model)
    left = loss_of(own, batches, subject.loss_on, ranks)
    try:
        words: dict[str, Any] = {"forward": subject.forward} if subject.forward else {}
        drift = polish(own, batches, ranks.backend, **words)
    except (DataError, MismatchError, ValueError) as error:
        return [_finding(check, "unknown", f"exact statistics: {error}")]
    exact = loss_of(own, batches, subject.loss_on, ranks)
    shift = max((layer.mean_shift for layer in drift), default=0.0)
    text = (
        f"means are up to {three_digits(shift)} standard deviations from exact ones; with those "
        f"the loss is {exact:.4g}, not {left:.4g}"
    )
    if not left > exact * (1 + _WORSE):
        return [_finding(check, "fine", text, figure=shift)]
    level: Level = "fault" if check == "averaged statistics" else "note"
    remedy = "measure them on all workers before evaluating: largebatch.polish.polish"
    return [_finding(check, level, text, remedy, shift)]


def loss_of(model: nn.Module, batches: Sequence[Any], loss_on: LossOn, ranks: Ranks) -> float:
    """Return the mean loss over the batches of all workers, in evaluation mode."""
    sums = ranks.gather(_attempted(model, batches, loss_on, ranks))
    return float(sum(it[0] for it in sums) / sum(it[1] for it in sums))


def losses_of(
    model: nn.Module,
    batch: tuple[Tensor, ...],
    loss_on: LossOn,
    ranks: Ranks,
) -> list[float]:
    """Return the loss of a batch in evaluation mode on each worker."""
    sums = ranks.gather(_attempted(model, [batch], loss_on, ranks))
    return [total / count for total, count in sums]


def _attempted(
    model: nn.Module, batches: Sequence[Any], loss_on: LossOn, ranks: Ranks
) -> tuple[float, int]:
    """Return `_sum_of_losses`, or raise StoppedError on all workers if it fails on one."""
    return ranks.attempt(
        "running statistics",
        "the loss in evaluation mode",
        lambda: _sum_of_losses(model, batches, loss_on),
        remedy="loss_fn must accept what the model returns in evaluation mode too",
    )


@torch.no_grad()
def _sum_of_losses(model: nn.Module, batches: Sequence[Any], loss_on: LossOn) -> tuple[float, int]:
    """Return the sum over samples of this worker's losses, and the number of samples."""
    total, count = 0.0, 0
    with evaluation_mode(model):
        for batch in batches:
            loss, number = loss_on(model, batch)
            total += float(loss) * number
            count += number
    return total, count


def _rms(tensor: Tensor) -> float:
    return float(tensor.square().mean().sqrt())


def _finding(
    check: Check, level: Level, text: str, remedy: str = "", figure: float | None = None
) -> Finding:
    return Finding(check=check, level=level, text=text, remedy=remedy, figure=figure)
