"""Recipe and machine -> every object of a run: the model, the optimizer, what sums gradients."""

import logging
import math
import os
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import assert_never

import torch
from torch import nn
from torch.amp import GradScaler

from largebatch.data.batches import Pipeline
from largebatch.data.datasets.own import import_own
from largebatch.data.pipeline import open_images
from largebatch.data.text.pipeline import open_text
from largebatch.distributed.agreement import Facts, require_agreement, shape
from largebatch.distributed.backend import Backend
from largebatch.distributed.connection import connect
from largebatch.distributed.environment import LAUNCHER, available_cores, world_size
from largebatch.distributed.reducer import Reducer
from largebatch.distributed.serial import Serial
from largebatch.errors import PlanError, RecipeError
from largebatch.mlperf.logger import MLPerf
from largebatch.models import affine_parameters, build
from largebatch.models.accepted import require_accepted
from largebatch.models.batchnorm import SpanBatchNorm, Spans, with_span
from largebatch.models.compiled import compile_model
from largebatch.recipe.arithmetic.plan import Plan, make_plan, may_share_spans, measuring_plan
from largebatch.recipe.data import Data
from largebatch.recipe.recipe import Recipe, anywhere, require_backend
from largebatch.recipe.text import Text
from largebatch.runs.interrupts import stop_requests
from largebatch.runs.optimizer import build_momentum_sgd, build_optimizer
from largebatch.runs.options import Options
from largebatch.runs.reduction import build_reducer, copies_gradients
from largebatch.schedules.build import build_schedule
from largebatch.schedules.functions import cosine
from largebatch.schedules.plateau import with_plateau
from largebatch.tracking.environment import versions
from largebatch.tracking.events import CHECKPOINTS, LOG, Tracker
from largebatch.tracking.log import record
from largebatch.tracking.mlflow import MLflow
from largebatch.tracking.tensorboard import TensorBoard
from largebatch.tracking.wandb import Wandb
from largebatch.training.averages import EMA, SWA
from largebatch.training.checkpoint import Retention, Writer
from largebatch.training.loss import cross_entropy
from largebatch.training.protocols.exchange import Exchange
from largebatch.training.protocols.stage import ProtocolUpdates, require_tensors
from largebatch.training.protocols.state import NAME, ProtocolState
from largebatch.training.state import TrainState, Updater
from largebatch.training.step_log import StepLog
from largebatch.training.trainer import Trainer, Updates
from largebatch.training.updates import synchronous_updates

_LOG = logging.getLogger(__name__)

_SPIN = (
    "PyTorch's threads spin while they wait for each other, and on a busy machine a run takes "
    "several times as long: import run from largebatch before torch, or set OMP_WAIT_POLICY=PASSIVE"
)


def open_pipeline(
    recipe: Recipe,
    plan: Plan,
    backend: Backend,
    *,
    folder: Path | None,
    dataset: str | None = None,
) -> Pipeline:
    """Open the samples that a recipe names; raises as open_images and open_text."""
    match recipe.data:
        case Data():
            return open_images(recipe, plan, backend, folder=folder, dataset=dataset)
        case Text():
            return open_text(recipe, plan, backend, folder=folder, dataset=dataset)
        case _:
            assert_never(recipe.data)


def build_model(recipe: Recipe, backend: Backend) -> nn.Module:
    """Build the model on the worker's device; raises as `new_model`."""
    model = new_model(recipe).to(backend.device)
    if recipe.execution.channels_last(backend.device.type):
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's stubs
    return in_precision(model, recipe, backend.device)


def new_model(recipe: Recipe) -> nn.Module:
    """Build the model on PyTorch's default device; its weights come from the recipe's seed.

    Raises RecipeError where the model's BatchNorm and `batch.bn_span` do not fit each other, and
    where `polish.affine` finds no classifier.
    """
    section = recipe.model
    torch.manual_seed(recipe.seed)
    model = build(
        section.name,
        num_classes=recipe.data.classes,
        arguments=section.arguments,
        head_std=section.head_std,
    )
    _set_span(model, recipe)
    if recipe.polish is not None and recipe.polish.affine is not None:
        try:
            affine_parameters(model)
        except ValueError as error:  # better now than after the whole schedule
            raise RecipeError(f"polish.affine: {error}") from None
    return model


def in_precision(model: nn.Module, recipe: Recipe, device: torch.device) -> nn.Module:
    """Make the model compute in the recipe's precision on this type of device; return it."""
    if recipe.precision != "fp32":
        dtype = torch.bfloat16 if recipe.precision == "bf16" else torch.float16
        model.forward = torch.autocast(device.type, dtype)(model.forward)
    return model


def share_weights(model: nn.Module, backend: Backend, *, facts: Facts) -> None:
    """Give worker 0's weights and buffers to every worker.

    Raises MismatchError on every worker if their models or the other `facts` differ: tensors of
    different shapes would be waited for without end.
    """
    tensors = model.state_dict()
    shapes = {name: shape(tensor) for name, tensor in tensors.items()}
    require_agreement({**facts, "state_dict": shapes}, backend, backend.device)
    for tensor in tensors.values():
        backend.broadcast(tensor)


def require_trainable(model: nn.Module, recipe: Recipe) -> None:
    """Raise RecipeError for a model that gives more than logits while it trains.

    GoogLeNet and Inception have auxiliary classifiers (arXiv:1409.4842, section 5), whose losses
    are not part of a recipe.
    """
    if getattr(model, "aux_logits", False):
        raise RecipeError(
            f"model.name: {recipe.model.name} has auxiliary classifiers, which are not trained "
            "here; build it without them by model.arguments.aux_logits: false. Of weights that "
            "have them, `largebatch polish` without --compare measures the statistics"
        )


def build_extra(
    recipe: Recipe, plan: Plan, model: nn.Module, backend: Backend, *, affine_only: bool, lr: float
) -> Updater:
    """Build what makes the updates after the schedule, and freeze the weights they leave alone.

    Momentum SGD without a trust ratio, as LARS does for most of these weights: `affine_only` are
    BatchNorm's scales and shifts and the classifier. The rate falls from `lr` to zero, so that the
    last batches leave no mark of their own. The noise scale is not measured: few weights have
    gradients.
    """
    trained = affine_parameters(model) if affine_only else set(model.parameters())
    for weight in model.parameters():
        weight.requires_grad_(weight in trained)
    fall = cosine(peak=lr, steps=plan.affine_steps)
    unmonitored = recipe.model_copy(update={"monitor": ()})
    reducer = _build_reducer(unmonitored, plan, model, backend)
    optimizer = build_momentum_sgd(recipe, model, lr=lr)
    return Updater(optimizer, lambda step: fall(step - plan.steps), reducer)


def build_scaler(recipe: Recipe, plan: Plan, backend: Backend) -> GradScaler:
    """Build what scales the loss in fp16; disabled in fp32 and bf16.

    The loss is a mean over the global batch, so the first scale is 2^16 for 64 samples, as usual,
    and grows with the batch: each sample's gradients then are as far from vanishing. A scale that
    was halved must be able to come back in 1,000 steps, where PyTorch waits for 2,000; in a short
    run each doubling would soon overflow.
    """
    return GradScaler(
        backend.device.type,
        enabled=recipe.precision == "fp16",
        init_scale=2.0 ** (16 + max(0, round(math.log2(plan.global_batch / 64)))),
        growth_interval=max(50, min(2000, plan.steps // 20)),
    )


def _set_span(model: nn.Module, recipe: Recipe) -> None:
    span = recipe.batch.bn_span
    try:
        with_span(model, span or 1)
    except ValueError as error:
        raise RecipeError(f"model.name: {recipe.model.name}: {error}") from None
    has_norm = any(isinstance(module, SpanBatchNorm) for module in model.modules())
    if has_norm and span is None:
        raise RecipeError(
            f"batch.bn_span: {recipe.model.name} has BatchNorm; state how many samples share "
            "statistics"
        )
    if not has_norm and span is not None:
        raise RecipeError(f"batch.bn_span: {recipe.model.name} has no BatchNorm; make it null")


@contextmanager
def join(
    options: Options, facts: Facts, *, starting: bool = False, splits: bool = False
) -> Iterator[Backend]:
    """Join the other workers, once in a process: the address where they meet serves one meeting.

    `starting` and `splits` are as in connect. They are left when all went well, for else they may
    be gone. Raises MismatchError on every
    worker unless they have the same options and packages and state the same `facts`.
    """
    for name in options.imports:
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
def open_trainer(
    recipe: Recipe, options: Options, facts: Facts, *, measuring: bool = False
) -> Iterator[Trainer]:
    """Join the other workers and build every object of a run; see join and build_trainer."""
    facts = {**facts, **recipe.model_dump(mode="json")}
    splits = recipe.reduction.parts is not None or may_share_spans(recipe, workers=world_size())
    with (
        join(options, facts, starting=not measuring, splits=splits) as backend,
        build_trainer(recipe, options, backend, measuring=measuring) as trainer,
    ):
        yield trainer


@contextmanager
def build_trainer(
    recipe: Recipe, options: Options, backend: Backend, *, measuring: bool
) -> Iterator[Trainer]:
    """Build every object of a run; trackers can join later.

    `measuring` promises that nothing will be trained: any number of workers then fits, and what the
    training machine had to have is not needed.
    """
    began = time.time()
    begun = time.monotonic()  # reading a folder for the first time is a part of the time limit
    divide = measuring_plan if measuring else make_plan
    plan = divide(recipe, workers=backend.world_size)
    if not measuring:
        require_backend(recipe, backend.name)
    with backend.busy():  # the first worker that reads a folder may take long for all of them
        pipeline = open_pipeline(
            recipe, plan, backend, folder=options.data, dataset=options.dataset
        )
    model = build_model(recipe, backend)
    share_weights(model, backend, facts={"plan": asdict(plan), "index": pipeline.splits})
    here = recipe
    if measuring:
        here = anywhere(recipe)
    else:
        require_trainable(model, recipe)
        require_tensors(model, recipe)
        if options.profile is not None and recipe.protocol is not None:
            raise PlanError("--profile follows no learners of a protocol; leave one of the two out")
        require_accepted(recipe, {piece.image_size for piece in plan.sizes})
        shares = plan.sync_workers > 1
        compile_model(model, recipe.execution.compile, backend.device, shares_spans=shares)
    state = build_state(here, plan, model, backend)
    if recipe.protocol is not None:
        state.extra[NAME] = ProtocolState()
    group = backend if here.protocol is None else Serial(backend.device)
    trackers: list[Tracker] = []
    emit = partial(record, trackers)
    smoothing, off_target = recipe.loss.label_smoothing, recipe.loss.off_target
    heard = backend.rank == 0 and LAUNCHER not in os.environ  # else the launcher answers
    limit = time_limit(here, options, rank=backend.rank)
    with stop_requests(heard=heard, limit=limit, begun=begun) as wants_stop:
        try:
            yield Trainer(
                recipe=recipe,
                plan=plan,
                backend=backend,
                pipeline=pipeline,
                criterion=cross_entropy(smoothing=smoothing, off_target=off_target),
                spans=Spans(model, group, sync_workers=plan.sync_workers),
                state=state,
                build_affine=partial(_build_affine, here, plan, model, backend),
                build_replica=partial(_build_replica, here, plan, model),
                trackers=trackers,
                emit=emit,
                step_log=StepLog(recipe, plan, backend, state, emit=emit, wants_stop=wants_stop),
                checkpoints=options.out / CHECKPOINTS,
                writer=Writer(options.out / CHECKPOINTS, _retention(recipe)),
                updates=_choose_updates(here, state, backend),
                began=began,
            )
        finally:
            state.updater.reducer.close()
            pipeline.close()


def _choose_updates(recipe: Recipe, state: TrainState, backend: Backend) -> Updates:
    """Return what makes the updates of a stage: the training loop, or a protocol."""
    if recipe.protocol is None:
        return synchronous_updates
    protocol = state.extra[NAME]
    assert isinstance(protocol, ProtocolState)
    return ProtocolUpdates(Exchange.open(backend, recipe.protocol), protocol)


def optional_workers(recipe: Recipe) -> Collection[int]:
    """Return the workers that the run goes on without when they fail."""
    return recipe.protocol.optional_learners if recipe.protocol else ()


def open_trackers(
    trainer: Trainer, folder: Path, ids: Mapping[str, str | None], *, resume: bool
) -> Iterator[Tracker]:
    """Open the trackers that the recipe names, each once.

    `ids` are those of this run in the trackers before it was resumed.
    """
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
                yield MLPerf(folder, recipe, began=trainer.began)
            case _:
                assert_never(name)


def time_limit(recipe: Recipe, options: Options, *, rank: int) -> float | None:
    """Return the seconds after which this worker asks to stop; None if it never does.

    A server without a learner checks the time only when the learners come to rest, and would take
    the time between for what a stop needs. The learners check it after every gradient.
    """
    section = recipe.protocol
    serves = section is not None and rank >= section.learners
    return None if serves else options.time_limit


def _retention(recipe: Recipe) -> Retention:
    section = recipe.execution.checkpoints
    return Retention(last=section.keep_last, every=section.keep_every)


def build_state(recipe: Recipe, plan: Plan, model: nn.Module, backend: Backend) -> TrainState:
    """Build what training changes: the optimizer, the schedule, what sums gradients, averages."""
    section = recipe.schedule
    schedule, plateau = build_schedule(section, plan), section.plateau
    if plateau is not None:
        schedule = with_plateau(schedule, plateau, lambda: state.progress.readings, plan.steps)
    reducer = _build_reducer(recipe, plan, model, backend)
    state = TrainState(
        model=model,
        updater=Updater(build_optimizer(recipe, model), schedule, reducer),
        scaler=build_scaler(recipe, plan, backend),
        average=_build_average(recipe, plan, model),
    )
    return state


def _build_reducer(recipe: Recipe, plan: Plan, model: nn.Module, backend: Backend) -> Reducer:
    """Build what sums the gradients; with a protocol each worker keeps its own for the servers."""
    if recipe.protocol is None:
        return build_reducer(recipe, plan, model, backend)
    return build_reducer(recipe, plan, model, Serial(backend.device), keeps_gradients=True)


def _build_average(recipe: Recipe, plan: Plan, model: nn.Module) -> EMA | SWA | None:
    if recipe.polish is not None and recipe.polish.ema is not None:
        return EMA(model, decay=recipe.polish.ema)
    return SWA(model, after=plan.swa_after) if plan.swa_after else None


def _build_affine(recipe: Recipe, plan: Plan, model: nn.Module, backend: Backend) -> Updater:
    assert recipe.polish is not None
    assert recipe.polish.affine is not None
    lr = recipe.polish.affine.lr
    return build_extra(recipe, plan, model, backend, affine_only=True, lr=lr)


def _build_replica(recipe: Recipe, plan: Plan, model: nn.Module) -> Updater:
    assert recipe.polish is not None
    assert recipe.polish.swap is not None
    lr, own = recipe.polish.swap.lr, plan.replica
    assert own is not None
    fall = cosine(peak=lr, steps=own.steps)
    alone = Serial(next(model.parameters()).device)
    copies = copies_gradients(recipe, own, alone.device)
    reducer = Reducer(model.named_parameters(), alone, divisor=1.0, copies=copies)
    return Updater(build_momentum_sgd(recipe, model, lr=lr), fall, reducer)
