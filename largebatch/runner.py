"""The composition root: a recipe and a machine -> a finished run folder.

A run folder is the record of a run: recipe.yaml (resolved), log.jsonl, summary.json, report.html,
pictures and checkpoints/. It is made when everything that the user can get wrong has been checked.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import torch

from largebatch import backends, checkpoint
from largebatch.backends import Name, launched_rank
from largebatch.backends.reducer import Reducer
from largebatch.build import build_model, build_optimizer
from largebatch.checkpoint import Checkpoint
from largebatch.contracts import Backend, Tracker
from largebatch.data.pipeline import open_pipeline
from largebatch.errors import BackendError, CheckpointError
from largebatch.loading import dump_recipe
from largebatch.loss import cross_entropy
from largebatch.norm import Spans
from largebatch.plan import Plan, build_schedule, make_plan
from largebatch.recipe import Recipe
from largebatch.report import write_report
from largebatch.stages import Session, StepLog, run_stages
from largebatch.summary import Status, Summary, peak_memory_bytes, source_commit, versions
from largebatch.tracking.console import Console
from largebatch.tracking.jsonl import JsonLines
from largebatch.tracking.wandb import Wandb
from largebatch.workers import start_workers

Decoder = Literal["dali", "torchvision"]


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
        out=Path(out or f"runs/{recipe.name}-{datetime.now():%Y%m%d-%H%M%S}"),
        data=Path(data) if data else None,
        backend=backend,
        device_batch=device_batch,
        decoder=decoder,
        resume=resume,
        max_steps=max_steps,
    )
    if launched_rank() is not None:
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
    backend = backends.open_backend(options.backend)
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // backend.local_size))
    plan = make_plan(recipe, workers=backend.world_size, device_batch=options.device_batch)
    state = _read_state(recipe, options, backend)
    trackers: list[Tracker] = []
    with (
        _stop_requests() as wants_stop,
        open_session(recipe, plan, options, backend, wants_stop, trackers) as session,
    ):
        if state is not None:
            session.restore(state)
        if backend.rank == 0:
            trackers += open_trackers(session, options)
        summary = _carry_out(session, trackers, options)
    backend.close()
    return summary


@contextmanager
def open_session(
    recipe: Recipe,
    plan: Plan,
    options: Options,
    backend: Backend,
    wants_stop: Callable[[], bool],
    trackers: list[Tracker],
) -> Iterator[Session]:
    """Build every object of the run on this worker."""

    def emit(record: dict[str, Any]) -> None:
        for tracker in trackers:
            tracker.record(record)

    pipeline = open_pipeline(recipe, plan, backend, folder=options.data, decoder=options.decoder)
    model = build_model(recipe, backend)
    spans = plan.global_batch // plan.bn_span if plan.bn_span else 1
    with closing(Reducer(model.named_parameters(), backend)) as reducer:
        yield Session(
            recipe=recipe,
            plan=plan,
            backend=backend,
            pipeline=pipeline,
            model=model,
            optimizer=build_optimizer(recipe, model),
            criterion=cross_entropy(
                smoothing=recipe.loss.label_smoothing, off_target=recipe.loss.off_target
            ),
            schedule=build_schedule(recipe),
            reducer=reducer,
            spans=Spans(model, backend, spans_per_step=spans),
            emit=emit,
            log=StepLog(plan, backend, emit, wants_stop),
            checkpoints=options.out / "checkpoints",
        )


def open_trackers(session: Session, options: Options) -> list[Tracker]:
    """Make the run folder and begin to follow the run; worker 0 only."""
    recipe, plan, folder = session.recipe, session.plan, options.out
    trackers: list[Tracker] = [Console()]
    if "wandb" in recipe.tracking:
        trackers.append(Wandb(folder))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "recipe.yaml").write_text(dump_recipe(recipe), encoding="utf-8")
    trackers.insert(1, JsonLines(folder / "log.jsonl"))
    config = {
        **recipe.model_dump(mode="json"),
        "plan": {**asdict(plan), "steps_per_epoch": plan.steps_per_epoch},
    }
    for tracker in trackers:
        tracker.start(config, resume_step=session.step)
    return trackers


def _carry_out(session: Session, trackers: list[Tracker], options: Options) -> Summary:
    """Go through the stages and, whatever happens, write the summary and the report."""
    until = options.max_steps or session.plan.steps
    try:
        complete = run_stages(session, until=until)
    except BaseException:
        finish(summarize(session, "failed"), trackers, options.out)
        raise
    summary = summarize(session, "finished" if complete else "interrupted")
    finish(summary, trackers, options.out)
    return summary


def finish(summary: Summary, trackers: list[Tracker], folder: Path) -> None:
    """Write the summary and the report and let the trackers go; only worker 0 has trackers."""
    if not trackers:
        return
    summary.write(folder / "summary.json")
    write_report(folder)
    for tracker in trackers:
        tracker.finish(asdict(summary))


def summarize(session: Session, status: Status) -> Summary:
    """Say in numbers how far the run has come."""
    plan, log = session.plan, session.log
    last = session.stages[-1] if session.stages else {}
    return Summary(
        recipe=session.recipe.name,
        commit=source_commit(),
        versions=versions(),
        backend=session.backend.name,
        workers=plan.workers,
        global_batch=plan.global_batch,
        device_batch=plan.device_batch,
        accumulation=plan.accumulation,
        steps=session.step,
        samples=session.step * plan.global_batch,
        seconds=session.seconds,
        images_per_second=log.images / log.seconds if log.images else None,
        peak_memory_bytes=peak_memory_bytes(session.backend.device),
        top1=last.get("top1"),
        top5=last.get("top5"),
        loss=last.get("loss"),
        stages=session.stages,
        status=status,
    )


def _read_state(recipe: Recipe, options: Options, backend: Backend) -> Checkpoint | None:
    """Return the state to go on from, on every worker; worker 0 reads it and checks the folder."""
    content = None
    if backend.rank == 0:
        folder = options.out
        if options.resume and not (folder / "recipe.yaml").exists():
            raise CheckpointError(f"{folder}: there is no run to resume; leave --resume out")
        if not options.resume and folder.exists() and any(folder.iterdir()):
            raise CheckpointError(
                f"{folder}: already holds files; choose another --out, or add --resume to go on "
                "with the run in it"
            )
        content = checkpoint.newest(folder / "checkpoints") if options.resume else None
    content = backends.broadcast_bytes(content, backend)
    if not content:
        return None
    state = checkpoint.loads(content, source=str(options.out))
    if state.recipe != recipe:
        changed = "; ".join(_differences(state.recipe.model_dump(), recipe.model_dump()))
        raise CheckpointError(f"{options.out}: the run there has another recipe: {changed}")
    return state


def _differences(there: Any, here: Any, where: str = "") -> Iterator[str]:  # noqa: ANN401 -- any JSON
    if isinstance(there, dict) and isinstance(here, dict):
        for key in {**there, **here}:
            dotted = f"{where}.{key}".lstrip(".")
            yield from _differences(there.get(key), here.get(key), dotted)
    elif there != here:
        yield f"{where} is {there} there and {here} here"


@contextmanager
def _stop_requests() -> Iterator[Callable[[], bool]]:
    """Yield whether SIGINT or SIGTERM has asked for a stop; the second one acts at once."""
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked.is_set
        return
    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def ask(number: int, _: object) -> None:
        asked.set()
        signal.signal(number, previous[signal.Signals(number)])

    for number in previous:
        signal.signal(number, ask)
    try:
        yield asked.is_set
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
