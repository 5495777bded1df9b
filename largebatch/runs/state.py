"""Recipe, plan and model -> the state of a run, and the objects that train and evaluate it."""

import math
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from largebatch.data.pipeline import Pipeline
from largebatch.distributed.backend import Backend
from largebatch.distributed.serial import Serial
from largebatch.errors import RecipeError, nearest
from largebatch.models import affine_parameters
from largebatch.models.batchnorm import Spans
from largebatch.optim.rates import train_early
from largebatch.recipe.arithmetic.plan import Plan
from largebatch.recipe.optimizers import ScheduleFree
from largebatch.recipe.polish import Polish
from largebatch.recipe.recipe import Recipe
from largebatch.runs.optimizer_of_recipe import build_momentum_sgd, build_optimizer
from largebatch.runs.reduction import build_reducer
from largebatch.schedules.build import build_schedule
from largebatch.schedules.functions import cosine
from largebatch.tracking.events import CHECKPOINTS, Note, Step, System
from largebatch.training.averages import EMA, SWA
from largebatch.training.checkpoint import Retention, Writer
from largebatch.training.judging import Evaluator, Judge
from largebatch.training.loop import Criterion, cross_entropy
from largebatch.training.monitors import Monitors
from largebatch.training.saving import Saver
from largebatch.training.session import Session
from largebatch.training.state import TrainState, Updater
from largebatch.training.step_log import DivergenceCheck, Requests, RunLog, StepLog
from largebatch.training.updates import Training, Updates


def build_state(
    recipe: Recipe, plan: Plan, model: nn.Module, backend: Backend, *, alone: bool = False
) -> TrainState:
    """Build the optimizer, the schedule, the reducer, the loss scaler and the averages.

    Every worker keeps its own gradients if it is `alone`: something else sums them.
    """
    group = Serial(backend.device) if alone else backend
    optimizer = build_optimizer(recipe, model, group)
    _train_early(optimizer, recipe, plan, model)
    return TrainState(
        model=model,
        updater=Updater(
            optimizer,
            build_schedule(recipe.schedule, plan),
            build_reducer(recipe, plan, model, group, keeps_gradients=alone),
        ),
        scaler=build_scaler(recipe, plan, group),
        average=_build_average(recipe, plan, model),
        build_affine=partial(build_affine, recipe, plan, model, group, keeps_gradients=alone),
    )


def build_training(  # noqa: PLR0913 -- the parts of a run
    recipe: Recipe,
    pipeline: Pipeline,
    backend: Backend,
    state: TrainState,
    *,
    folder: Path,
    alone: bool = False,
    wants_stop: Callable[[], bool] = lambda: False,
) -> Training:
    """Build what makes updates; their records go into the run folder. `alone` as in build_state."""
    plan, section, log = pipeline.plan, recipe.nonfinite, RunLog(folder, state)
    minutes = recipe.execution.checkpoints.every_minutes
    requests = Requests(backend, wants_stop=wants_stop, save_minutes=minutes)
    return Training(
        state=state,
        plan=plan,
        pipeline=pipeline,
        backend=backend,
        criterion=build_criterion(recipe),
        spans=Spans(
            state.model,
            Serial(backend.device) if alone else backend,
            sync_workers=plan.sync_workers,
        ),
        log=log,
        step_log=build_step_log(recipe, plan, backend, state, requests=requests, emit=log.emit),
        requests=requests,
        seed=recipe.seed,
        skip_nonfinite=section.action == "skip" and not state.scaler.is_enabled(),
    )


def build_step_log(
    recipe: Recipe,
    plan: Plan,
    backend: Backend,
    state: TrainState,
    *,
    emit: Callable[[Step | System | Note], None],
    requests: Requests | None = None,
) -> StepLog:
    """Build what emits the records of updates; without `requests` nobody has any."""
    section, in_fp16 = recipe.nonfinite, state.scaler.is_enabled()
    most = section.most if section.action == "skip" else 0
    return StepLog(
        plan,
        backend,
        monitors=Monitors(recipe.monitor, plan, backend, state),
        requests=requests or Requests(backend),
        divergence=DivergenceCheck(plan, most_skipped=most, in_fp16=in_fp16, emit=emit),
        emit=emit,
        count_skipped=state.count_skipped,
    )


def build_session(
    recipe: Recipe, training: Training, updates: Updates, *, began: float | None = None
) -> Session:
    """Build what runs the stages; `began` is the start of this worker in seconds since 1970."""
    state, pipeline, backend = training.state, training.pipeline, training.backend
    checkpoints, optimizer = recipe.execution.checkpoints, recipe.optimizer
    polish = recipe.polish or Polish.model_construct()
    saver = Saver(
        recipe=recipe,
        state=state,
        backend=backend,
        pipeline=pipeline,
        requests=training.requests,
        log=training.log,
        writer=Writer(
            training.log.folder / CHECKPOINTS,
            Retention(last=checkpoints.keep_last, every=checkpoints.keep_every),
        ),
    )
    evaluator = Evaluator(
        state=state,
        pipeline=pipeline,
        backend=backend,
        views=recipe.evaluation.views,
        average_samples=optimizer.statistics_samples
        if isinstance(optimizer, ScheduleFree)
        else None,
    )
    return Session(
        training=training,
        updates=updates,
        judge=Judge(
            evaluator=evaluator,
            saver=saver,
            log=training.log,
            decides=polish.keep == "better",
            measures_gap="generalization_gap" in recipe.monitor,
        ),
        polish=polish,
        began=time.time() if began is None else began,
    )


def _train_early(optimizer: Optimizer, recipe: Recipe, plan: Plan, model: nn.Module) -> None:
    """Stop training the weights of `model.early` in time; raise RecipeError if one is unknown."""
    section, weights = recipe.model.early, dict(model.named_parameters())
    for name in section.names if section else ():
        if name not in weights:
            hint = nearest(name, list(weights), otherwise=f"the first is {next(iter(weights))}")
            raise RecipeError(f"model.early.names: the model has no weight {name!r}; {hint}")
        assert section is not None
        until, peak_lr = plan.steps_in(section.until), recipe.schedule.peak_lr
        train_early(optimizer, weights[name], peak_lr=peak_lr, until=until)


def build_criterion(recipe: Recipe) -> Criterion:
    """Build the loss."""
    return cross_entropy(smoothing=recipe.loss.label_smoothing, off_target=recipe.loss.off_target)


def build_scaler(recipe: Recipe, plan: Plan, backend: Backend) -> GradScaler:
    """Build what scales the loss in fp16; disabled in fp32 and bf16.

    The loss is a mean over the global batch, so the first scale is 2^16 for 64 samples, as usual,
    and grows with the batch, so that a sample's gradients keep their distance from underflow. The
    scale doubles after 50 to 2,000 steps (PyTorch: 2,000), so that it recovers in a short run too;
    sooner it would overflow again and again.
    """
    return GradScaler(
        backend.device.type,
        enabled=recipe.precision == "fp16",
        init_scale=2.0 ** (16 + max(0, round(math.log2(plan.global_batch / 64)))),
        growth_interval=max(50, min(2000, plan.steps // 20)),
    )


def _build_average(recipe: Recipe, plan: Plan, model: nn.Module) -> EMA | SWA | None:
    if recipe.polish is not None and recipe.polish.ema is not None:
        return EMA(model, decay=recipe.polish.ema)
    return SWA(model, after=plan.swa_after) if plan.swa_after else None


def build_affine(
    recipe: Recipe,
    plan: Plan,
    model: nn.Module,
    backend: Backend,
    *,
    all_weights: bool = False,
    keeps_gradients: bool = False,
) -> Updater:
    """Build the updater of the stage `polish.affine`, and freeze the weights it does not change.

    It trains BatchNorm's scales and shifts and the classifier, or `all_weights`. The optimizer is
    momentum SGD without a trust ratio, as LARS treats most of these weights. The rate falls to
    zero, so that no single batch weighs more at the end. The noise scale is not measured, because
    few weights have gradients.
    """
    assert recipe.polish is not None
    assert recipe.polish.affine is not None
    lr = recipe.polish.affine.lr
    trained = set(model.parameters()) if all_weights else affine_parameters(model)
    for weight in model.parameters():
        weight.requires_grad_(weight in trained)
    fall = cosine(peak=lr, steps=plan.affine_steps)
    unmonitored = recipe.model_copy(update={"monitor": ()})
    reducer = build_reducer(unmonitored, plan, model, backend, keeps_gradients=keeps_gradients)
    optimizer = build_momentum_sgd(recipe, model, lr=lr)
    return Updater(optimizer, lambda step: fall(step - plan.steps), reducer)
