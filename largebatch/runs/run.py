"""The composition root: a recipe and a machine -> a finished run folder.

A run folder is the record of a run: recipe.yaml (resolved), log.jsonl, summary.json, report.html,
pictures and checkpoints/. It is made when everything that the user can get wrong has been checked.
"""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from largebatch.distributed.connection import Name
from largebatch.distributed.environment import launched_rank
from largebatch.errors import BackendError
from largebatch.recipe.plan import make_plan
from largebatch.recipe.recipe import Recipe
from largebatch.report import write_report
from largebatch.runs.build import Options, open_session
from largebatch.runs.folder import check_folder, default_folder, open_folder, read_state
from largebatch.runs.launch import start_workers
from largebatch.tracking.environment import peak_memory_bytes, source_commit, versions
from largebatch.tracking.events import Status, Summary, Tracker
from largebatch.training.stages import require_resumable, run_stages, say
from largebatch.training.state import Session

_SLOW = (
    "fp16 on a CPU is several times slower than fp32; to try a recipe here: "
    "--set precision=fp32 --set reduction.dtype=fp32"
)


def run(  # noqa: PLR0913 -- the command line's options, one to one
    recipe: Recipe,
    *,
    workers: int = 1,
    out: Path | str | None = None,
    data: Path | str | None = None,
    backend: Name = "auto",
    resume: bool = False,
    max_steps: int | None = None,
) -> Summary:
    """Train, polish and evaluate as the recipe says; return what summary.json holds.

    Starts `workers` processes on this machine, unless this process is itself one of several that
    torchrun or horovodrun started. `out` is the run folder, by default runs/<name>-<time>; the
    rest is as in Options. Raises LargebatchError for what the user can fix.
    """
    chosen = Options(
        out=Path(out) if out else default_folder(recipe),
        data=Path(data) if data else None,
        backend=backend,
        resume=resume,
        max_steps=max_steps,
    )
    rank = launched_rank()
    if rank in {None, 0}:
        check_folder(chosen.out, resume=resume)
    if rank is not None:
        if workers != 1:
            raise BackendError(
                f"this process is already one of several workers; leave --workers {workers} out"
            )
        return run_worker(recipe, chosen)
    make_plan(recipe, workers=workers)
    if workers == 1:
        return run_worker(recipe, chosen)
    if chosen.backend not in {"auto", "torch"}:
        raise BackendError(
            f"{workers} local workers use the torch backend; for horovod start them with "
            f"horovodrun -np {workers} largebatch train ..."
        )
    return start_workers(run_worker, recipe, chosen, workers=workers)


def run_worker(recipe: Recipe, options: Options) -> Summary:
    """Be one worker of a run, from joining the others to leaving them."""
    with open_session(recipe, options, {"command": "train"}) as (session, trackers):
        state = read_state(recipe, options.out, session.backend) if options.resume else None
        if state is not None:
            require_resumable(state, session.plan, options.out)
            session.restore(state)
        until = session.plan.updates if options.max_steps is None else options.max_steps

        def work() -> bool:
            if session.scaler.is_enabled() and session.backend.device.type == "cpu":
                say(session, "train", _SLOW)
            return run_stages(session, until=until)

        return carry_out(session, trackers, options.out, work)


def carry_out(
    session: Session, trackers: list[Tracker], folder: Path, work: Callable[[], bool]
) -> Summary:
    """Do the work in a run folder; whatever comes of it, leave a summary and a report.

    `work` returns whether the run is complete. Only worker 0 touches the folder.
    """
    if session.backend.rank == 0:
        trackers += open_folder(session, folder)
    try:
        complete = work()
    except BaseException as error:
        status: Status = "stopped" if isinstance(error, KeyboardInterrupt) else "failed"
        _finish(summarize(session, status), trackers, folder)
        raise
    summary = summarize(session, "finished" if complete else "interrupted")
    _finish(summary, trackers, folder)
    return summary


def _finish(summary: Summary, trackers: list[Tracker], folder: Path) -> None:
    if not trackers:
        return
    summary.write(folder / "summary.json")
    write_report(folder)
    for tracker in trackers:
        tracker.finish(asdict(summary))


def summarize(session: Session, status: Status) -> Summary:
    """Say in numbers how far the run has come."""
    plan, log = session.plan, session.log
    last = session.last_kept or {}
    return Summary(
        recipe=session.recipe.name,
        commit=source_commit() if session.backend.rank == 0 else None,
        versions=versions(),
        backend=session.backend.name,
        workers=plan.workers,
        global_batch=plan.global_batch,
        device_batch=plan.device_batch,
        accumulation=plan.accumulation,
        steps=session.made,
        skipped_steps=log.skipped,
        samples=session.made * plan.global_batch,
        seconds=session.seconds,
        images_per_second=log.images / log.seconds if log.images else None,
        peak_memory_bytes=peak_memory_bytes(session.backend.device),
        top1=last.get("top1"),
        top5=last.get("top5"),
        loss=last.get("loss"),
        stages=session.stages,
        status=status,
    )
