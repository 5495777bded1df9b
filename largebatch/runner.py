"""The composition root: a recipe and a machine -> a finished run folder.

A run folder is the record of a run: recipe.yaml (resolved), log.jsonl, summary.json, report.html,
pictures and checkpoints/. It is made when everything that the user can get wrong has been checked.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from largebatch.build import (
    build_extra,
    build_model,
    build_optimizer,
    build_reducer,
    build_scaler,
    require_trainable,
    share_weights,
)
from largebatch.data.pipeline import open_pipeline
from largebatch.distributed.agreement import Facts, require_agreement
from largebatch.distributed.backend import Backend
from largebatch.distributed.connection import Name, connect
from largebatch.distributed.environment import available_cores, launched_rank
from largebatch.errors import BackendError
from largebatch.folder import check_folder, default_folder
from largebatch.models.batchnorm import Spans
from largebatch.recipe.plan import Plan, make_plan, measuring_plan
from largebatch.recipe.recipe import Recipe, plainest
from largebatch.record import open_folder, read_state
from largebatch.report import write_report
from largebatch.schedules.build import build_schedule
from largebatch.tracking.environment import peak_memory_bytes, source_commit, versions
from largebatch.tracking.events import Status, Summary, Tracker
from largebatch.training.ema import Average
from largebatch.training.loss import cross_entropy
from largebatch.training.stages import require_resumable, run_stages, say
from largebatch.training.state import Means, Session
from largebatch.training.step_log import StepLog
from largebatch.workers import start_workers, stop_requests

Decoder = Literal["dali", "torchvision"]

_SLOW = (
    "fp16 on a CPU is several times slower than fp32; to try a recipe here: "
    "--set precision=fp32 --set reduction.dtype=fp32"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the machine and the moment decide about a run; none of it is in the recipe."""

    out: Path
    """The run folder."""

    data: Path | None = None
    """The pictures, for a recipe whose data.source is folder."""

    backend: Name = "auto"
    device_batch: int | None = None
    """Samples a worker holds at a time; None: the largest that fits plan.DEVICE_BATCH_LIMIT."""

    decoder: Decoder | None = None
    """Instead of the recipe's."""

    resume: bool = False
    """Go on from the newest checkpoint in `out`."""

    max_steps: int | None = None
    """Stop, resumable, when this many updates have been made in all."""

    @property
    def shared(self) -> Facts:
        """What every worker must be given alike; only worker 0 uses the run folder."""
        own = {
            name: value for name, value in asdict(self).items() if name not in {"out", "backend"}
        }
        return {f"--{name.replace('_', '-')}": value for name, value in own.items()}


def run(  # noqa: PLR0913 -- the command line's options, one to one
    recipe: Recipe,
    *,
    workers: int = 1,
    out: Path | str | None = None,
    data: Path | str | None = None,
    backend: Name = "auto",
    device_batch: int | None = None,
    decoder: Decoder | None = None,
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
        device_batch=device_batch,
        decoder=decoder,
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
    make_plan(recipe, workers=workers, device_batch=chosen.device_batch)
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


@contextmanager
def join(options: Options, facts: Facts) -> Iterator[Backend]:
    """Join the other workers, once in a process: the address where they meet serves one meeting.

    They are left when all went well, for else they may be gone. Raises MismatchError on every
    worker unless they have the same options and packages and state the same `facts`.
    """
    backend = connect(options.backend)
    require_agreement({**facts, **options.shared, "versions": versions()}, backend, backend.device)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, available_cores() // backend.local_size))
    torch.backends.cudnn.allow_tf32 = False  # fp32 in a recipe is fp32
    yield backend
    backend.close()


@contextmanager
def open_session(
    recipe: Recipe, options: Options, facts: Facts, *, measuring: bool = False
) -> Iterator[tuple[Session, list[Tracker]]]:
    """Join the other workers and build every object of a run; see join and build_session."""
    with (
        join(options, {**facts, **recipe.model_dump(mode="json")}) as backend,
        build_session(recipe, options, backend, measuring=measuring) as opened,
    ):
        yield opened


@contextmanager
def build_session(
    recipe: Recipe, options: Options, backend: Backend, *, measuring: bool
) -> Iterator[tuple[Session, list[Tracker]]]:
    """Build every object of a run; who follows it can join later.

    `measuring` promises that nothing will be trained: any number of workers then fits, and what the
    training machine had to have is not needed.
    """
    trackers: list[Tracker] = []

    def emit(record: dict[str, Any]) -> None:
        for tracker in trackers:
            tracker.record(record)

    divide = measuring_plan if measuring else make_plan
    plan = divide(recipe, workers=backend.world_size, device_batch=options.device_batch)
    pipeline = open_pipeline(recipe, plan, backend, folder=options.data, decoder=options.decoder)
    model = build_model(recipe, backend)
    share_weights(model, backend, facts={"plan": asdict(plan), "index": pipeline.splits})
    here = recipe
    if measuring:
        here = plainest(recipe)
    else:
        require_trainable(model, recipe)
    polish = recipe.polish
    with stop_requests(heard=backend.rank == 0) as wants_stop:
        session = Session(
            recipe=recipe,
            plan=plan,
            backend=backend,
            pipeline=pipeline,
            model=model,
            optimizer=build_optimizer(here, model),
            criterion=cross_entropy(
                smoothing=recipe.loss.label_smoothing, off_target=recipe.loss.off_target
            ),
            schedule=build_schedule(recipe),
            reducer=build_reducer(here, model, backend),
            build_affine=partial(_build_affine, here, plan, model, backend),
            average=Average(model, decay=polish.ema) if polish and polish.ema else None,
            spans=Spans(model, backend, sync_workers=plan.sync_workers),
            scaler=build_scaler(recipe, plan, backend),
            emit=emit,
            log=StepLog(plan, backend, emit, wants_stop),
            checkpoints=options.out / "checkpoints",
        )
        try:
            yield session, trackers
        finally:
            session.reducer.close()


def _build_affine(recipe: Recipe, plan: Plan, model: nn.Module, backend: Backend) -> Means:
    assert recipe.polish is not None
    assert recipe.polish.affine is not None
    rate = recipe.polish.affine.lr
    return build_extra(recipe, plan, model, backend, affine_only=True, lr=rate)


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
