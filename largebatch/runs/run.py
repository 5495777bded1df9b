"""The composition root: a recipe and a machine -> a finished run folder.

A run folder is the record of a run: recipe.yaml (resolved), log.jsonl, summary.json, report.html,
charts and checkpoints/. It is made after everything that a user can get wrong has been checked.
"""

import gc
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch
from pydantic import TypeAdapter

from largebatch import accelerator
from largebatch.distributed.environment import join_slurm, own_rank, require_alone, worker_rank
from largebatch.errors import (
    BackendError,
    PlanError,
    SmallerBatchError,
    WorkerFailedError,
    printable,
)
from largebatch.formatting import plural
from largebatch.models.fusion import describe_pairs
from largebatch.recipe.arithmetic.plan import make_plan
from largebatch.recipe.loading import load_recipe
from largebatch.recipe.recipe import Recipe
from largebatch.runs.build import open_session, with_profiler
from largebatch.runs.fitting import halve, keep
from largebatch.runs.folder import (
    check_folder,
    finished_summary,
    read_checkpoint,
    record,
    remember,
    require_same_run,
)
from largebatch.runs.interrupts import describe_saved
from largebatch.runs.options import Options, chosen_folder, with_options
from largebatch.tracking.console import write_to
from largebatch.tracking.events import REPORT, SUMMARY, Summary
from largebatch.training.stages import require_resumable, run_stages

_SLOW = (
    "{} on a CPU is often ten times slower than fp32, or more; to try a recipe here: "
    "--set precision=fp32 --set reduction.dtype=fp32"
)
_COMPILING = "the model is compiled in the first update of each image size: it takes up to minutes"

JOB = TypeAdapter(tuple[Recipe, Options])
"""The arguments of local workers, as JSON."""


@with_options(Options)
def run(recipe: Recipe | Path | str, options: Options) -> Summary:
    """Train, polish and evaluate a recipe; return the content of summary.json, and the folder.

    `recipe` comes from load_recipe, or is the name of an installed recipe or the path of a file,
    then with `overrides` such as ["seed=3"] or {"seed": 3}. All keywords are the fields of
    `largebatch.runs.options.Options`. Starts `workers` processes on this machine, unless torchrun,
    horovodrun or srun started this one among several; they import `dataset` and `imports`.

    An interrupted run returns too: the `status` of its Summary is then "interrupted", and the same
    call with its run folder as `out` and resume=True continues it.

    Raises LargebatchError for what the user can fix.

    >>> from tempfile import mkdtemp
    >>> summary = run("digits_96", max_steps=1, report=False, out=mkdtemp())  # doctest: +ELLIPSIS
    digits-96: ...
    >>> summary.steps, summary.status
    (1, 'paused')
    """
    changes = options.changes
    if isinstance(recipe, (str, Path)):
        recipe = load_recipe(recipe, changes)
    elif not isinstance(recipe, Recipe):
        raise TypeError(f"recipe: expected a name, a path or a Recipe, got {type(recipe).__name__}")
    elif changes:
        raise ValueError(f"{', '.join(changes)}: pass this to load_recipe, or a recipe's name here")
    summary = start(recipe, options.without_changes())
    assert summary.folder is not None
    if own_rank() == 0 and (page := summary.folder / REPORT).is_file():
        write_to(sys.stdout, printable(f"report: {page}\n"))
    return summary


def start(recipe: Recipe, options: Options) -> Summary:
    """Do what `run` does, for a loaded recipe."""
    join_slurm()
    options = replace(options, out=chosen_folder(options.out, recipe.name))
    _require_options(options)
    if worker_rank() in {None, 0}:
        check_folder(options.out, resume=options.resume)
        if "mlperf" in recipe.tracking.trackers and recipe.data.source == "folder" and options.data:
            from largebatch.data.index.index import require_stored

            require_stored(Path(options.data), purpose="tracking: [mlperf]")
    if options.workers == 1:
        summary = run_worker(recipe, options)
    else:
        make_plan(recipe, workers=options.workers, backend=options.backend)
        restarting(recipe, options)
        summary = TypeAdapter(Summary).validate_json((options.out / SUMMARY).read_bytes())
    return replace(summary, folder=options.out)


def _require_options(options: Options) -> None:
    workers, least = options.workers, options.min_workers
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


def restarting(recipe: Recipe, options: Options) -> None:
    """Start local workers; if one dies, start all again from the newest checkpoint.

    At most `restarts` times, and not after an error that the user can fix. If nothing was saved
    before a worker died, fewer workers are started, as the plan allows, but at least `min_workers`.
    If one ran out of memory, all are started again with a smaller device batch.
    """
    from largebatch.runs.launch import start_workers

    workers, left = options.workers, options.restarts
    least = options.min_workers or workers
    start, limit = time.monotonic(), options.time_limit
    while True:
        saved = describe_saved(options.out)
        command = ["-m", "largebatch.runs.worker", JOB.dump_json((recipe, options)).decode()]
        try:
            horovod = options.backend == "horovod"
            return start_workers(command, workers=workers, horovod=horovod)
        except SmallerBatchError as error:
            reason = str(error)
        except WorkerFailedError as error:
            if not left:
                raise
            reason, left = str(error), left - 1
            if describe_saved(options.out) == saved:
                for number in range(workers - 1, least - 1, -1):  # the next one that divides it
                    with suppress(PlanError):
                        make_plan(recipe, workers=number, backend=options.backend)
                        workers = number
                        break
        if limit is not None:  # it is the command's, not each start's
            limit_left = max(0.0, limit - (time.monotonic() - start))
            options = replace(options, time_limit=limit_left, whole_limit=limit)
        options = replace(options, resume="auto")
        write_to(
            sys.stderr,
            f"largebatch: {reason}\nlargebatch: {describe_saved(options.out)}; "
            f"starting {plural(workers, 'worker')} again, {plural(left, 'restart')} left\n",
        )


def run_worker(recipe: Recipe, options: Options) -> Summary:
    """Run one worker; if it is alone and ran out of memory, again with a smaller device batch."""
    begun, limit = time.monotonic(), options.time_limit
    while True:
        try:
            return _run_worker(recipe, options)
        except SmallerBatchError as error:
            if not error.alone:
                raise
        gc.collect()  # the tensors of the session before
        left = None if limit is None else max(0.0, limit - (time.monotonic() - begun))
        whole_limit = options.whole_limit or limit
        options = replace(options, resume="auto", time_limit=left, whole_limit=whole_limit)


def _run_worker(recipe: Recipe, options: Options) -> Summary:
    """Run one worker; raise SmallerBatchError if the run can continue after memory ran out."""
    folder = options.out
    with open_session(recipe, options, {"command": "train"}) as session:
        saver = session.saver
        checkpoint = read_checkpoint(folder, session.backend, resume=options.resume)
        if checkpoint is not None:
            here, splits = recipe.mathematics.model_dump(mode="json"), session.pipeline.splits
            again = options.resume == "auto"
            require_same_run(checkpoint, here, splits, folder, allow=options.allow, again=again)
            require_resumable(checkpoint, session.plan, folder)
            saver.restore(checkpoint, source=str(folder))
            finished = finished_summary(folder, session.backend)
            if finished is not None and len(finished.stages) == len(checkpoint.stages):
                if session.backend.rank == 0:
                    write_to(sys.stdout, printable(f"{folder}: already finished\n"))
                return finished  # if the numbers differ, its last checkpoint is damaged
        elif recipe.model.weights is not None:
            from largebatch.runs.weights import begin_with

            drawn = recipe.model.head_std is not None
            file = Path(recipe.model.weights)
            begin_with(file, session.state, session.backend, drawn=drawn)
        until = session.plan.updates if options.max_steps is None else options.max_steps
        profiled, profiler = with_profiler(session, options, until=until)

        def train() -> bool:
            if session.backend.rank == 0:
                remember(folder, options)
                keep(folder, session.backend, session.plan)
            session.backend.barrier()  # a worker that runs out of memory keeps a smaller one
            pipeline = session.pipeline
            remarks: list[str | None] = [
                *(pipeline.remarks if checkpoint is None else pipeline.chosen)
            ]
            if recipe.precision != "fp32" and session.backend.device.type == "cpu":
                remarks.append(_SLOW.format(recipe.precision))
            if recipe.execution.compile:
                remarks.append(_COMPILING)
            remarks += describe_pairs(session.state.model)
            if options.resume == "auto" and checkpoint is None:
                remarks.append(f"no checkpoint in {folder}; starting a new run")
            remarks += [session.proven, recipe.tracking.remark]
            for remark in filter(None, remarks):
                session.log.note("train", remark)
            with suppress(torch.OutOfMemoryError), accelerator.memory_errors(), profiler:
                return run_stages(profiled, until=until)
            raise halve(session, folder)  # here, where the failed pass is no longer referenced

        return record(session, options, train)
