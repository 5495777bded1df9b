"""The checks of a script's own updates: some are made, recorded and compared."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.utils._pytree import tree_flatten, tree_unflatten

from largebatch.audit import norms
from largebatch.audit.comparison import compare, compare_alone, names_of_unequal
from largebatch.audit.findings import Finding, Level, fault
from largebatch.audit.fingerprint import seed_generators
from largebatch.audit.gradient import SAME, check_gradient
from largebatch.audit.randomness import check_dropout
from largebatch.audit.ranks import Ranks, StoppedError
from largebatch.audit.rates import check_rates
from largebatch.audit.recording import Micro, Recorder
from largebatch.audit.reference import (
    NOT_CLASSES,
    Gradients,
    Reference,
    loss_and_labels,
    reference_of,
)
from largebatch.audit.replicas import (
    ReplicaCheck,
    are_averaged,
    averaged_tensors,
    check_modes,
    check_moves,
    differences,
    weighted_sums,
)
from largebatch.audit.restoring import Snapshot, objects_of, without_iterator
from largebatch.audit.subject import Subject
from largebatch.errors import shorten
from largebatch.formatting import plural
from largebatch.models.inputs import images_of, labels_of
from largebatch.models.wrappers import evaluation_mode

_AVERAGERS = {"ModelAverager", "PostLocalSGDOptimizer"}
"""Classes of torch that average weights, perhaps less often than the audit makes updates."""

_MOST_CALLS = 64
"""Largest number of calls of the step per update; a step that needs more is taken to make none."""

_SAME_LOSS = 1e-5
"""Relative difference of the losses of two equal passes, whose sums may be in another order."""


def check_updates(subject: Subject, ranks: Ranks) -> list[Finding]:
    """Make updates as the script does, and check each; the caller restores everything."""
    optimizer = _without_wrappers(subject.optimizer)
    are_broadcast = getattr(subject.model, "broadcast_buffers", False)
    averaged = subject.averaged
    replicas = ReplicaCheck(subject.inner, optimizer, averaged, ranks, are_broadcast=are_broadcast)
    replicas.compare("at the start")
    distances = [norms.distance_of_statistics(subject.inner, ranks)]
    before = norms.tracked(subject.inner)
    recorder = Recorder(
        subject.inner,
        optimizer,
        lambda micros: reference_of(micros, subject.inner, subject.loss_fn, ranks.size),
        sends_float16=_sends_float16(subject.model),
        averaged=[*averaged_tensors(averaged, subject.inner).values()] if averaged else (),
    )
    updates = _Updates(subject, ranks, recorder)
    updates.read_first()
    dropout = updates.dropout() if updates.is_plain else []
    with recorder.recording():
        found = updates.run() + dropout
    counts = ranks.gather(len(recorder.updates))
    number = min(counts)
    if number < max(counts):  # the step failed on some workers, after which they are not equal
        return found + replicas.findings(0)
    averages = updates.is_local or True in updates.averaged
    replicas.compare(f"after {plural(number, 'update')}", averages=averages)
    distances.append(norms.distance_of_statistics(subject.inner, ranks))
    found += replicas.findings(number)
    found += check_moves(recorder.moves, ranks)
    found += check_modes(subject.inner, recorder.evaluated, ranks)
    found += norms.check_span(subject.inner, recorder.norm_samples, ranks)
    micros = max((it.micros for it in recorder.updates), default=1)
    found += norms.check_momentum(subject.inner, before, recorder.passes, micros=micros)
    found += check_rates(subject, recorder.updates, ranks)
    is_trained = max(before, default=0) > norms.WARM
    try:  # the other findings on these updates are kept
        other = updates.functions()
        found = [it for it in found if not other or it.check != "gradient direction"] + other
        found += norms.check_statistics(subject.inner, distances, updates.losses)
        found += updates.exactness(subject.inner, "running statistics", is_trained=is_trained)
        if averaged is not None:
            found += updates.exactness(averaged, "averaged statistics", is_trained=is_trained)
    except StoppedError as stopped:
        found.append(stopped.finding())
    return found


class _Updates:
    """A script's updates on its first batches."""

    def __init__(self, subject: Subject, ranks: Ranks, recorder: Recorder) -> None:
        self._subject, self._ranks, self._recorder = subject, ranks, recorder
        self._stream = _endless(subject.loader)
        self._labels: dict[int, Tensor] = {}
        """Labels of batches that were read, by their identities, until the step gets them."""

        self._batches: list[Any] = []
        """The first batches of this worker."""

        self.averaged: list[bool | None] = []
        """Whether workers averaged their weights after each update, see `are_averaged`."""

        self.is_local = False
        """True if weights are averaged, but not so that this equals one process's updates."""

        self.is_plain = True
        """False if the step prepares images before the model takes them."""

        self._is_right = False
        """True if all updates were compared, and no fault was found."""

        self._places: set[int] = set()
        """Places of the parameters that optimizers have."""

        self._trained: set[int] = set()
        """Places of those that got a gradient on this worker."""

        self._names = [name for name, it in subject.inner.named_parameters() if it.requires_grad]

    def read_first(self) -> None:
        """Read the first batches, and see whether the model takes their images as they are."""
        while len(self._batches) < self._subject.steps:
            batch = self._ranks.attempt("samples", "the loader", lambda: next(self._stream))
            self._batches.append(batch)
        errors = self._ranks.gather(self._failure(self._batches))
        is_certain = self._subject.forward or any(NOT_CLASSES in (it or "") for it in errors)
        if all(errors) and not is_certain:
            self.is_plain = False
        else:
            self._require(errors[self._ranks.rank])

    def _failure(self, batches: Iterable[Any]) -> str | None:
        """Run the model and the loss without communication; return an error, undo the changes.

        So what fails on one worker only is found before another waits for it.
        """
        model, subject = self._subject.inner, self._subject
        synced = [it for it in model.modules() if isinstance(it, nn.SyncBatchNorm)]
        kept = Snapshot([model], skip=model.parameters())
        try:
            with torch.no_grad(), evaluation_mode(nn.ModuleList(synced)), torch.random.fork_rng():
                for batch in batches:
                    scores, labels = subject.scores_and_labels(model, batch)
                    loss_and_labels(subject.loss_fn, scores, labels)
                    self._labels[id(batch)] = labels
        except Exception as error:  # of the script's model or loss
            return f"{type(error).__name__}: {error}"
        finally:
            kept.restore()
        return None

    def _require(self, error: str | None) -> None:
        what = "the model or the loss on a batch"
        remedy = "loss_fn(model(images), labels) must run on every batch of every worker; pass "
        remedy += "`forward` for other inputs and outputs"
        self._ranks.require("gradient scale", what, error, remedy=remedy)

    def dropout(self) -> list[Finding]:
        """Compare the masks of dropout in a pass on the first batch."""
        subject, batch = self._subject, self._batches[0]
        run = partial(subject.scores_and_labels, batch=batch)
        return check_dropout(subject.inner, run, self._ranks)

    def run(self) -> list[Finding]:
        """Call the step until it has made its updates, and compare each of them."""
        for parameter in self._subject.inner.parameters():
            parameter.grad = None  # what the script has not used yet is restored later
        results: list[tuple[int, list[Finding]]] = []
        stopped: list[Finding] = []
        try:
            self._make_updates(results)
        except StoppedError as error:
            stopped = [error.finding()]
        if True in self.averaged:  # of an update with rate 0 it cannot be seen
            seen = zip(results, self.averaged, strict=False)
            results = [it for it, averaged in seen if averaged is not None]
        found = _worst(results)
        self.is_local = self._are_local()
        if self.is_local:
            found = [it for it in found if not it.check.startswith("gradient")] + [_local()]
        levels = {it.level for it in found}
        if "fault" in levels:
            stopped = []  # a consequence
        self._is_right = not stopped and not levels & {"fault", "unknown"}
        return found + (stopped or self._skipped())

    def _make_updates(self, results: list[tuple[int, list[Finding]]]) -> None:
        """Call the step, and add the micro-batches and findings of each update to `results`."""
        for call in range(self._subject.steps * _MOST_CALLS):
            batch = self._batches[call] if call < len(self._batches) else self._next()
            results += self._call(batch)
            if len(self._recorder.updates) >= self._subject.steps:
                break
            if min(self._ranks.gather(len(self._recorder.elsewhere))) > self._subject.steps:
                break

    def _call(self, batch: Any) -> list[tuple[int, list[Finding]]]:  # noqa: ANN401
        """Call the step once; return micro-batches and findings of the updates it made."""
        recorder, ranks = self._recorder, self._ranks

        def step() -> None:
            labels = self._labels.pop(id(batch), None)
            labels = labels_of(batch) if labels is None else labels
            recorder.give(labels, partial(self._subject.scores_in, batch))
            self._subject.step(batch)

        made, micros = len(recorder.updates), len(recorder.micros) + 1
        remedy = "call it without the audit on that worker, which shows the traceback; after an "
        remedy += "error in backward wrap the model in DistributedDataParallel again"
        ranks.attempt("gradient scale", "the step", step, remedy=remedy)
        counts = [it[0] for it in ranks.gather([len(recorder.updates), recorder.skipped])]
        if min(counts) < max(counts):
            text = f"workers made {min(counts)} to {max(counts)} updates"
            remedy = "make the update in the same call of `step` on every worker"
            raise StoppedError("updates", text, remedy, figure=float(min(counts)))
        results = []
        for update in recorder.updates[made:]:
            now = weighted_sums(recorder.parameters)
            self.averaged.append(are_averaged(update.after, now, ranks))
            if self.averaged[-1] and _is_linear(recorder.optimizer):
                update.gradients = self._mean_over_workers(update.gradients)
            found = check_gradient(update, recorder.parameters, self._names, ranks)
            results.append((max(ranks.gather(micros)), found))
            if isinstance(update.reference, Reference):
                got = enumerate(update.reference.total)
                self._trained |= {place for place, it in got if it is not None}
            self._places |= update.places
            update.gradients, update.reference = [], None  # frees their memory
        return results

    def _mean_over_workers(self, gradients: Gradients) -> Gradients:
        pairs = zip(gradients, self._recorder.parameters, strict=True)
        filled = (torch.zeros_like(own) if it is None else it.to_dense() for it, own in pairs)
        return [(self._ranks.sum(it) / self._ranks.size).to(it.dtype) for it in filled]

    def _are_local(self) -> bool:
        """Return True if workers average their weights, and no process alone could do the same."""
        ranks, optimizer = self._ranks, self._recorder.optimizer
        updates = self._recorder.updates[: max(0, len(self.averaged) - 1)]
        later = [are_averaged(it.after, it.later or it.after, ranks) for it in updates]
        if False not in self.averaged:
            return True in self.averaged and not _is_linear(optimizer)
        held = [optimizer, *objects_of(self._subject.step)]
        kinds = {kind.__name__ for it in held for kind in type(it).__mro__}
        return any(self.averaged + later) or bool(kinds & _AVERAGERS)

    def functions(self) -> list[Finding]:
        """Return a fault if workers compute different functions, or a layer is detached.

        All workers compute the gradient of one micro-batch, with equal random numbers, unless
        something else is wrong.
        """
        ranks, model, loss_fn = self._ranks, self._subject.inner, self._subject.loss_fn
        sample, modes = self._recorder.sample, [it.training for it in model.modules()]
        own = [self._is_right and sample is not None, modes]
        everyone = ranks.gather(own)
        if not own[0] or any(it != own for it in everyone):
            return []
        if differences("weights", dict(model.named_parameters()), ranks, when=""):
            return []
        micro = sample and _of_worker_0(sample, ranks)
        if micro is None:
            return []

        def repeated(number: int) -> Reference:
            function = partial(reference_of, [micro] * number, model, loss_fn)
            return ranks.attempt("gradient direction", "the pass on worker 0's batch", function)

        parameters, first = self._recorder.parameters, repeated(1)
        fit = compare(first.total, first.total, parameters, ranks, divisor=ranks.size)
        number, unequal = len(parameters), names_of_unequal(fit, self._names, SAME)
        if unequal:
            many = repeated(8)  # unequal too: layers with generators of their own, rounding
            fit = compare_alone(many.last, many.mean, parameters)
            random = set().union(*ranks.gather(names_of_unequal(fit, self._names, SAME)))
            names = [it for it in unequal if it not in random]
            text = "workers compute different functions: for the same batch and weights "
            text += f"{len(names)} of {number} gradients differ ({shorten(names, most=3)})"
            remedy = "do the same on every worker in forward and in loss_fn"
        else:
            used = {place for place, it in enumerate(first.total) if it is not None}
            got = set().union(*ranks.gather(sorted(used | self._trained)))
            places = sorted(self._places - got)
            some = bool(places) and self._change_loss(places, repeated)
            names = [self._names[it] for it in places if some and self._change_loss([it], repeated)]
            text = f"{len(names)} of {number} tensors ({shorten(names, most=3)}) change the loss "
            text += "and get no gradient: a detach or no_grad is in the forward pass"
            remedy = "remove it; what is not to be trained is left out of the optimizer"
        return [fault("gradient direction", text, remedy, float(len(names)))] if names else []

    def _change_loss(self, places: Sequence[int], repeated: Callable[[int], Reference]) -> bool:
        """Return True if other values of these parameters change the loss on a worker."""
        changed = [self._recorder.parameters[place] for place in places]
        before, kept = repeated(1).loss, Snapshot(changed)
        with torch.no_grad():
            for it in changed:
                it.add_(torch.randn_like(it) * (it.abs().mean() + 0.1))
        try:
            after = repeated(1).loss
        finally:
            kept.restore()
        return any(self._ranks.gather(abs(after - before) > _SAME_LOSS * abs(before)))

    def losses(self) -> list[float]:
        """Return the loss of worker 0's first batch with each worker's running statistics."""
        batch = self._batches[0]
        if self._subject.forward is None:
            batch = images_of(batch), labels_of(batch)
        leaves, spec = tree_flatten(batch)
        shapes = self._ranks.gather([list(it.shape) for it in leaves if isinstance(it, Tensor)])
        if not shapes[0] or any(it != shapes[0] for it in shapes):
            return [float("nan")]
        batch = tree_unflatten(_sent(leaves, shapes[0], self._ranks), spec)
        return norms.losses_of(self._subject.inner, batch, self._subject.loss_on, self._ranks)

    def exactness(self, model: nn.Module, check: norms.Kind, *, is_trained: bool) -> list[Finding]:
        """Compare the running statistics of a model with exact ones over the first batches."""
        return norms.check_exactness(
            model,
            self._batches,
            self._subject,
            self._ranks,
            check=check,
            is_trained=is_trained,
        )

    def _next(self) -> Any:  # noqa: ANN401 -- as the loader has it
        batch = self._ranks.attempt("samples", "the loader", lambda: next(self._stream))
        if self.is_plain:
            with self._recorder.paused():
                self._require(self._failure([batch]))
        return batch

    def _skipped(self) -> list[Finding]:
        recorder = self._recorder
        if not recorder.skipped:
            if recorder.updates:
                return []
            if recorder.elsewhere:
                return [_update_of_others(len(recorder.parameters), recorder.elsewhere)]
            return [_no_update(self._subject.steps * _MOST_CALLS)]
        text = f"{len(recorder.updates)} updates were made and {recorder.skipped} skipped"
        remedy = "a GradScaler skips some at first; if it continues, gradients are infinite or NaN"
        figure = float(recorder.skipped)
        return [Finding(check="precision", level="note", text=text, remedy=remedy, figure=figure)]


def _is_linear(optimizer: Optimizer) -> bool:
    """Return True if a mean of updated weights is the update by the mean of the gradients."""
    return isinstance(getattr(optimizer, "optim", optimizer), SGD)


def _local() -> Finding:
    return Finding(
        check="gradient direction",
        level="unknown",
        text="workers make updates of their own and average their weights, at times or with an "
        "optimizer that is not linear in the gradients: local SGD was not compared",
        remedy="nothing if this is meant; averages after every update of SGD are compared",
    )


def _sent(leaves: Sequence[Any], shapes: Sequence[list[int]], ranks: Ranks) -> list[Any]:
    """Return leaves of a tree with worker 0's tensors, of these shapes, in place of this one's."""
    found, rest = list(leaves), iter(shapes)
    for place, own in enumerate(leaves):
        if isinstance(own, Tensor):
            shape = next(rest)
            sent = own.detach() if ranks.rank == 0 else own.new_empty(shape)
            flat = sent.to(ranks.backend.device, copy=True).reshape(-1).view(torch.uint8)
            ranks.backend.broadcast(flat)
            found[place] = flat.view(own.dtype).reshape(shape).to(own.device)
    return found


def _of_worker_0(micro: Micro, ranks: Ranks) -> Micro | None:
    """Return worker 0's micro-batch, for equal random numbers; None if workers have other types."""
    leaves, spec = tree_flatten((micro.args, micro.kwargs, micro.labels, micro.buffers))
    tensors = [it for it in leaves if isinstance(it, Tensor)]
    kinds = ranks.gather([[str(it.dtype), *it.shape] for it in tensors])
    if any([it[0] for it in own] != [it[0] for it in kinds[0]] for own in kinds):
        return None
    shapes = [shape for _, *shape in kinds[0]]
    args, kwargs, labels, buffers = tree_unflatten(_sent(leaves, shapes, ranks), spec)
    return Micro(args, kwargs, labels, seed_generators, buffers, micro.half, micro.scores_in)


def _update_of_others(number: int, weights: Sequence[float]) -> Finding:
    """Return the finding on an optimizer that has none of the model's parameters.

    `weights` are sums of the model's weights after each of its steps.
    """
    text = f"the optimizer has 0 of {plural(number, 'tensor')} of the model"
    remedy = "make the optimizer from the parameters of the model that is trained, not of a copy"
    if len(set(weights)) == 1:
        text += f", which stays as it is in {plural(len(weights), 'step')}"
        return fault("updates", text, remedy, 0.0)
    text += ": what it changes is copied into the model"
    return Finding(check="updates", level="unknown", text=text, remedy=remedy)


def _no_update(calls: int) -> Finding:
    return Finding(
        check="updates",
        level="unknown",
        text=f"no update in {calls:,} calls of step",
        remedy="make updates in `step`, with the optimizer that is passed; if it accumulates over "
        f"more than {_MOST_CALLS} batches, pass more `steps`",
    )


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
        kind = type(optimizer).__name__
        text = f"the optimizer is a {kind}, not a torch.optim.Optimizer"
        remedy = "pass the torch.optim.Optimizer that makes the update"
        raise StoppedError("gradient scale", text, remedy)
    return optimizer


def _sends_float16(model: nn.Module) -> bool:
    """Return True if a communication hook of DistributedDataParallel compresses to float16."""
    hooks = [hook for it in model.modules() for hook, _ in getattr(it, "_comm_hooks", [])]
    return any("fp16" in getattr(hook, "__name__", "") for hook in hooks)
