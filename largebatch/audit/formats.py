"""Compare channels_last with contiguous tensors, and autocast with the model's own type.

Neither is compared by the other checks, whose exact gradient has the formats and types of the
script's own passes.
"""

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from largebatch.audit.compiled import consecutive, without_dropout, worst_of_workers
from largebatch.audit.passes import Numbers, Passes, compare
from largebatch.audit.ranks import Ranks
from largebatch.audit.recording import Micro
from largebatch.audit.rules import compiled as rules
from largebatch.audit.subject import Subject
from largebatch.rules import Finding, decide


def check_formats(subject: Subject, ranks: Ranks) -> list[Finding]:
    """Compare the passes of the step with contiguous ones, and with those without autocast."""
    micros = subject.micros
    is_seen = all(ranks.gather(bool(micros)))
    has_channels_last = is_seen and _has_channels_last(subject.inner, micros[0])
    has_autocast = is_seen and micros[0].half is not None
    findings: list[Finding] = []
    if any(ranks.gather(has_channels_last)):
        own = ranks.attempt(
            "channels last", "a contiguous pass", lambda: _compare_channels_last(subject)
        )
        findings += worst_of_workers(own, ranks)
    if all(ranks.gather(has_autocast)):
        own = ranks.attempt("autocast", "a pass without it", lambda: _compare_autocast(subject))
        findings += worst_of_workers(own, ranks)
    return findings


def _has_channels_last(model: nn.Module, micro: Micro) -> bool:
    """Return True if a weight or an argument has its channels last in memory."""
    tensors = [*model.parameters(), *tree_leaves((micro.args, micro.kwargs))]
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return any(
        not it.is_contiguous() and it.is_contiguous(memory_format=formats[it.ndim])
        for it in tensors
        if isinstance(it, Tensor) and it.ndim in formats
    )


def _passes(subject: Subject) -> Passes:
    if not subject.inner.training:
        subject.inner.train()  # as the step does, in which the passes were recorded
    return Passes(subject=subject, model=subject.inner, micros=consecutive(subject.micros))


def _compare_channels_last(subject: Subject) -> list[Finding]:
    passes = _passes(subject)
    with without_dropout(subject.inner):  # which draws its masks in the order of the memory
        own = passes.run(passes.half)
        again = passes.run(passes.half)
        wider = passes.run_wider()
        contiguous = passes.run_converted(passes.half, Tensor.contiguous)
    evidence = rules.ChannelsLast(
        compare(passes, own, contiguous, contiguous, wider),
        compare(passes, again, own, own, wider),
        is_random=any(it.drawn for it in own),
    )
    return decide(evidence, rules.CHANNELS_LAST)


def _compare_autocast(subject: Subject) -> list[Finding]:
    passes = _passes(subject)
    with without_dropout(subject.inner):
        own = passes.run(passes.half)
        full = passes.run(None)
    evidence = rules.Autocast(
        dtype=str(passes.half).removeprefix("torch."),
        values=compare(passes, own, full, full, None),
        not_finite=_not_finite(own, full),
        is_random=any(it.drawn for it in own),
    )
    return decide(evidence, rules.AUTOCAST)


def _not_finite(own: list[Numbers], full: list[Numbers]) -> str:
    """Return what has values that are not finite in the first passes only; empty if nothing has.

    Gradients are checked with the script's own loss scale, by the check of precision.
    """
    for one, other in zip(own, full, strict=True):
        if _is_finite(other.outputs) and not _is_finite(one.outputs):
            return "outputs are"
        if _is_finite([other.loss]) and not _is_finite([one.loss]):
            return "the loss is"
    return ""


def _is_finite(tensors: list[Tensor]) -> bool:
    return all(bool(it.isfinite().all()) for it in tensors)  # sync: in an audit only
