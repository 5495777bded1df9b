"""The call of an audit: it runs some of the script's own updates, and undoes them.

Every check runs on all workers. What may fail on one of them, such as the script's own code, runs
between two exchanges, after which all of them continue or all of them stop.
"""

import socket
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer

from largebatch.audit import norms
from largebatch.audit.compiled import check_compiled
from largebatch.audit.evaluation import check_evaluation
from largebatch.audit.findings import Findings
from largebatch.audit.formats import check_formats
from largebatch.audit.gradient import check_gradient
from largebatch.audit.overlap import check_overlap
from largebatch.audit.randomness import check_augmentation, check_draws, states_of
from largebatch.audit.ranks import Ranks, StoppedError, in_one_line, unable
from largebatch.audit.rates import check_rates, require_base
from largebatch.audit.recording import Micro, Recorder
from largebatch.audit.reference import Reference, reference_of
from largebatch.audit.replicas import (
    averaged_tensors,
    check_modes,
    check_moves,
    compare_replicas,
    compare_settings,
)
from largebatch.audit.restoring import endless, held_by, restored
from largebatch.audit.resume.in_process import check_resumption
from largebatch.audit.rules import updates as rules
from largebatch.audit.samples import check_samples
from largebatch.audit.subject import MOST_CALLS, Forward, NoLossError, Step, Subject
from largebatch.distributed.connection import running_backend
from largebatch.distributed.environment import launched_size, slurm_tasks
from largebatch.distributed.serial import Serial
from largebatch.errors import BackendError, PeerLostError, shorten
from largebatch.formatting import plural
from largebatch.models.wrappers import device_of, local_model, uncompiled
from largebatch.rules import Finding, Level, decide, examine

_MICROS = 2
"""Number of micro-batches that checks after the updates repeat: one, and another batch."""


def audit(  # noqa: PLR0913 -- the script's own objects, each of which one check needs
    model: nn.Module,
    loader: Any,  # noqa: ANN401 -- any iterable over batches
    loss_fn: Callable[[Any, Any], Tensor],
    optimizer: Optimizer | None = None,
    step: Step | None = None,
    steps: int = 3,
    *,
    set_epoch: Callable[[int], object] | None = None,
    base: tuple[int, float] | None = None,
    rate: Callable[[int], float] | None = None,
    epochs: float | None = None,
    val_loader: Any = None,  # noqa: ANN401 -- as `loader`
    evaluate: Callable[[], float] | None = None,
    averaged: nn.Module | None = None,
    forward: Forward | None = None,
    save: Callable[[], Any] | None = None,
    load: Callable[[Any], object] | None = None,
) -> Findings:
    """Check that a script's updates on several workers are those of one process.

    Every worker calls this with the objects that it trains with: the wrapped model, the loader, and
    `loss_fn(logits, labels)`, a mean over samples. `step(batch)` does what the script does with a
    batch: forward, loss, backward, reduction, clipping and, perhaps only in every k-th call, the
    update. By default it is forward, backward and `optimizer.step`; without an optimizer, which is
    then looked for in `step`, updates have rate 0. The audit makes `steps` updates.

    `set_epoch` is what the script calls when an epoch starts; `base` a (global batch, rate) that
    trained well; `rate` the rate by update, counted from the present one; `epochs` the length of
    the run; `evaluate` returns the script's own metric over `val_loader`; `averaged` is a copy of
    the model with averaged weights. `forward(model, batch)` runs models of several inputs or
    outputs and takes any batch: it returns what `loss_fn` takes, scores or scores and labels.
    `save()` returns a checkpoint and `load(checkpoint)` restores it: then `steps` updates after
    `load(save())` are compared with the same ones without it.

    Restored afterwards, also on errors: weights, buffers, gradients, modes, the optimizer, all
    generators of random numbers, samplers, attributes of loaders and data sets, and what functions
    that are passed refer to. An error in the script's own code becomes a finding. Worker 0 prints
    the table.

    >>> import torch
    >>> from torch import nn
    >>> model = nn.Linear(4, 2)
    >>> loader = [(torch.randn(6, 4), torch.tensor([0, 1, 0, 1, 0, 1])) for _ in range(3)]
    >>> findings = audit(
    ...     model, loader, nn.functional.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1)
    ... )  # doctest: +ELLIPSIS
    audit: no fault, ...
    >>> findings.ok, findings.named("gradient direction")[0].figure
    (True, 1.0)
    """
    return audit_from(
        None,
        model=model,
        loader=loader,
        loss_fn=loss_fn,
        optimizer=optimizer,
        step=step,
        steps=steps,
        set_epoch=set_epoch,
        base=base,
        rate=rate,
        epochs=epochs,
        val_loader=val_loader,
        evaluate=evaluate,
        averaged=averaged,
        forward=forward,
        save=save,
        load=load,
    )


def audit_from(
    read: int | None,
    progress: Callable[[], object] | None = None,
    compiled: Sequence[object] = (),
    no_loss: NoLossError | None = None,
    ahead: Sequence[object] = (),
    **given: Any,  # noqa: ANN401 -- of `audit`
) -> Findings:
    """Audit a script whose own loop has read `read` batches of its epoch.

    `progress` is called after each exchange between the workers; `compiled` are the functions that
    the script has compiled. With `no_loss`, the reason, gradients are only compared between the
    workers. `ahead` are the batches that the loop has read and not used. The other arguments are
    those of `audit`; None is the same as leaving them out.
    """
    names = ("optimizer", "step", "set_epoch", "base", "rate", "epochs", "val_loader")
    words = (
        dict.fromkeys([*names, "evaluate", "averaged", "forward", "save", "load"])
        | {"steps": 3}
        | given
    )
    model = words["model"]
    if not isinstance(model, nn.Module):
        kind = type(model).__name__
        raise TypeError(
            f"model is a {kind}; expected audit(model, loader, loss_fn, optimizer, step)"
        )
    ranks = Ranks(_backend(model), progress)
    findings: list[Finding] = []
    try:
        findings += _check_world(ranks)
        subject = _subject(ranks, words)
        subject = replace(
            subject, read=read, compiled=compiled, no_loss=no_loss, ahead=tuple(ahead)
        )
        _run_checks(subject, ranks, findings)
    except StoppedError as stopped:
        findings.append(stopped.finding)
    except PeerLostError as lost:  # of this worker alone
        text = f"{in_one_line(str(lost))}; the workers lost each other, so this is of one worker"
        remedy = "find the worker whose step failed; this process group is no longer usable"
        findings.append(unable("updates", text, remedy))
        own = Findings(tuple(findings))
        _print(own)
        return own
    shared = Findings(ranks.share(findings))
    if ranks.rank == 0:
        _print(shared)
    # A launcher ends worker 0 as soon as another worker has exited, which must not be before this.
    with suppress(PeerLostError):
        ranks.gather(None)
    return shared


def _print(findings: Findings) -> None:
    sys.stdout.write(findings.table() + "\n")  # the script called for it, as for a command's
    sys.stdout.flush()


def _backend(model: nn.Module) -> Any:  # noqa: ANN401 -- a Backend
    try:
        return running_backend(device_of(model))
    except BackendError:  # not connected, although started together: `check_world` reports it
        return Serial(device_of(model))


def _check_world(ranks: Ranks) -> list[Finding]:
    hosts = ranks.gather(socket.gethostname())
    started = {"launcher": launched_size(), "command srun": slurm_tasks()}
    starter = max(started, key=lambda name: started[name])
    world = rules.World(
        workers=ranks.size,
        hosts=len(set(hosts)),
        started=started[starter],
        starter=starter,
    )
    return decide(world, rules.WORLD)


def _subject(ranks: Ranks, words: dict[str, Any]) -> Subject:
    """Check the arguments of `audit`, and add what was left out; StoppedError on all workers."""
    given = ranks.gather(sorted(name for name, it in words.items() if it is not None))
    if names := set().union(*given) - set(given[0]).intersection(*given):
        text = f"only some of the workers pass {shorten(sorted(names))}"
        raise StoppedError(unable("gradient scale", text, "pass the same arguments on all"))

    def check() -> Subject:
        step = words["step"]
        steps = words["steps"]
        if not isinstance(steps, int) or steps < 1:
            raise ValueError(f"steps is {steps}; expected a whole number of updates, 1 or more")
        if (words["save"] is None) != (words["load"] is None):
            raise ValueError("save and load belong together; pass both, or none of them")
        if words["averaged"] is not None:
            local_model(words["averaged"])  # raises ValueError for one that it cannot be found in
        if words["base"] is not None:
            require_base(words["base"])
        if isinstance(words["loader"], Iterator):
            raise ValueError(  # noqa: TRY004 -- reported in one line, like other errors
                "the loader is an iterator, whose batches would be lost; pass what it iterates "
                "over, or a list of batches from another one like it"
            )
        optimizer = words["optimizer"]
        if optimizer is None:
            optimizer = next((it for it in held_by([step]) if isinstance(it, Optimizer)), None)
        if optimizer is None:
            optimizer = SGD(words["model"].parameters(), lr=0.0)
        added = {"inner": local_model(words["model"]), "optimizer": optimizer}
        subject = Subject(**words | added)
        return subject if step else replace(subject, step=partial(_plain_step, subject))

    remedy = "correct the arguments of the audit"
    return ranks.attempt("gradient scale", "preparing the audit", check, remedy=remedy)


def _plain_step(subject: Subject, batch: Any) -> None:  # noqa: ANN401 -- as the loader has it
    subject.optimizer.zero_grad()
    subject.loss_on(subject.model, batch)[0].backward()
    subject.optimizer.step()


def _run_checks(subject: Subject, ranks: Ranks, findings: list[Finding]) -> None:
    """Run all checks, restore everything after each, and add their findings to `found`."""
    for check in _CHECKS:
        copied = _restored(subject)
        with ExitStack() as stack, uncompiled():
            enter = partial(stack.enter_context, copied)
            try:
                ranks.attempt("gradient scale", "copying the model, to restore it,", enter)
                findings += check(subject, ranks)
            except StoppedError as stopped:
                if all(it.text != str(stopped) for it in findings):  # several checks use the loader
                    findings.append(stopped.finding)


def _restored(subject: Subject) -> AbstractContextManager[None]:
    """Restore what a subject has and refers to, on exit."""
    functions = [subject.step, subject.loss_fn, subject.evaluate, subject.set_epoch, subject.rate]
    return restored(
        [subject.model, subject.averaged, subject.optimizer],
        [subject.loader, subject.val_loader],
        [*functions, subject.forward, subject.save, subject.load],
    )


def _check_resumption(subject: Subject, ranks: Ranks) -> list[Finding]:
    return check_resumption(subject, ranks, partial(_restored, subject))


def _check_given(subject: Subject, _: Ranks) -> list[Finding]:
    """Return what is not examined because an argument was left out."""
    return [*examine(subject, rules.GIVEN)]


_MOVES_APART = ("gradient direction", "clipping")
"""Checks of an update whose faults make the workers' weights unequal, as do their rates."""


def check_updates(subject: Subject, ranks: Ranks) -> list[Finding]:
    """Make updates as the script does, and check each; the caller restores everything."""
    model = subject.inner
    averaged = subject.averaged
    optimizer = _without_wrappers(subject.optimizer)
    at_start = compare_replicas(subject, optimizer, ranks, "before the audit")
    unequal = {check: it for check, it in at_start.items() if it.level != "fine"}
    distances = [norms.distance_of_statistics(model, ranks)]
    before = norms.tracked(model)
    # Those of DistributedDataParallel, which may compress to float16.
    hooks = [it for part in subject.model.modules() for it, _ in getattr(part, "_comm_hooks", [])]

    def reference(micros: list[Micro]) -> Reference:
        subject.micros.extend(micros[: _MICROS - len(subject.micros)])
        return reference_of(micros, subject)

    recorder = Recorder(
        model,
        optimizer,
        reference,
        sends_float16=any("fp16" in getattr(hook, "__name__", "") for hook in hooks),
        averaged=[*averaged_tensors(averaged, model).values()] if averaged else (),
    )
    is_audit = isinstance(subject.step, partial) and subject.step.func is _plain_step
    findings = decide(rules.StepMaker(is_audit), rules.STEP_MAKER)
    batches: list[Any] = []
    with recorder.recording():
        findings += _make_updates(subject, ranks, recorder, batches)
    counts = ranks.gather(len(recorder.updates))
    number = min(counts)
    if number < max(counts):  # the step failed on some workers, after which they are not equal
        return [*findings, *unequal.values()]
    after = compare_replicas(subject, optimizer, ranks, f"after {plural(number, 'update')}")
    after |= unequal
    # What makes gradients or rates unequal makes weights so: to correct them is to correct these.
    causes = [it for it in findings if it.level == "fault" and it.check in _MOVES_APART]
    for settings in compare_settings([it.settings for it in recorder.updates], ranks):
        after["learning rates"] = settings
        causes.insert(0, settings)
    for check in ("weights", "optimizer state", "averaged weights"):
        # A script has made updates of its own before the audit.
        may_follow = check not in unequal or subject.read is not None
        if causes and may_follow and check in after and after[check].level == "fault":
            cause = f"correct the {causes[0].check} first, from which this may follow"
            after[check] = replace(after[check], remedy=cause)
    findings += decide(_measure_frozen(subject, optimizer), rules.FROZEN)
    findings += after.values()
    distances.append(norms.distance_of_statistics(model, ranks))
    findings += check_moves(recorder.moves, ranks)
    findings += check_modes(model, recorder.evaluated, ranks)
    findings += norms.check_span(model, recorder.norm_samples, ranks)
    micros = max((it.micros for it in recorder.updates), default=1)
    findings += norms.check_momentum(model, before, recorder.passes, micros=micros)
    findings += check_rates(subject, recorder.updates, ranks, recorder.schedule_steps)
    findings += norms.check_statistics(model, distances)
    if averaged is not None:
        try:  # the other findings on these updates are kept
            findings += norms.check_averaged(before, batches, subject, ranks)
        except StoppedError as stopped:
            findings.append(stopped.finding)
    return findings


def _measure_frozen(subject: Subject, optimizer: Optimizer) -> rules.Frozen:
    """Find the tensors that the optimizer has and the model does not train."""
    tensors = {id(it) for group in optimizer.param_groups for it in group["params"]}
    named = dict(subject.inner.named_parameters())
    frozen = (name for name, it in named.items() if id(it) in tensors and not it.requires_grad)
    wrappers = (isinstance(it, DistributedDataParallel) for it in subject.model.modules())
    return rules.Frozen(
        names=tuple(frozen),
        number=len(named),
        is_reduced_by_wrapper=any(wrappers),
    )


_CHECKS = (
    check_updates,
    check_compiled,
    check_formats,
    check_samples,
    check_augmentation,
    check_overlap,
    check_evaluation,
    _check_resumption,
    _check_given,
)


def _make_updates(
    subject: Subject, ranks: Ranks, recorder: Recorder, batches: list[Any]
) -> list[Finding]:
    """Call the step until it has made its updates; compare each, and keep the first batches."""
    for parameter in subject.inner.parameters():
        parameter.grad = None  # what the script has not used yet is restored later
    weights = [it.detach().clone() for it in recorder.parameters]
    stream = endless(subject.loader)
    unused = deque(subject.ahead)
    steps = subject.steps
    stopped: list[Finding] = []
    epoch = _LoaderEpoch(min(ranks.gather(_length_of(subject.loader))), subject.read)
    results: list[tuple[int, list[Finding]]] = []
    findings: list[Finding] = []
    try:
        for _ in range(steps * MOST_CALLS):
            batch = ranks.attempt("samples", "the loader", lambda: next(stream))
            if len(batches) < steps:
                batches.append(batch)
            states = states_of(subject.inner)
            unused.append(batch)
            recorder.give(unused.popleft())
            of_call = _call(batch, subject, ranks, recorder)
            findings = findings or check_draws(states, states_of(subject.inner), ranks)
            epoch.add(len(of_call))
            # A loop that is given more batches than its epoch has may divide all of them by the
            # micro-batches of the last window.
            if not epoch.is_overrun or not results:
                results += of_call
            # Of an optimizer without the model's tensors no update is recorded, only its steps.
            number = max(len(recorder.updates), min(ranks.gather(recorder.elsewhere)) - 1)
            if number >= steps and (epoch.end_was_seen or epoch.calls >= MOST_CALLS):
                break
    except StoppedError as error:
        stopped = [error.finding]
    if not stopped:
        findings += decide(epoch.evidence(), rules.EPOCH_END)
    findings += _worst(results)
    if any(it.level == "fault" for it in findings):
        return findings  # an error is a consequence
    if stopped:
        return findings + stopped
    evidence = rules.Made(
        calls=steps * MOST_CALLS,
        updates=len(recorder.updates),
        skipped=recorder.skipped,
        elsewhere=recorder.elsewhere,
        tensors=len(weights),
        is_unchanged=all(map(torch.equal, weights, recorder.parameters)),
    )
    return findings + decide(evidence, rules.MADE)


def _call(
    batch: Any,  # noqa: ANN401 -- as the loader has it
    subject: Subject,
    ranks: Ranks,
    recorder: Recorder,
) -> list[tuple[int, list[Finding]]]:
    """Call the step once; return micro-batches and findings of the updates it made."""
    earlier = len(recorder.updates)
    micros = len(recorder.micros) + 1  # with that of this call
    remedy = "call it without the audit on that worker, which shows the traceback; after an error "
    remedy += "in backward wrap the model in DistributedDataParallel again"
    ranks.attempt("gradient scale", "the step", lambda: subject.step(batch), remedy=remedy)
    counts = ranks.gather(len(recorder.updates))
    of_workers = rules.UpdatesOfWorkers(min(counts), max(counts))
    if unequal := decide(of_workers, rules.UPDATES_OF_WORKERS):
        raise StoppedError(unequal[0])
    named = {name: it for name, it in subject.inner.named_parameters() if it.requires_grad}
    results = []
    for update in recorder.updates[earlier:]:
        most = max(it.micros for it in recorder.updates)
        is_evaluated = "" in recorder.evaluated
        findings = check_gradient(update, named, ranks, most=most, is_evaluated=is_evaluated)
        results.append((max(ranks.gather(micros)), findings))
        # Frees their memory, which is several times that of the weights.
        update.gradients = []
        update.reference = None
    return results


@dataclass(slots=True)
class _LoaderEpoch:
    """Calls of the step since the audit began, beside the batches of an epoch.

    With accumulation the last update of an epoch may have fewer micro-batches, which only an audit
    of that update shows.
    """

    length: int
    """Number of batches; 0 if it is not known."""

    read: int | None
    """As in `Subject`."""

    calls: int = 0
    _since_update: int = 0
    _window: int = 0
    """Largest number of calls of an update."""

    def add(self, updates: int) -> None:
        """Count a call of the step, which made these updates."""
        self.calls += 1
        self._since_update += 1
        if updates:
            self._window = max(self._window, self._since_update)
            self._since_update = 0

    @property
    def is_overrun(self) -> bool:
        """True if the script's loop was given more batches than its epoch has."""
        return self.read is not None and 0 < self.length < self.calls + self.read

    @property
    def end_was_seen(self) -> bool:
        """True if an update at an epoch's end was made, or has as many micro-batches as others."""
        if self._window <= 1:
            return True
        is_whole = self.length and self.length % self._window == 0
        return bool(is_whole or 0 < self.length <= self.calls + (self.read or 0))

    def evidence(self) -> rules.EpochEnd:
        """Return what is known of the end of the epoch."""
        return rules.EpochEnd(
            was_seen=self.end_was_seen,
            window=self._window,
            length=self.length,
            calls=self.calls,
        )


def _length_of(loader: object) -> int:
    """Return the number of batches of a loader; 0 if it is not known."""
    try:
        return len(loader)  # type: ignore[arg-type]  # that is what is tried
    except (TypeError, NotImplementedError):  # as a DataLoader of an iterable data set raises
        return 0


def _worst(results: list[tuple[int, list[Finding]]]) -> list[Finding]:
    """Return the worst finding of each check over the updates.

    The first update is left out if it has fewer micro-batches than others, because the script may
    count them from another number; the last one of an epoch, which may have fewer too, counts.
    """
    most = max((micros for micros, _ in results), default=0)
    if results and results[0][0] < most:
        results = results[1:]
    levels = get_args(Level)
    worst: dict[str, Finding] = {}
    for finding in [it for _, found in results for it in found]:
        before = worst.get(finding.check)
        if before is None or levels.index(finding.level) < levels.index(before.level):
            worst[finding.check] = finding
    return list(worst.values())


def _without_wrappers(optimizer: Any) -> Optimizer:  # noqa: ANN401 -- of any library
    """Return the optimizer within those of Accelerate and Lightning."""
    inner = getattr(optimizer, "optimizer", None)
    if isinstance(inner, Optimizer) and inner is not optimizer:
        return _without_wrappers(inner)
    if not isinstance(optimizer, Optimizer):
        text = f"the optimizer is a {type(optimizer).__name__}, not a torch.optim.Optimizer"
        remedy = "pass the torch.optim.Optimizer that makes the update"
        raise StoppedError(unable("gradient scale", text, remedy))
    return optimizer
