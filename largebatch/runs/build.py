"""Recipe and machine -> every object of a run: the model, the optimizer, the reducer."""

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, assert_never

import torch
from torch import nn
from torch.profiler import ProfilerAction, profile

from largebatch.data.pipeline import Pipeline, open_images
from largebatch.distributed.agreement import Facts, require_agreement, share_weights
from largebatch.distributed.backend import Backend
from largebatch.distributed.connection import connect
from largebatch.distributed.environment import LAUNCHER, available_cores, world_size
from largebatch.errors import MissingPackageError, PlanError
from largebatch.models.of_recipe import build_model, prepare_training
from largebatch.recipe.arithmetic.division import may_split
from largebatch.recipe.arithmetic.plan import Plan, measuring_plan, plan_run
from largebatch.recipe.recipe import Recipe, anywhere
from largebatch.runs.interrupts import stop_requests
from largebatch.runs.options import Options
from largebatch.runs.state import build_session, build_state, build_training
from largebatch.tracking.environment import versions
from largebatch.tracking.events import TRACE, Tracker
from largebatch.training.session import Session
from largebatch.training.state import TrainState
from largebatch.training.updates import Updates, synchronous_updates

_LOG = logging.getLogger(__name__)

_SPIN = (
    "PyTorch's threads spin while they wait for each other, and on a busy machine a run takes "
    "several times as long: import run from largebatch before torch, or set OMP_WAIT_POLICY=PASSIVE"
)


@contextmanager
def join(
    options: Options, facts: Facts, *, starting: bool = False, splits: bool = False
) -> Iterator[Backend]:
    """Connect to the other workers; possible once in a process, because their address serves once.

    `starting` and `splits` are passed to connect. The backend is closed only on success: after an
    error the other workers may be gone. Raises MismatchError on every worker unless all have the
    same options, packages and `facts`.
    """
    for name in options.imports:
        from largebatch.data.datasets.own import import_own

        import_own(name)
    backend = connect(options.backend, timeout=options.timeout, starting=starting, splits=splits)
    require_agreement({**facts, **options.shared, "versions": versions()}, backend, backend.device)
    if "OMP_NUM_THREADS" not in os.environ:
        threads = max(1, available_cores() // backend.local_size)
        torch.set_num_threads(threads)
    spins = torch.get_num_threads() > 1 and "OMP_WAIT_POLICY" not in os.environ
    if spins and backend.device.type == "cpu":
        _LOG.warning(_SPIN)
    torch.backends.cudnn.allow_tf32 = False  # fp32 in a recipe is fp32
    yield backend
    backend.close()


@contextmanager
def open_session(
    recipe: Recipe, options: Options, facts: Facts, *, joined: Backend | None = None
) -> Iterator[Session]:
    """Build every object of a run, on the workers that have `joined` or that join now.

    Trackers can be added later. `facts` and errors are those of join.
    """
    with _joined(recipe, options, facts, joined, starting=True) as backend:
        # Reading a folder for the first time is a part of the time limit.
        began, begun = time.time(), time.monotonic()
        plan = plan_run(recipe, workers=backend.world_size, backend=backend.name)
        model = build_model(recipe, backend.device)
        prepare_training(model, recipe, plan, backend.device)
        limit = time_limit(recipe, options, rank=backend.rank)
        alone = recipe.protocol is not None  # each worker's gradients are its own, for the servers
        handles_signals = backend.rank == 0 and LAUNCHER not in os.environ  # else the launcher does
        with (
            closing(_open_images(recipe, plan, backend, options)) as pipeline,
            stop_requests(handles_signals=handles_signals, limit=limit, begun=begun) as wants_stop,
        ):
            if backend.rank == 0:  # worker 0 sends its weights to the others
                _init_from_images(model, pipeline)
            share_weights(model, backend, facts={"plan": asdict(plan), "index": pipeline.splits})
            with closing(build_state(recipe, plan, model, backend, alone=alone)) as state:
                training = build_training(
                    recipe,
                    pipeline,
                    backend,
                    state,
                    folder=options.out,
                    alone=alone,
                    wants_stop=wants_stop,
                )
                updates = choose_updates(recipe, state, backend)
                yield build_session(recipe, training, updates, began=began)


@contextmanager
def open_measuring(
    recipe: Recipe, options: Options, facts: Facts, *, joined: Backend | None = None
) -> Iterator[Session]:
    """Build the objects that evaluate or polish a saved run, as open_session does.

    Nothing is trained: the number of workers is free, and settings of the training machine are
    ignored.
    """
    with _joined(recipe, options, facts, joined, starting=False) as backend:
        plan = measuring_plan(recipe, workers=backend.world_size)
        model = build_model(recipe, backend.device)
        with closing(_open_images(recipe, plan, backend, options)) as pipeline:
            share_weights(model, backend, facts={"plan": asdict(plan), "index": pipeline.splits})
            here = anywhere(recipe)
            with closing(build_state(here, plan, model, backend)) as state:
                updates = choose_updates(recipe, state, None)
                training = build_training(here, pipeline, backend, state, folder=options.out)
                yield build_session(recipe, training, updates)


def _joined(
    recipe: Recipe, options: Options, facts: Facts, joined: Backend | None, *, starting: bool
) -> AbstractContextManager[Backend]:
    if joined is not None:
        return nullcontext(joined)
    splits = may_split(recipe, workers=world_size())
    facts = {**facts, **recipe.model_dump(mode="json")}
    return join(options, facts, starting=starting, splits=splits)


def _open_images(recipe: Recipe, plan: Plan, backend: Backend, options: Options) -> Pipeline:
    return open_images(recipe, plan, backend, folder=options.data, dataset=options.dataset)


def _init_from_images(model: nn.Module, pipeline: Pipeline) -> None:
    """Call the model's `init_from_images`, if it has one, with batches of clean training images.

    They come in the order of the run's first epoch, which no number of workers changes.
    """
    init = getattr(model, "init_from_images", None)
    if init is None:
        return
    size = pipeline.plan.statistics_batch
    starts = range(0, pipeline.plan.train_samples, size)
    ends = (min(start + size, pipeline.plan.train_samples) for start in starts)
    parts = (pipeline.training_samples(range(*span)) for span in zip(starts, ends, strict=True))
    with closing(pipeline.clean("train", parts)) as batches:
        init(batch.images for batch in batches)


def choose_updates(recipe: Recipe, state: TrainState, backend: Backend | None) -> Updates:
    """Return the function that makes the updates of a stage: the training loop, or a protocol.

    Without a backend no updates are made, and a protocol adds only its state.
    """
    if recipe.protocol is None:
        return synchronous_updates
    updates: Updates = _plugged_in("updates", "protocol")(recipe, state, backend)
    return updates


def with_profiler(
    session: Session, options: Options, *, until: int
) -> tuple[Session, AbstractContextManager[object]]:
    """Return the session with a profiler of the updates in `options.profile`, and that profiler.

    The profiler writes PyTorch's trace, which chrome://tracing and ui.perfetto.dev show. Raises
    PlanError unless this part of the run makes these updates.
    """
    if options.profile is None:
        return session, nullcontext()
    training = session.training
    if session.updates is not synchronous_updates:
        raise PlanError("--profile follows no learners of a protocol; leave one of the two out")
    first, last = options.profile
    made, end = session.state.progress.step, min(until, training.plan.updates)
    if options.resume == "auto":  # the same command starts the run and every restart
        first = max(first, made + 1)
        if first > last:
            return session, nullcontext()
    if not made < first <= last <= end:
        raise PlanError(
            f"--profile {first}:{last}: expected a first and a last update among those that are "
            f"to be made, {made + 1} to {end}"
        )
    if training.backend.rank:
        return session, nullcontext()

    def action(number: int) -> ProfilerAction:
        number += made + 1
        if number == last:
            return ProfilerAction.RECORD_AND_SAVE
        return ProfilerAction.RECORD if first <= number < last else ProfilerAction.NONE

    def write(found: profile) -> None:
        found.export_chrome_trace(str(options.out / TRACE))
        training.step_log.resume_clock()

    profiler = profile(schedule=action, on_trace_ready=write, acc_events=True)
    return replace(session, updates=partial(synchronous_updates, after=profiler.step)), profiler


def _plugged_in(kind: str, name: str) -> Callable[..., Any]:
    """Load what a package plugs into a run under `name`: an entry point of `largebatch.KIND`."""
    found = entry_points(group=f"largebatch.{kind}", name=name)
    if not found:
        raise MissingPackageError(
            f"the entry point {name} of largebatch.{kind}",
            purpose=f"this recipe's {name}",
            install="pip install --force-reinstall --no-deps largebatch",
        )
    plugged: Callable[..., Any] = next(iter(found)).load()
    return plugged


def open_trackers(session: Session, folder: Path) -> Iterator[Tracker]:
    """Open each tracker of the recipe once."""
    recipe = session.saver.recipe
    config = {**recipe.model_dump(mode="json"), "plan": asdict(session.training.plan)}
    upload = recipe.execution.checkpoints.upload
    for name in dict.fromkeys(recipe.tracking):
        match name:
            case "wandb":
                from largebatch.tracking.wandb import Wandb

                note = partial(session.log.note, "train")
                yield Wandb(folder, config, note=note, checkpoint=upload)
            case "tensorboard":
                from largebatch.tracking.tensorboard import TensorBoard

                yield TensorBoard(folder, config)
            case "mlflow":
                from largebatch.tracking.mlflow import MLflow

                yield MLflow(folder, config, checkpoint=upload)
            case "mlperf":
                yield _plugged_in("trackers", name)(folder, recipe, began=session.began)
            case _:
                assert_never(name)


def time_limit(recipe: Recipe, options: Options, *, rank: int) -> float | None:
    """Return the seconds after which this worker requests to stop; None if it never does.

    Learners check the time after every gradient. A server without a learner checks it only when
    the learners rest, and would mistake the time between for the time that a stop needs.
    """
    section = recipe.protocol
    serves = section is not None and rank >= section.learners
    return None if serves else options.time_limit
