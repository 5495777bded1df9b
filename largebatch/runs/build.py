"""Recipe and machine -> every object of a run: the model, the optimizer, the reducer."""

import logging
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, assert_never

import torch
from torch import nn

from largebatch.data.datasets.own import import_own
from largebatch.data.pipeline import Pipeline, open_images
from largebatch.distributed.agreement import Facts, require_agreement, share_weights
from largebatch.distributed.backend import Backend
from largebatch.distributed.connection import connect
from largebatch.distributed.environment import LAUNCHER, available_cores, world_size
from largebatch.distributed.serial import Serial
from largebatch.errors import MissingPackageError, PlanError
from largebatch.models.batchnorm import Spans
from largebatch.models.of_recipe import build_model, prepare_training
from largebatch.recipe.arithmetic.division import may_split
from largebatch.recipe.arithmetic.plan import measuring_plan, plan_run
from largebatch.recipe.recipe import Recipe, anywhere
from largebatch.runs.interrupts import stop_requests
from largebatch.runs.options import Options
from largebatch.runs.state import build_affine, build_criterion, build_state
from largebatch.tracking.environment import versions
from largebatch.tracking.events import CHECKPOINTS, LOG, Tracker
from largebatch.tracking.log import record
from largebatch.tracking.mlflow import MLflow
from largebatch.tracking.tensorboard import TensorBoard
from largebatch.tracking.wandb import Wandb
from largebatch.training.checkpoint import Retention, Writer
from largebatch.training.state import TrainState
from largebatch.training.step_log import StepLog
from largebatch.training.trainer import Trainer, Updates
from largebatch.training.updates import synchronous_updates

_LOG = logging.getLogger(__name__)

_SPIN = (
    "PyTorch's threads spin while they wait for each other, and on a busy machine a run takes "
    "several times as long: import run from largebatch before torch, or set OMP_WAIT_POLICY=PASSIVE"
)


@contextmanager
def join(options: Options, facts: Facts, *, splits: bool = False) -> Iterator[Backend]:
    """Connect to the other workers; possible once in a process, because their address serves once.

    `splits` is passed to connect. The backend is closed only on success: after an
    error the other workers may be gone. Raises MismatchError on every worker unless all have the
    same options, packages and `facts`.
    """
    for name in options.imports:
        import_own(name)
    backend = connect(options.backend, timeout=options.timeout, starting=True, splits=splits)
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
def open_trainer(
    recipe: Recipe,
    options: Options,
    facts: Facts,
    *,
    measuring: bool = False,
    joined: Backend | None = None,
) -> Iterator[Trainer]:
    """Build every object of a run, on the workers that have `joined` or that join now.

    Trackers can be added later. If `measuring`, nothing is trained: the number of workers is free,
    and settings of the training machine are ignored. `facts` and errors are those of join.
    """
    with ExitStack() as opened:
        backend = joined or opened.enter_context(
            join(
                options,
                {**facts, **recipe.model_dump(mode="json")},
                splits=may_split(recipe, workers=world_size()),
            )
        )
        # Reading a folder for the first time is a part of the time limit.
        began, begun = time.time(), time.monotonic()
        if measuring:
            plan = measuring_plan(recipe, workers=backend.world_size)
        else:
            plan = plan_run(recipe, workers=backend.world_size, backend=backend.name)
        model = build_model(recipe, backend.device)
        if not measuring:
            prepare_training(model, recipe, plan, backend.device)
        pipeline = open_images(recipe, plan, backend, folder=options.data, dataset=options.dataset)
        if backend.rank == 0 and not measuring:  # worker 0 sends its weights to the others
            _init_from_images(model, pipeline)
        share_weights(model, backend, facts={"plan": asdict(plan), "index": pipeline.splits})
        here = anywhere(recipe) if measuring else recipe
        keeps_gradients = here.protocol is not None  # each worker its own, for the servers
        group = Serial(backend.device) if keeps_gradients else backend
        state = build_state(here, plan, model, group, keeps_gradients=keeps_gradients)
        affine = partial(build_affine, here, plan, model, group, keeps_gradients=keeps_gradients)
        updates = _choose_updates(recipe, options, state, backend, measuring=measuring)
        handles_signals = backend.rank == 0 and LAUNCHER not in os.environ  # else the launcher does
        limit = time_limit(here, options, rank=backend.rank)
        wants_stop = opened.enter_context(
            stop_requests(handles_signals=handles_signals, limit=limit, begun=begun)
        )
        trackers: list[Tracker] = []
        emit = partial(record, trackers)
        try:
            yield Trainer(
                recipe=recipe,
                plan=plan,
                backend=backend,
                pipeline=pipeline,
                criterion=build_criterion(recipe),
                spans=Spans(model, group, sync_workers=plan.sync_workers),
                state=state,
                build_affine=affine,
                trackers=trackers,
                emit=emit,
                step_log=StepLog(recipe, plan, backend, state, emit=emit, wants_stop=wants_stop),
                checkpoints=options.out / CHECKPOINTS,
                writer=Writer(options.out / CHECKPOINTS, _retention(recipe)),
                updates=updates,
                began=began,
            )
        finally:
            state.updater.reducer.close()  # that of the last stage
            pipeline.close()


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


def _choose_updates(
    recipe: Recipe, options: Options, state: TrainState, backend: Backend, *, measuring: bool
) -> Updates:
    """Return the function that makes the updates of a stage: the training loop, or a protocol."""
    if recipe.protocol is None:
        return synchronous_updates
    if options.profile is not None:
        raise PlanError("--profile follows no learners of a protocol; leave one of the two out")
    open_updates = _plugged_in("updates", "protocol")
    updates: Updates = open_updates(recipe, state, None if measuring else backend)
    return updates


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


def optional_workers(recipe: Recipe) -> Collection[int]:
    """Return the workers whose failure does not end the run."""
    return recipe.protocol.optional_learners if recipe.protocol else ()


def open_trackers(
    trainer: Trainer, folder: Path, ids: Mapping[str, str | None], *, resume: bool
) -> Iterator[Tracker]:
    """Open each tracker of the recipe once; `ids` are the run's in them before it was resumed."""
    recipe = trainer.recipe
    config = {**recipe.model_dump(mode="json"), "plan": asdict(trainer.plan)}
    upload = recipe.execution.checkpoints.upload
    for name in dict.fromkeys(recipe.tracking):
        match name:
            case "wandb":
                note, known = partial(trainer.note, "train"), ids.get(name)
                yield Wandb(folder, config, note=note, identity=known, checkpoint=upload)
            case "tensorboard":
                yield TensorBoard(folder, config)
            case "mlflow":
                known, resumed = ids.get(name), resume and (folder / LOG).exists()
                yield MLflow(folder, config, identity=known, checkpoint=upload, resumed=resumed)
            case "mlperf":
                yield _plugged_in("trackers", name)(folder, recipe, began=trainer.began)
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


def _retention(recipe: Recipe) -> Retention:
    section = recipe.execution.checkpoints
    return Retention(last=section.keep_last, every=section.keep_every)
