"""The call of an audit: it runs some of the script's own updates, and undoes them.

Every check runs on all workers. What may fail on one of them, such as the script's own code, runs
between two exchanges, after which all of them continue or all of them stop.
"""

import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from largebatch import accelerator
from largebatch.audit.evaluation import check_evaluation
from largebatch.audit.findings import Finding, Findings, fault, fine, note, unknown
from largebatch.audit.randomness import check_augmentation
from largebatch.audit.ranks import Ranks, StoppedError, in_one_line
from largebatch.audit.rates import require_base
from largebatch.audit.restoring import held_by, restored
from largebatch.audit.samples import check_samples
from largebatch.audit.subject import Checker, Forward, Step, Subject
from largebatch.audit.updates import check_updates
from largebatch.distributed.connection import running_backend
from largebatch.distributed.environment import launched_size, slurm_tasks
from largebatch.distributed.serial import Serial
from largebatch.errors import BackendError, PeerLostError, shorten
from largebatch.formatting import plural
from largebatch.models.wrappers import device_of, has_divided_weights, local_model, uncompiled

CHECKS: tuple[Checker, ...] = (
    check_updates,
    check_samples,
    check_augmentation,
    check_evaluation,
)
"""The checks, in the order in which they run."""


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

    Restored afterwards, also on errors: weights, buffers, gradients, modes, the optimizer, all
    generators of random numbers, samplers, attributes of loaders and data sets, and what functions
    that are passed refer to. An error in the script's own code becomes a finding. Worker 0 prints
    the table.
    """
    arguments = locals()
    if not isinstance(model, nn.Module):
        kind = type(model).__name__
        raise TypeError(
            f"model is a {kind}; expected audit(model, loader, loss_fn, optimizer, step)"
        )
    began = time.monotonic()
    ranks = Ranks(_backend(model))
    found: list[Finding] = []
    try:
        found.append(_check_world(ranks))
        subject = _subject(ranks, **arguments)
        _run_checks(subject, ranks, found)
    except StoppedError as stopped:
        found.append(stopped.finding)
    except PeerLostError as lost:  # of this worker alone
        text = f"{in_one_line(str(lost))}; the workers lost each other, so this is of one worker"
        remedy = "find the worker whose step failed before a sum in which others waited, and start "
        remedy += "the script again: its process group is no longer usable"
        found.append(unknown("updates", text, remedy))
        return _printed(Findings(tuple(found), time.monotonic() - began))
    findings = Findings(ranks.share(found), time.monotonic() - began)
    return _printed(findings) if ranks.rank == 0 else findings


def _printed(findings: Findings) -> Findings:
    sys.stdout.write(findings.table() + "\n")  # the script called for it, as for a command's
    return findings


def _backend(model: nn.Module) -> Any:  # noqa: ANN401 -- a Backend
    try:
        return running_backend(device_of(model))
    except BackendError:  # not connected, although started together: `check_world` reports it
        return Serial(device_of(model))


def _check_world(ranks: Ranks) -> Finding:
    """Compare the number of connected workers with the variables of launchers."""
    local, hosts = ranks.backend.local_size, ranks.gather(socket.gethostname())
    size, idle = plural(ranks.size, "worker"), accelerator.count() - local
    started = {"launcher": launched_size(), "command srun": slurm_tasks()}
    what, most = max(started.items(), key=lambda it: it[1])
    if most > ranks.size:
        text = f"{size} connected, but the {what} started {most}: each world trains alone"
        remedy = "initialise the process group from the launcher's variables: init_process_group "
        remedy += "with env://, or hvd.init, and torchrun with --nnodes and a --rdzv-endpoint"
        return fault("world size", text, remedy, float(most))
    if idle > 0:
        text = f"{size} connected; {local} on a machine where each sees {local + idle} GPUs"
        remedy = f"start {local + idle} workers on each machine, or ignore this if that is meant"
        return note("world size", text, remedy, float(idle))
    text = f"{size} on {plural(len(set(hosts)), 'host')}, as launched"
    return fine("world size", text, figure=float(ranks.size))


def _subject(ranks: Ranks, **words: Any) -> Subject:  # noqa: ANN401 -- the arguments of `audit`
    """Check what was passed, and add what was left out; raise StoppedError on all workers."""
    given = ranks.gather(sorted(name for name, it in words.items() if it is not None))
    if names := set().union(*given) - set(given[0]).intersection(*given):
        text = f"only some of the workers pass {shorten(sorted(names))}"
        raise StoppedError(unknown("gradient scale", text, "pass the same arguments on all"))

    def check() -> Subject:
        model, step, steps = words["model"], words["step"], words["steps"]
        if not isinstance(steps, int) or steps < 1:
            raise ValueError(f"steps is {steps}; expected a whole number of updates, 1 or more")
        if has_divided_weights(model):
            raise ValueError("the weights are divided over workers (FSDP2, tensor parallelism)")
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
            optimizer = SGD(model.parameters(), lr=0.0)
        added = {"inner": local_model(model), "optimizer": optimizer}
        subject = Subject(**words | added)
        return subject if step else replace(subject, step=partial(_plain_step, subject))

    remedy = "correct the arguments of the audit"
    return ranks.attempt("gradient scale", "preparing the audit", check, remedy=remedy)


def _plain_step(subject: Subject, batch: Any) -> None:  # noqa: ANN401 -- as the loader has it
    """Make an update with a batch."""
    subject.optimizer.zero_grad()
    subject.loss_on(subject.model, batch)[0].backward()
    subject.optimizer.step()


def _run_checks(subject: Subject, ranks: Ranks, found: list[Finding]) -> None:
    """Run all checks, restore everything after each, and add their findings to `found`."""
    for check in CHECKS:
        with ExitStack() as stack, uncompiled():
            try:
                _restore_after(stack, subject, ranks)
                found += check(subject, ranks)
            except StoppedError as stopped:
                if all(it.text != str(stopped) for it in found):  # several checks use the loader
                    found.append(stopped.finding)


def _restore_after(stack: ExitStack, subject: Subject, ranks: Ranks) -> None:
    """Copy what a check may change, and restore it when the stack ends."""
    objects = [subject.model, subject.averaged, subject.optimizer]
    loaders = [subject.loader, subject.val_loader]
    functions = [subject.step, subject.loss_fn, subject.evaluate, subject.set_epoch, subject.rate]
    functions.append(subject.forward)
    copied = restored(objects, loaders, functions)
    what = "copying the model, to restore it,"
    remedy = "run the model once before the audit; copies of it and of the optimizer need memory"
    ranks.attempt("gradient scale", what, lambda: stack.enter_context(copied), remedy=remedy)
