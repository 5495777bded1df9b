"""The composition root: a recipe and a machine -> a finished run folder.

A run folder is the record of a run: recipe.yaml (resolved), log.jsonl, summary.json, report.html,
charts and checkpoints/. It is made after everything that a user can get wrong has been checked.
"""

import gc
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch
from pydantic import TypeAdapter

from largebatch import accelerator
from largebatch.address import Place, place_of
from largebatch.distributed.environment import (
    TIMEOUT_SECONDS,
    BackendName,
    join_slurm,
    own_rank,
    require_alone,
    worker_rank,
)
from largebatch.errors import (
    BackendError,
    PlanError,
    SmallerBatchError,
    WorkerFailedError,
    WrongCardError,
    printable,
)
from largebatch.formatting import plural
from largebatch.models.fusion import describe_pairs
from largebatch.recipe.arithmetic.plan import make_plan
from largebatch.recipe.loading import load_recipe, override_words
from largebatch.recipe.recipe import Recipe
from largebatch.runs.build import open_session, with_profiler
from largebatch.runs.fitting import halve, keep
from largebatch.runs.folder import (
    check_folder,
    finished_summary,
    read_checkpoint,
    recorded,
    remember,
    require_same_run,
)
from largebatch.runs.interrupts import describe_saved, noting_requests
from largebatch.runs.mirror import bring_up_to_date, copy_of
from largebatch.runs.options import NEW_FOLDER, Options, Resume, address_of, chosen_folder
from largebatch.tracking.console import write_to
from largebatch.tracking.events import LOG, REPORT, SUMMARY, Summary, Suspect, WrongCard
from largebatch.tracking.scalars import logged
from largebatch.training.checkpoint import Checkpoint
from largebatch.training.session import Session
from largebatch.training.stages import require_resumable, run_stages

_SLOW = (
    "{} on a CPU is often ten times slower than fp32, or more; to try a recipe here: "
    "--set precision=fp32 --set reduction.dtype=fp32"
)
_COMPILING = "the model is compiled in the first update of each image size: it takes up to minutes"

JOB = TypeAdapter(tuple[Recipe, Options])
"""The arguments of local workers, as JSON."""


def run(  # noqa: PLR0913 -- the options of a run
    recipe: Recipe | Path | str,
    *,
    overrides: Sequence[str] | Mapping[str, object] = (),
    device_batch: int | None = None,
    decoder: str | None = None,
    imports: Sequence[str] = (),
    data: Place | str | None = None,
    cache_dir: Path | str | None = None,
    cache_gb: float | None = None,
    dataset: str | None = None,
    out: Path | str = NEW_FOLDER,
    mirror: str | None = None,
    resume: Resume = False,
    max_steps: int | None = None,
    time_limit: float | None = None,
    profile: tuple[int, int] | None = None,
    allow: Sequence[str] = (),
    report: bool = True,
    workers: int = 1,
    restarts: int = 0,
    min_workers: int | None = None,
    backend: BackendName = "auto",
    timeout: float = TIMEOUT_SECONDS,
) -> Summary:
    """Train, polish and evaluate a recipe; return the content of summary.json, and the folder.

    `recipe` comes from load_recipe, or is the name of an installed recipe or the path of a file,
    then with `overrides` such as ["seed=3"] or {"seed": 3}; `device_batch` and `decoder` override
    the keys of `execution`. `imports` are modules to import first, which may register models with
    timm. Images are those of the folder `data`, or address such as
    "s3://bucket/imagenet", or of `dataset`, "module:function", which returns a
    training and a validation data set.

    With an address, each host keeps what its workers read in the folder `cache_dir`, at most
    `cache_gb` x 10^9 bytes, and reads it from there in later epochs and runs.

    The run folder is `out`, and a copy of it is kept below the address `mirror`, such as
    s3://bucket/runs. `resume` continues the run in it; "auto" starts one if there is no
    checkpoint. The run stops after `max_steps` updates in all or before `time_limit` seconds, and
    can be resumed. `profile` writes a trace of these updates, first and last. `allow` are keys that
    may differ from the resumed run, such as "schedule.peak_lr". `report`: draw the report at the
    end.

    Starts `workers` processes on this machine, unless torchrun, horovodrun or srun started this one
    among several; they import `dataset` and `imports`. Workers that died are started again, at most
    `restarts` times, and at least `min_workers` of them. `backend` sums gradients, by default the
    launcher's; a worker waits `timeout` seconds for another, six times as long until the first
    update.

    An interrupted run returns too: the `status` of its Summary is then "interrupted", and the same
    call with its run folder as `out` and resume=True continues it.

    Raises LargebatchError for what the user can fix.

    >>> from tempfile import mkdtemp
    >>> summary = run("digits_96", max_steps=1, report=False, out=mkdtemp())  # doctest: +ELLIPSIS
    digits-96: ...
    >>> summary.steps, summary.status
    (1, 'paused')
    """
    options = Options(
        overrides=override_words(overrides),
        device_batch=device_batch,
        decoder=decoder,
        imports=tuple(imports),
        data=None if data is None else place_of(data),
        cache_dir=None if cache_dir is None else Path(cache_dir),
        cache_gb=cache_gb,
        dataset=dataset,
        out=Path(out),
        mirror=None if mirror is None else address_of(mirror),
        resume=resume,
        max_steps=max_steps,
        time_limit=time_limit,
        profile=profile,
        allow=tuple(allow),
        report=report,
        workers=workers,
        restarts=restarts,
        min_workers=min_workers,
        backend=backend,
        timeout=timeout,
    )
    changes = options.changes
    if isinstance(recipe, (str, Path)):
        recipe = load_recipe(recipe, changes)
    elif not isinstance(recipe, Recipe):
        raise TypeError(f"recipe: expected a name, a path or a Recipe, got {type(recipe).__name__}")
    elif changes:
        raise ValueError(f"{', '.join(changes)}: pass this to load_recipe, or a recipe's name here")
    options = prepare(recipe, options.without_changes())
    # The choice of `start`: a call of it here would be one more room on the way to the model.
    summary = run_worker(recipe, options) if workers == 1 else run_workers(recipe, options)
    page = options.out / REPORT
    if own_rank() == 0 and page.is_file():
        write_to(sys.stdout, printable(f"report: {page}\n"))
    return replace(summary, folder=options.out)


def start(recipe: Recipe, options: Options) -> Summary:
    """Do what `run` does, for a loaded recipe."""
    options = prepare(recipe, options)
    worker = run_worker if options.workers == 1 else run_workers
    return replace(worker(recipe, options), folder=options.out)


def prepare(recipe: Recipe, options: Options) -> Options:
    """Check what a user can get wrong before a process is started; choose the run folder."""
    join_slurm()
    options = replace(options, out=chosen_folder(options.out, recipe.name))
    _require_options(options)
    # Under a launcher all workers come here, and one of them looks at the folder for all.
    if worker_rank() in {None, 0}:
        if options.mirror is not None:
            copy = copy_of(options.out, options.mirror)
            bring_up_to_date(options.out, copy, resume=bool(options.resume))
        check_folder(options.out, resume=options.resume)
        images = options.data if recipe.data.source == "folder" else None
        if recipe.tracking.logs_mlperf and images is not None:
            # MLPerf's clock would run while the folder is indexed.
            from largebatch.data.index.index import require_stored

            require_stored(images, purpose="tracking: [mlperf]")
    if options.workers > 1:  # a recipe that they cannot divide is refused before they start
        make_plan(recipe, workers=options.workers, backend=options.backend)
    return options


def _require_options(options: Options) -> None:
    workers = options.workers
    least = options.min_workers
    if workers < 1:
        raise BackendError(f"--workers {workers}: expected 1 or more")
    if options.restarts < 0:
        raise BackendError(f"--restarts {options.restarts}: expected 0 or more")
    if options.restarts and (workers == 1 or worker_rank() is not None):
        raise BackendError(
            "--restarts starts --workers again; leave it out, and repeat this with --resume auto"
        )
    if least is not None and not (options.restarts and 1 <= least <= workers):
        raise BackendError(
            f"--min-workers {least}: expected --restarts, and from 1 to {workers}, as --workers"
        )
    if workers != 1:
        require_alone(workers)
    if workers != 1 and options.backend == "serial":
        raise BackendError(
            f"--backend serial is for a single process; leave it or --workers {workers} out"
        )


def run_workers(recipe: Recipe, options: Options) -> Summary:
    """Start local workers; if one dies, start all again from the newest checkpoint.

    At most `restarts` times, and not after an error that the user can fix. If nothing was saved
    before a worker died, fewer workers are started, as the plan allows, but at least `min_workers`.
    If one ran out of memory, all are started again with a smaller device batch. A worker whose
    device a replay found wrong is left out, with execution.on_wrong_card: leave_out. After a
    request to stop none is started again: the error is raised.
    """
    from largebatch.runs.launch import start_workers

    workers = options.workers
    least = options.min_workers or workers
    restarts = options.restarts  # those that are left
    started = time.monotonic()
    is_asked_to_stop = noting_requests()
    following = options
    while True:
        saved = describe_saved(options.out)
        command = ["-m", "largebatch.runs.worker", JOB.dump_json((recipe, following)).decode()]
        try:
            start_workers(command, workers=workers, horovod=options.backend == "horovod")
            return TypeAdapter(Summary).validate_json((options.out / SUMMARY).read_bytes())
        except SmallerBatchError as error:  # not counted: the device batch halves, so it ends
            if is_asked_to_stop():
                raise
            reason = str(error)
        except WrongCardError as error:
            suspect = _device_to_leave_out(recipe, options.out)
            fewer = _fewer_workers(recipe, options, workers, least=least)
            if suspect is None or is_asked_to_stop():
                raise
            if not restarts or fewer == workers:
                raise WrongCardError(
                    f"{error}; on_wrong_card: leave_out needs --restarts, and --min-workers with "
                    "a smaller number that divides the recipe"
                ) from None
            reason = str(error)
            restarts -= 1
            workers = fewer
            if accelerator.count():
                accelerator.hide(suspect.worker)
        except WorkerFailedError as error:
            # A worker may fail while it stops: whoever pressed Ctrl-C does not want another start.
            if not restarts or is_asked_to_stop():
                raise
            reason = str(error)
            restarts -= 1
            # After progress all are started again; a worker that dies at once may lack its device.
            if describe_saved(options.out) == saved:
                workers = _fewer_workers(recipe, options, workers, least=least)
        following = options.continued(seconds=time.monotonic() - started)
        write_to(
            sys.stderr,
            f"largebatch: {reason}\nlargebatch: {describe_saved(options.out)}; "
            f"starting {plural(workers, 'worker')} again, {plural(restarts, 'restart')} left\n",
        )


def _device_to_leave_out(recipe: Recipe, folder: Path) -> Suspect | None:
    """Return the device that the last replay of a run found wrong, if the recipe leaves it out."""
    if recipe.execution.on_wrong_card != "leave_out":
        return None
    events = [event for event in logged(folder / LOG) if isinstance(event, WrongCard)]
    if not events or not events[-1].is_certain:
        return None
    return events[-1].suspects[0]  # if there is a second one, it is found after the restart


def _fewer_workers(recipe: Recipe, options: Options, workers: int, *, least: int) -> int:
    """Return the next smaller number of workers that divides the recipe, if it has one."""
    for number in range(workers - 1, least - 1, -1):
        with suppress(PlanError):
            make_plan(recipe, workers=number, backend=options.backend)
            return number
    return workers


def run_worker(recipe: Recipe, options: Options) -> Summary:
    """Run one worker; if it is alone and ran out of memory, again with a smaller device batch.

    Raises SmallerBatchError if it is one of several, because then all of them have to start again,
    and after a request to stop.
    """
    started = time.monotonic()
    is_asked_to_stop = noting_requests()
    following = options
    while True:
        try:
            with open_session(recipe, following, {"command": "train"}) as session:
                checkpoint = read_checkpoint(
                    following.out, session.backend, resume=following.resume
                )
                finished = _restore(session, checkpoint, following)
                if finished is not None:
                    return finished
                until = following.max_steps
                if until is None:
                    until = session.plan.updates
                profiled, profiler = with_profiler(session, following, until=until)
                # Everything that a user can get wrong has been checked: the folder is made now.
                with recorded(session, following) as recording:
                    _note_choices(session, following, is_new=checkpoint is None)
                    is_out_of_memory = False
                    try:
                        with accelerator.memory_errors(), profiler:
                            recording.complete = run_stages(profiled, until=until)
                    except torch.OutOfMemoryError:
                        is_out_of_memory = True
                    if is_out_of_memory:  # here the failed pass is no longer referenced
                        raise halve(session, following.out)
                assert recording.summary is not None
                return recording.summary
        except SmallerBatchError as error:
            if not error.alone or is_asked_to_stop():
                raise
        # The tensors of this session leave the device before the next one is opened.
        del session, profiled, profiler, recording, checkpoint
        gc.collect()
        following = options.continued(seconds=time.monotonic() - started)


def _restore(session: Session, checkpoint: Checkpoint | None, options: Options) -> Summary | None:
    """Load what the run begins with, if anything; return the summary of a run that has finished."""
    recipe = session.saver.recipe
    folder = options.out
    if checkpoint is None:
        if recipe.model.weights is not None:
            from largebatch.runs.weights import begin_with

            drawn = recipe.model.head_std is not None
            begin_with(Path(recipe.model.weights), session.state, session.backend, drawn=drawn)
        return None
    require_same_run(  # before anything of it is loaded
        checkpoint,
        recipe.mathematics.model_dump(mode="json"),
        session.pipeline.splits,
        folder,
        allow=options.allow,
        again=options.resume == "auto",
    )
    require_resumable(checkpoint, session.plan, folder)
    session.saver.restore(checkpoint, source=str(folder))
    summary = finished_summary(folder, session.backend)
    if summary is None or len(summary.stages) != len(checkpoint.stages):
        return None  # if the numbers differ, its last checkpoint is damaged: its end is repeated
    if session.backend.rank == 0:
        write_to(sys.stdout, printable(f"{folder}: already finished\n"))
    return summary


def _note_choices(session: Session, options: Options, *, is_new: bool) -> None:
    """Keep the choices for this machine in the run folder, and note them in the log."""
    recipe = session.saver.recipe
    backend = session.backend
    if backend.rank == 0:
        remember(options.out, options)
        keep(options.out, backend, session.plan)
    backend.barrier()  # a worker that runs out of memory keeps a smaller one
    remarks: list[str | None] = [*session.remarks]
    if is_new:
        remarks += session.ignored
    if recipe.precision != "fp32" and backend.device.type == "cpu":
        remarks.append(_SLOW.format(recipe.precision))
    if recipe.execution.compile:
        remarks.append(_COMPILING)
    remarks += describe_pairs(session.state.model)
    if options.resume == "auto" and is_new:
        remarks.append(f"no checkpoint in {options.out}; starting a new run")
    remarks += [session.proven, recipe.tracking.remark]
    for remark in remarks:
        if remark:
            session.log.note("train", remark)
