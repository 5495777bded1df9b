"""Record a run in its folder: log, summary and report, after an error too."""

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path

from largebatch.errors import CheckpointError, DivergedError, LargebatchError, SmallerBatchError
from largebatch.models.wrappers import failures_named
from largebatch.report import write_report
from largebatch.runs.folder import open_folder
from largebatch.tracking.environment import peak_memory_bytes, source_commit, versions
from largebatch.tracking.events import SUMMARY, Finish, Status, Summary, Tracker, now
from largebatch.training.session import Session

_LOG = logging.getLogger(__name__)


def record(
    session: Session,
    folder: Path,
    work: Callable[[], bool],
    *,
    resume: bool = False,
    draws: bool = True,
) -> Summary:
    """Do the work in a run folder; write its summary, and with `draws` its report, in any case.

    `work` returns True if the run is complete. Only worker 0 writes to the folder.
    """
    opened: AbstractContextManager[list[Tracker]] = nullcontext([])
    if session.training.backend.rank == 0:
        opened = open_folder(session, folder, resume=resume)
    with opened as trackers:
        session.log.trackers.extend(trackers)
        session.begin()
        try:
            with failures_named():
                complete = work()
                session.saver.finish()
        except SmallerBatchError:
            session.saver.finish()
            _finish(session, folder, "paused", draws=False)
            raise
        except BaseException as error:
            status: Status = "stopped" if isinstance(error, KeyboardInterrupt) else "failed"
            diverged = str(error) if isinstance(error, DivergedError) else None
            with suppress(CheckpointError):  # the first error is the one to fix
                session.saver.finish()
            with suppress(CheckpointError):
                _finish(session, folder, status, draws=draws, diverged=diverged)
            raise
        stopped = session.training.requests.stopped
        status = "finished" if complete else "interrupted" if stopped else "paused"
        return _finish(session, folder, status, draws=draws)


def _finish(
    session: Session, folder: Path, status: Status, *, draws: bool, diverged: str | None = None
) -> Summary:
    plan, state, backend = session.training.plan, session.state, session.training.backend
    progress, last = state.progress, state.last_kept
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
        loss=last.loss if last else None,
        weights_sha256=state.weights_sha256,
        stages=tuple(state.stages),
        status=status,
        diverged=diverged,
    )
    if backend.rank == 0:
        if not folder.is_dir():
            raise CheckpointError(f"{folder}: was removed while the run wrote to it")
        try:
            summary.write(folder / SUMMARY)
            if draws and not session.training.requests.stopped:  # a stopped run has no time for it
                _draw(folder)
        except OSError as error:
            raise CheckpointError(f"{folder}: cannot be written: {error.strerror}") from None
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
