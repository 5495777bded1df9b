"""Measure BatchNorm over workers: samples normalised together, momentum, running statistics."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from largebatch.audit.ranks import Ranks, unable
from largebatch.audit.rules import norms as rules
from largebatch.audit.subject import Subject
from largebatch.errors import DataError, MismatchError
from largebatch.models.batchnorm import SpanBatchNorm
from largebatch.models.wrappers import local_model, mode
from largebatch.polish import polish
from largebatch.rules import Finding, decide


def layers_of(model: nn.Module) -> list[_BatchNorm]:
    """Return the layers that have running statistics, each once."""
    return [
        it for it in model.modules() if isinstance(it, _BatchNorm) and it.running_mean is not None
    ]


def check_span(model: nn.Module, samples: int, ranks: Ranks) -> list[Finding]:
    """Report how many samples BatchNorm normalises over; `samples` is a worker's least."""
    of_worker = min(ranks.gather(samples))
    spans = []
    for layer in model.modules():
        if isinstance(layer, nn.SyncBatchNorm):
            group = layer.process_group
            spans.append(of_worker * (ranks.size if group is None else group.size()))
        elif isinstance(layer, SpanBatchNorm):
            spans.append(layer.span)
        elif isinstance(layer, _BatchNorm):
            spans.append(of_worker)
    if not of_worker or not spans:
        return []
    return decide(rules.Span(min(spans), of_worker), rules.SPAN)


def check_momentum(
    model: nn.Module, before: Sequence[int], passes: int, *, micros: int
) -> list[Finding]:
    """Report how often the running statistics move per update; `before` is from `tracked`.

    `micros` is the number of micro-batches of an update, and `passes` that of all, also of updates
    that were skipped.
    """
    layers = layers_of(model)
    # Without a momentum the statistics are a mean over all batches, however often they move.
    if not passes or not layers or layers[0].momentum is None:
        return []
    moves = [after - then for after, then in zip(tracked(model), before, strict=True)]
    return decide(
        rules.StatisticsMoves(micros * max(moves) / passes, layers[0].momentum), rules.MOMENTUM
    )


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
    return decide(rules.Distance(max(distances)), rules.STATISTICS)


def check_averaged(
    before: Sequence[int], batches: Sequence[Any], subject: Subject, ranks: Ranks
) -> list[Finding]:
    """Compare the running statistics of averaged weights with exact ones over some batches.

    It changes those of the averaged model. `before` are the moves of the model's own statistics.
    """
    assert subject.averaged is not None
    if not layers_of(subject.averaged):
        return []
    moves = rules.MovesBefore(max(before, default=0))
    if too_few := decide(moves, rules.TOO_FEW_MOVES):
        return too_few
    averaged = local_model(subject.averaged)
    loss = _loss_of(averaged, batches, subject, ranks)
    try:
        words: dict[str, Any] = {"forward": subject.forward} if subject.forward else {}
        drift = polish(averaged, batches, ranks.backend, **words)
    except (DataError, MismatchError, ValueError) as error:
        text = f"exact statistics: {error}"
        return [unable("averaged statistics", text, "give the audit `forward`")]
    exact_loss = _loss_of(averaged, batches, subject, ranks)
    shift = max((layer.mean_shift for layer in drift), default=0.0)
    evidence = rules.Averaged(shift=shift, loss=loss, exact_loss=exact_loss)
    return decide(evidence, rules.AVERAGED)


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
