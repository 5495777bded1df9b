"""The run folder: the record of a run, after an error too, and what a run resumes from."""

import json
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from shlex import quote
from types import MappingProxyType
from typing import Any, NamedTuple

from pydantic import TypeAdapter, ValidationError

from largebatch import registry
from largebatch.address import Address
from largebatch.distributed.backend import Backend
from largebatch.distributed.connection import broadcast_bytes
from largebatch.distributed.environment import worker_rank
from largebatch.errors import (
    CheckpointError,
    DivergedError,
    LargebatchError,
    SmallerBatchError,
    clip,
    reason_of,
    shorten,
)
from largebatch.models.wrappers import failures_named
from largebatch.recipe.loading import differences
from largebatch.recipe.writing import dump_yaml
from largebatch.report import write_report
from largebatch.runs.hangs import hangs_named
from largebatch.runs.interrupts import describe_cause, scheduler
from largebatch.runs.mirror import mirrored
from largebatch.runs.options import Options, Resume
from largebatch.runs.weights import WEIGHTS
from largebatch.storage import remove_leftovers, write_whole, writing
from largebatch.tracking.console import Console
from largebatch.tracking.environment import peak_memory_bytes, source_commit, versions
from largebatch.tracking.events import (
    CHECKPOINTS,
    LOG,
    RECIPE,
    SUMMARY,
    Finish,
    Status,
    Summary,
    Tracker,
    now,
    write_json,
)
from largebatch.tracking.followed import FollowedRun
from largebatch.tracking.log import JsonLines, last_event, require_unlocked
from largebatch.training.checkpoint import (
    Checkpoint,
    newest_checkpoint,
    parse_checkpoint,
    set_aside_damaged,
)
from largebatch.training.session import Session

OPTIONS = "options.json"
"""File in a run folder with the options of its last command."""

_OPTIONS = TypeAdapter(Options)
_LOG = logging.getLogger(__name__)

_LONGEST = 300  # characters of an error in the summary

_PLANNED = ("workers", "device_batch", "accumulation", "steps")
"""What trackers get of the plan: the rest follows from the recipe, which they have."""


@contextmanager
def open_folder(
    session: Session, folder: Path, *, resume: bool, mirror: Address | None = None
) -> Iterator[list[Tracker]]:
    """Make and lock the run folder, and yield the trackers of the run; worker 0 only.

    The folder is copied to `mirror`. Raises CheckpointError if the folder or its copy cannot be
    written or another run writes to it.
    """
    recipe = session.saver.recipe
    note = partial(session.log.note, "train")
    job_type = recipe.tracking.job_type or "train"
    tracking = recipe.tracking.model_copy(update={"group": recipe.group, "job_type": job_type})
    config = {
        **recipe.model_dump(mode="json", exclude={"tracking"}),
        "plan": {key: getattr(session.plan, key) for key in _PLANNED},
        "commit": source_commit() if tracking.trackers else None,
    }
    trackers: list[Tracker] = [Console(classes=recipe.data.classes)]
    followed = FollowedRun(
        folder=folder,
        recipe=recipe,
        tracking=tracking,
        config=config,
        began=session.began,
        note=note,
    )
    names = dict.fromkeys(tracking.trackers)  # a recipe may name one twice
    trackers += [registry.load("trackers", name)(followed) for name in names]
    # The log is locked before anything in the folder changes: another run may be writing there.
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        log = JsonLines(folder / LOG, resume=resume)
    with closing(log):
        with writing(folder):
            remove_leftovers(folder, folder / CHECKPOINTS)
            set_aside_damaged(folder / CHECKPOINTS, step=session.state.progress.step)
            (folder / SUMMARY).unlink(missing_ok=True)  # of the part before
            write_whole(folder / RECIPE, dump_yaml(recipe).encode())
        # Before the trackers of other programs, whose errors it notes and whose servers may be
        # slow.
        trackers.insert(1, log)
        with mirrored(
            folder, mirror, note=note, stopped=lambda: session.requests.stopped
        ) as copies:
            if copies is not None:
                trackers.append(copies)
                session.saver.writer.before = copies.wait
                session.saver.writer.after = copies.checkpoint_written
            yield trackers


@dataclass
class Recording:
    """What a block of `recorded` sets, and what it then has."""

    complete: bool = False
    """True if the run is complete; set it at the end of the block."""

    summary: Summary | None = None
    """Content of summary.json, after a block that no error ended."""


@contextmanager
def recorded(session: Session, options: Options) -> Iterator[Recording]:
    """Record a block in the run folder: its summary in any case, its report if `options` want it.

    Only worker 0 writes to the folder.
    """
    folder = options.out
    draws = options.report
    opened: AbstractContextManager[list[Tracker]] = nullcontext([])
    if session.backend.rank == 0:
        opened = open_folder(session, folder, resume=bool(options.resume), mirror=options.mirror)
    with opened as trackers:
        session.log.trackers.extend(trackers)
        session.begin()
        recording = Recording()
        try:
            with failures_named(), hangs_named(session, folder):
                yield recording
                session.saver.finish()
        except SmallerBatchError:  # not an end: the run starts again at once, and draws later
            session.saver.finish()
            reason = "memory ran out: it continues with a smaller device batch"
            _finish(session, folder, _End("paused", reason), draws=False)
            raise
        except BaseException as error:
            diverged = str(error) if isinstance(error, DivergedError) else None
            end = _End("failed", clip(reason_of(error), _LONGEST), diverged)
            if isinstance(error, KeyboardInterrupt):
                end = _End("stopped", "a second request to stop, such as Ctrl-C twice")
            with suppress(CheckpointError):  # the first error is the one to fix
                session.saver.finish()
            with suppress(CheckpointError):
                _finish(session, folder, end, draws=draws)
            raise
        end = end_of(session, options, complete=recording.complete)
        recording.summary = _finish(session, folder, end, draws=draws)


class _End(NamedTuple):
    """How a part of a run ended: the fields of its summary that tell it."""

    status: Status
    reason: str | None = None
    diverged: str | None = None
    is_requeued: bool = False


def end_of(session: Session, options: Options, *, complete: bool) -> _End:
    """Return how a part of a run ended that no error ended."""
    if complete:
        return _End("finished")
    cause = session.requests.cause
    if cause is None:
        return _End("paused", f"--max-steps {options.max_steps}")
    # Launch scripts resume automatically, and schedulers start what they stop again.
    by_scheduler = cause not in {"SIGINT", "SIGHUP"} and scheduler() is not None
    # A restart has a part of the command's limit; what starts before it used counts too.
    whole_limit = options.whole_limit or options.time_limit or 0.0
    used = whole_limit - (options.time_limit or 0.0) + time.time() - session.began
    reason = describe_cause(cause, limit=whole_limit, used=used)
    requeued = by_scheduler and options.resume == "auto"
    return _End("interrupted", reason, is_requeued=requeued)


def _finish(session: Session, folder: Path, end: _End, *, draws: bool) -> Summary:
    plan = session.plan
    state = session.state
    backend = session.backend
    progress = state.progress
    last = state.last_kept
    timed = progress.images and progress.train_seconds
    summary = Summary(
        recipe=session.saver.recipe.name,
        commit=source_commit() if backend.rank == 0 else None,
        versions=versions(),
        backend=backend.name,
        workers=plan.workers,
        global_batch=plan.global_batch,
        device_batch=plan.device_batch,
        accumulation=plan.accumulation,
        steps=progress.updates,
        skipped_steps=progress.skipped,
        samples=progress.images,
        seconds=state.seconds,
        images_per_second=progress.images / progress.train_seconds if timed else None,
        peak_memory_bytes=peak_memory_bytes(backend.device),
        top1=last.top1 if last else None,
        top5=last.top5 if last else None,
        balanced_top1=last.balanced_top1 if last else None,
        loss=last.loss if last else None,
        weights_sha256=state.weights_sha256,
        kernels=session.proven,
        stages=tuple(state.stages),
        **end._asdict(),
    )
    if backend.rank == 0:
        if not folder.is_dir():  # else `writing` would make it again, with a summary alone
            raise CheckpointError(f"{folder}: was removed while the run wrote to it")
        with writing(folder):
            # Before the log's last event: `finished_summary` takes a log with an end as one with a
            # summary.
            write_json(folder / SUMMARY, summary)
            if draws and not session.requests.stopped:  # a stopped run has no time for it
                _draw(folder)
        session.log.emit(Finish(time=now(), summary=summary))
    return summary


def _draw(folder: Path) -> None:
    try:
        write_report(folder)
    except (OSError, LargebatchError):
        raise
    except Exception as error:  # the run is recorded; its own error matters more
        again = f"largebatch report {folder}"
        _LOG.warning("%s: the report was not drawn: %s; draw it with `%s`", folder, error, again)


def read_checkpoint(folder: Path, backend: Backend, *, resume: Resume) -> Checkpoint | None:
    """Return the newest readable checkpoint, which worker 0 reads for all; None to start a run.

    If all are damaged, `auto` starts a run; else CheckpointError is raised.
    """
    if not resume:
        return None
    newest = None
    if backend.rank == 0:
        try:
            newest = newest_checkpoint(folder / CHECKPOINTS)
        except CheckpointError as error:
            if resume != "auto":
                raise
            _LOG.warning("%s; there is no other one to resume from", error)
    # The bytes are sent: another host may not see the folder, or still see the file before.
    content = broadcast_bytes(newest.content if newest else None, backend)
    if newest is not None:  # worker 0 has parsed it already
        return newest.checkpoint
    return parse_checkpoint(content, source="the checkpoint of worker 0") if content else None


def require_same_run(
    checkpoint: Checkpoint,
    mathematics: Mapping[str, Any],
    splits: Mapping[str, object],
    folder: Path,
    *,
    allow: Sequence[str],
    again: bool = False,
) -> None:
    """Raise CheckpointError, with every difference, unless a checkpoint is of this run.

    `mathematics` are those of the recipe, `splits` its data. `allow` has the keys of both that may
    differ, but not the kind of optimizer; `again`: they may be saved already.
    """
    saved_mathematics = checkpoint.recipe.mathematics.model_dump(mode="json")
    of_recipe = differences(saved_mathematics, mathematics)
    of_data = differences(checkpoint.origin.data, splits, "data.index")
    changed = {
        key: f"{key} is {_written(old)} there and {_written(new)} here"
        for key, old, new in (*of_recipe, *of_data)
    }
    unknown = sorted(set(allow) - changed.keys())
    if unknown and not again:  # a restart repeats the options of the start that allowed them
        raise CheckpointError(
            f"--allow {unknown[0]}: does not differ; these do: {shorten(list(changed))}"
        )
    for key, text in changed.items():
        # Not even with --allow: another optimizer cannot use this one's state.
        if key.startswith("optimizer.") and key.endswith(".kind"):
            raise CheckpointError(
                f"{folder}: the run there has the state of another optimizer: {text}; "
                "start another run, with model.weights from `largebatch export`"
            )
    refused = {key: text for key, text in changed.items() if key not in allow}
    if refused:
        raise CheckpointError(
            f"{folder}: the run there differs from this one: {shorten(list(refused.values()))}; "
            f"start another run, or resume anyway with --allow {' --allow '.join(refused)}"
        )


def finished_summary(folder: Path, backend: Backend) -> Summary | None:
    """Return the summary of a finished run on every worker; else None.

    A run that was killed while its report was drawn has a summary, and its log has no end.
    """
    content = None
    with suppress(OSError):
        if backend.rank == 0 and isinstance(last_event(folder / LOG), Finish):
            content = (folder / SUMMARY).read_bytes()
    with suppress(ValidationError):
        summary = TypeAdapter(Summary).validate_json(broadcast_bytes(content, backend))
        return summary if summary.status == "finished" else None
    return None


def _written(value: Any) -> str:  # noqa: ANN401 -- any JSON
    if isinstance(value, dict):
        value = {key: item for key, item in value.items() if item is not None}
    return value if isinstance(value, str) else json.dumps(value)


def remember(folder: Path, options: Options) -> None:
    """Write the options of a run into its folder, for `remembered`."""
    if isinstance(options.data, Path):  # the next command may be given in another folder
        options = replace(options, data=options.data.absolute())
    if options.cache_dir is not None:
        options = replace(options, cache_dir=options.cache_dir.absolute())
    text = _OPTIONS.dump_json(options, indent=1)
    with writing(folder):
        write_whole(folder / OPTIONS, text)


def remembered(folder: Path, given: Mapping[str, Any] = MappingProxyType({})) -> Options:
    """Return options that resume the run of a folder: the remembered ones, except those given.

    Limits, profiles and changes are not remembered. A launcher gives a run its workers. Raises
    CheckpointError as `require_named`: code is named again, or does not run.
    """
    require_named(
        folder, imports=given.get("imports", ()), images=given.get("dataset") or given.get("data")
    )
    options = _recorded(folder) or Options(**given)
    options = replace(options.without_limits, dataset=None, imports=())
    if given.get("dataset"):
        options = replace(options, data=None)  # one of the two
    if worker_rank() is not None:  # the launcher's number of workers, not that of before
        options = replace(options, workers=1, restarts=0, min_workers=None)
    return replace(options, **{**given, "out": folder, "resume": given.get("resume") or True})


def _recorded(folder: Path) -> Options | None:
    """Return the options of the last command of a run; None if its folder has none."""
    with suppress(OSError, ValidationError):
        return _OPTIONS.validate_json((folder / OPTIONS).read_bytes())
    return None


def require_named(folder: Path, *, imports: Sequence[str], images: object) -> None:
    """Raise CheckpointError unless a command names what the run of a folder needs to import.

    Somebody else may have written the folder, so its record alone never makes code run: `imports`
    are the command's, and `images` is true if the command names its images or needs none.
    """
    options = _recorded(folder)
    if options is None:
        return
    missing = [f"--import {quote(module)}" for module in options.imports] if not imports else []
    if options.dataset is not None and not images:
        missing.insert(0, f"--dataset {quote(options.dataset)}")
    if missing:
        raise CheckpointError(
            f"{folder}: this run was made with {clip(shorten(missing, between=' '), 300)}; code "
            "runs only if the command names it: add this if you trust that code"
        )


def check_folder(folder: Path, *, resume: Resume | None) -> None:
    """Raise CheckpointError unless a run can start in this folder, or resume; auto: either."""
    try:
        str(folder).encode()
    except UnicodeEncodeError:  # its name is written into JSON and pages
        raise CheckpointError(f"{folder}: is not UTF-8; choose another --out") from None
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"{folder}: is a file; --out names a folder")
    # The folder is made later, when the run can begin; whether it can be is known now.
    above = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not os.access(above, os.W_OK):  # found now, and not after the images are read
        raise CheckpointError(f"{folder}: {above} cannot be written to; choose another --out")
    require_unlocked(folder / LOG)
    is_run = (folder / RECIPE).exists() and not (folder / WEIGHTS).exists()  # not an export
    if resume == "auto":
        resume = is_run
    if resume and not is_run:
        raise CheckpointError(f"{folder}: there is no run to resume; start one: largebatch train")
    if not resume and folder.exists() and any(folder.iterdir()):
        # None is of a command without --resume
        hint = ", or add --resume" if resume is False and is_run else ""
        raise CheckpointError(f"{folder}: already holds files; choose another --out{hint}")
