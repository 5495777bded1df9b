"""The audit of a script's own `save` and `load`, in the process that calls `audit`.

The whole is `steps` updates, `save`, and `steps` more over a loader that begins again, as in a new
epoch. Then everything is set back to how it was before, which is what a new process has, and the
rest is `load` and the second updates.
"""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace

from largebatch.audit.ranks import Ranks, StoppedError, unable
from largebatch.audit.restoring import endless
from largebatch.audit.resume.comparing import compare
from largebatch.audit.resume.record import Update, Worker, read_update, write_line
from largebatch.audit.resume.running import worker_from
from largebatch.audit.resume.watching import Watch
from largebatch.audit.subject import MOST_CALLS, Subject
from largebatch.rules import Finding

_CHECK = "repeated run"

_REMEDY = "pass functions that also work without the audit: load(save()) in the middle of an epoch"


def check_resumption(
    subject: Subject, ranks: Ranks, restored: Callable[[], AbstractContextManager[None]]
) -> list[Finding]:
    """Compare updates after `load(save())` with those without; every worker calls this.

    `restored()` sets everything back at its end. Nothing is returned without `save` and `load`.
    """
    if subject.save is None or subject.load is None:
        return []
    runs = []
    checkpoint: object = None
    for begins_at in (0, 0, 1):
        run = _Run(subject, ranks)
        with restored(), run.watch.installed():
            run.watch.add_existing()
            if begins_at:
                saved = checkpoint
                ranks.attempt(_CHECK, "load", lambda: subject.load(saved), remedy=_REMEDY)  # type: ignore[misc]  # noqa: B023
            else:
                run.make_updates(epoch=0)
                checkpoint = ranks.attempt(_CHECK, "save", run.save, remedy=_REMEDY)
            run.make_updates(epoch=1)
            runs.append(run.record())
    whole, repeat, rest = runs
    first = tuple(replace(it, updates=it.updates[: subject.steps], end=None) for it in whole)
    findings = compare(whole, repeat, first, rest)
    return [replace(it, text=f"after load(save()): {it.text}") for it in findings]


class _Run:
    """Updates of the script's own step, and their record."""

    def __init__(self, subject: Subject, ranks: Ranks) -> None:
        self.subject = subject
        self.ranks = ranks
        self.updates: list[Update] = []
        self.watch = Watch(self.updates.append)

    def make_updates(self, *, epoch: int) -> None:
        """Make `steps` updates with the batches of a new epoch."""
        subject = self.subject
        ranks = self.ranks
        if subject.set_epoch is not None:
            set_epoch = subject.set_epoch
            ranks.attempt(_CHECK, "set_epoch", lambda: set_epoch(epoch))
        batches = endless(subject.loader)
        enough = len(self.updates) + subject.steps
        for _ in range(subject.steps * MOST_CALLS):
            batch = ranks.attempt("samples", "the loader", lambda: next(batches))
            ranks.attempt(_CHECK, "the step", lambda: subject.step(batch))  # noqa: B023
            if min(ranks.gather(len(self.updates))) >= enough:
                return
        text = f"no {subject.steps} updates were made in {subject.steps * MOST_CALLS} calls"
        raise StoppedError(unable(_CHECK, text, "call the optimizer's step in `step`"))

    def save(self) -> object:
        """Return a checkpoint that later updates do not change, as one in a file."""
        assert self.subject.save is not None
        return copy.deepcopy(self.subject.save())

    def record(self) -> tuple[Worker, ...]:
        """Return the records of all workers."""
        lines = [write_line(it) for it in self.updates]
        fields = self.watch.summary(self.ranks.rank, self.ranks.size, with_end=True)
        return tuple(
            worker_from(of_worker, [read_update(line) for line in of_lines])
            for of_worker, of_lines in self.ranks.gather([fields, lines])
        )
