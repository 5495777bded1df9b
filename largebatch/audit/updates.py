"""The checks of a script's own updates: some are made, recorded and compared."""

from collections.abc import Iterable, Iterator
from typing import Any, get_args

from torch import Tensor, nn
from torch.optim import Optimizer

from largebatch.audit import norms
from largebatch.audit.findings import Finding, Level, fault, note, unknown
from largebatch.audit.gradient import check_gradient
from largebatch.audit.randomness import check_dropout
from largebatch.audit.ranks import Ranks, StoppedError
from largebatch.audit.rates import check_rates
from largebatch.audit.recording import Recorder
from largebatch.audit.reference import option_of, reference_of
from largebatch.audit.replicas import ReplicaCheck, averaged_tensors, check_modes, check_moves
from largebatch.audit.restoring import without_iterator
from largebatch.audit.subject import Subject
from largebatch.formatting import plural

_MOST_CALLS = 64
"""Largest number of calls of the step per update; a step that needs more is taken to make none."""


def check_updates(subject: Subject, ranks: Ranks) -> list[Finding]:
    """Make updates as the script does, and check each; the caller restores everything."""
    optimizer, model, averaged = (
        _without_wrappers(subject.optimizer),
        subject.inner,
        subject.averaged,
    )
    are_broadcast = getattr(subject.model, "broadcast_buffers", False)
    replicas = ReplicaCheck(model, optimizer, averaged, ranks, are_broadcast=are_broadcast)
    replicas.compare("at the start")
    distances = [norms.distance_of_statistics(model, ranks)]
    before = norms.tracked(model)
    recorder = Recorder(
        model,
        optimizer,
        lambda micros: reference_of(micros, subject, ranks.size),
        sends_float16=_sends_float16(subject.model),
        averaged=[*averaged_tensors(averaged, model).values()] if averaged else (),
    )
    found = check_dropout(model, ranks)
    batches: list[Any] = []
    with recorder.recording():
        found += _make_updates(subject, ranks, recorder, batches)
    counts = ranks.gather(len(recorder.updates))
    number = min(counts)
    if number < max(counts):  # the step failed on some workers, after which they are not equal
        return found + replicas.findings(0)
    replicas.compare(f"after {plural(number, 'update')}")
    distances.append(norms.distance_of_statistics(model, ranks))
    found += replicas.findings(number)
    found += check_moves(recorder.moves, ranks)
    found += check_modes(model, recorder.evaluated, ranks)
    found += norms.check_span(model, recorder.norm_samples, ranks)
    micros = max((it.micros for it in recorder.updates), default=1)
    found += norms.check_momentum(model, before, recorder.passes, micros=micros)
    found += check_rates(subject, recorder.updates, ranks)
    found += norms.check_statistics(model, distances)
    if averaged is not None:
        try:  # the other findings on these updates are kept
            found += norms.check_averaged(before, batches, subject, ranks)
        except StoppedError as stopped:
            found.append(stopped.finding)
    return found


def _make_updates(
    subject: Subject, ranks: Ranks, recorder: Recorder, batches: list[Any]
) -> list[Finding]:
    """Call the step until it has made its updates; compare each, and keep the first batches."""
    for parameter in subject.inner.parameters():
        parameter.grad = None  # what the script has not used yet is restored later
    weights = [it.detach().clone() for it in recorder.parameters]
    stream, results, stopped = _endless(subject.loader), list[tuple[int, list[Finding]]](), []
    try:
        for _ in range(subject.steps * _MOST_CALLS):
            batch = ranks.attempt("samples", "the loader", lambda: next(stream))
            batches += [batch] if len(batches) < subject.steps else []
            results += _call(batch, subject, ranks, recorder)
            if len(recorder.updates) >= subject.steps:
                break
            if min(ranks.gather(recorder.elsewhere)) > subject.steps:
                break
    except StoppedError as error:
        stopped = [error.finding]
    found = _worst(results)
    if any(it.level == "fault" for it in found):
        return found  # an error is a consequence
    if stopped or (recorder.updates and not recorder.skipped):
        return found + stopped
    if recorder.skipped:
        text = f"{len(recorder.updates)} updates were made and {recorder.skipped} skipped"
        remedy = "a GradScaler skips some at first; if it continues, gradients are infinite or NaN"
        return [*found, note("precision", text, remedy, float(recorder.skipped))]
    if recorder.elsewhere:
        text = f"the optimizer has 0 of {plural(len(weights), 'tensor')} of the model"
        remedy = "make the optimizer from the parameters of the model that is trained, not a copy"
        pairs = zip(weights, recorder.parameters, strict=True)
        if all(before.equal(it) for before, it in pairs):
            text += f", which stays as it is in {plural(recorder.elsewhere, 'step')}"
            return [fault("updates", text, remedy, 0.0)]
        return [unknown("updates", f"{text}: what it changes is copied into the model", remedy)]
    text = f"no update in {subject.steps * _MOST_CALLS:,} calls of step"
    remedy = "make updates in `step`, with the optimizer that is passed; if it accumulates over "
    remedy += f"more than {_MOST_CALLS} batches, pass more `steps`"
    return [unknown("updates", text, remedy)]


def _call(
    batch: Any,  # noqa: ANN401 -- as the loader has it
    subject: Subject,
    ranks: Ranks,
    recorder: Recorder,
) -> list[tuple[int, list[Finding]]]:
    """Call the step once; return micro-batches and findings of the updates it made."""
    made, micros = len(recorder.updates), len(recorder.micros) + 1
    recorder.give(batch)
    remedy = "call it without the audit on that worker, which shows the traceback; after an error "
    remedy += "in backward wrap the model in DistributedDataParallel again"
    ranks.attempt("gradient scale", "the step", lambda: subject.step(batch), remedy=remedy)
    counts = [it[0] for it in ranks.gather([len(recorder.updates), recorder.skipped])]
    if min(counts) < max(counts):
        text = f"workers made {min(counts)} to {max(counts)} updates"
        remedy = "make the update in the same call of `step` on every worker"
        raise StoppedError(fault("updates", text, remedy, float(min(counts))))
    names = [name for name, it in subject.inner.named_parameters() if it.requires_grad]
    weights = option_of(subject.loss_fn, "weight", None)
    results = []
    for update in recorder.updates[made:]:
        found = check_gradient(
            update, recorder.parameters, names, ranks, has_weights=isinstance(weights, Tensor)
        )
        results.append((max(ranks.gather(micros)), found))
        update.gradients, update.reference = [], None  # frees their memory
    return results


def _worst(results: list[tuple[int, list[Finding]]]) -> list[Finding]:
    """Return the worst finding of each check over the updates with all their micro-batches.

    The first update may have fewer, if the script counts its micro-batches from another number.
    """
    most = max((micros for micros, _ in results), default=0)
    levels = get_args(Level)
    worst: dict[str, Finding] = {}
    for finding in [it for micros, found in results if micros == most for it in found]:
        before = worst.get(finding.check)
        if before is None or levels.index(finding.level) < levels.index(before.level):
            worst[finding.check] = finding
    return list(worst.values())


def _endless(loader: Iterable[Any]) -> Iterator[Any]:
    """Yield batches, in as many epochs as are needed."""
    number = 1
    while number:
        number = 0
        for number, batch in enumerate(without_iterator(loader), 1):  # noqa: B007 -- used above
            yield batch
    raise ValueError("the loader has no batch on this worker")


def _without_wrappers(optimizer: Any) -> Optimizer:  # noqa: ANN401 -- of any library
    """Return the optimizer within those of Accelerate and Lightning."""
    inner = getattr(optimizer, "optimizer", None)
    if isinstance(inner, Optimizer) and inner is not optimizer:
        return _without_wrappers(inner)
    if not isinstance(optimizer, Optimizer):
        text = f"the optimizer is a {type(optimizer).__name__}, not a torch.optim.Optimizer"
        remedy = "pass the torch.optim.Optimizer that makes the update"
        raise StoppedError(unknown("gradient scale", text, remedy))
    return optimizer


def _sends_float16(model: nn.Module) -> bool:
    """Return True if a communication hook of DistributedDataParallel compresses to float16."""
    hooks = [hook for it in model.modules() for hook, _ in getattr(it, "_comm_hooks", [])]
    return any("fp16" in getattr(hook, "__name__", "") for hook in hooks)
