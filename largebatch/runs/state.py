"""Recipe, plan and model -> the state of a run, and the objects that train and evaluate it."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import assert_never

import numpy as np
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from largebatch.data.index.index import Index
from largebatch.data.pipeline import DTYPES, Pipeline
from largebatch.distributed.backend import Backend
from largebatch.distributed.reducer import Grouping, Reducer, by_bytes, cubic
from largebatch.distributed.serial import Serial
from largebatch.errors import RecipeError, nearest
from largebatch.models import affine_parameters, classifier, norm_parameters
from largebatch.models.batchnorm import Spans
from largebatch.optim.rates import own_groups, scale_rate
from largebatch.recipe.arithmetic.plan import Plan
from largebatch.recipe.choices import Precision
from largebatch.recipe.execution import Groups, GroupsByBytes
from largebatch.recipe.keys import BinaryCrossEntropy, CrossEntropy, Loss
from largebatch.recipe.model import Backbone, EarlyWeights
from largebatch.recipe.polish import Polish
from largebatch.recipe.recipe import Recipe
from largebatch.runs.optimizer_of_recipe import build_momentum_sgd, build_optimizer
from largebatch.schedules.build import build_schedule
from largebatch.schedules.functions import cosine
from largebatch.tracking.events import CHECKPOINTS, Note, StepEvent, StopCause, System
from largebatch.training.averages import EMA, SWA
from largebatch.training.checkpoint import Saver, Writer, constants_of
from largebatch.training.judging import Evaluator, Judge
from largebatch.training.losses import (
    Criterion,
    binary_cross_entropy,
    cross_entropy,
    scaled_weights,
)
from largebatch.training.replay import Replay
from largebatch.training.session import Session, Updates, synchronous_updates
from largebatch.training.state import TrainState, Updater
from largebatch.training.step_log import DivergenceCheck, Monitors, Requests, RunLog, StepLog

_SENT_AS: Mapping[Precision, torch.dtype | None] = MappingProxyType(
    {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
)


def build_state(recipe: Recipe, plan: Plan, model: nn.Module, backend: Backend) -> TrainState:
    """Build the optimizer, the schedule, the reducer, the loss scaler and the averages.

    The updater of the stage `polish.affine` is built when it begins, because that freezes weights.
    """
    # Learners of a protocol do not wait for each other, so neither the optimizer nor the reducer
    # may.
    group = _summing_group(recipe, backend)
    polish = recipe.polish or Polish.model_construct()
    lr = recipe.schedule.peak_lr
    scaled = recipe.precision == "fp16"
    optimizer = build_optimizer(recipe, model, group)
    if recipe.model.early is not None:
        _train_early(optimizer, recipe.model.early, plan, model, peak_lr=lr)
    if recipe.model.backbone is not None:
        _slow_backbone(optimizer, recipe.model.backbone, plan, model)

    def reducer(*, measure: bool) -> Reducer:
        return Reducer(
            model.named_parameters(),
            group,
            grouping=grouping_of(recipe.execution.groups),
            dtype=_SENT_AS[recipe.reduction.dtype],
            divisor=1.0,  # train() divides the loss by the global batch, so that sums are means
            exact=kept_exact(recipe.reduction.dtype, model),
            measure=measure,
        )

    def build_affine() -> Updater:
        """Build the updater of BatchNorm's scales and shifts and the classifier.

        It is momentum SGD without a trust ratio, as LARS treats most of these weights; the rate
        falls to zero, so that no single batch weighs more at the end.
        """
        assert polish.affine is not None
        trained = affine_parameters(model)
        # Before the optimizer and the reducer are built: both take the weights that are trained.
        for weight in model.parameters():
            weight.requires_grad_(weight in trained)
        affine_lr = polish.affine.lr
        fall = cosine(peak=affine_lr, steps=plan.affine_steps)
        sgd = build_momentum_sgd(recipe.optimizer, model, lr=affine_lr, scaled=scaled)
        return Updater(sgd, lambda step: fall(step - plan.steps), reducer(measure=False))

    average: EMA | SWA | None = None
    if polish.ema is not None:
        average = EMA(model, decay=polish.ema)
    elif plan.swa_after:
        average = SWA(model, after=plan.swa_after)
    rate = build_schedule(recipe.schedule, plan)
    return TrainState(
        model=model,
        updater=Updater(optimizer, rate, reducer(measure="noise_scale" in recipe.monitor)),
        scaler=_build_scaler(plan, group.device.type, enabled=scaled),
        average=average,
        build_affine=build_affine,
    )


def build_session(  # noqa: PLR0913 -- the parts of a run
    recipe: Recipe,
    pipeline: Pipeline,
    backend: Backend,
    state: TrainState,
    *,
    folder: Path,
    wants_stop: Callable[[], StopCause | None] = lambda: None,
    began: float | None = None,
    proven: str | None = None,
    remarks: Sequence[str] = (),
    ignored: Sequence[str] = (),
) -> Session:
    """Build what runs the stages; its records go into the run folder.

    `began` is the start of this worker in seconds since 1970, `proven`, `remarks` and `ignored` as
    in Session.
    """
    plan = pipeline.plan
    checkpoints = recipe.execution.checkpoints
    polish = recipe.polish or Polish.model_construct()
    log = RunLog(folder, state)
    requests = Requests(backend, wants_stop=wants_stop, save_minutes=checkpoints.every_minutes)
    group = _summing_group(recipe, backend)
    saver = Saver(
        recipe=recipe,
        state=state,
        backend=backend,
        pipeline=pipeline,
        requests=requests,
        writer=Writer(
            folder / CHECKPOINTS,
            keep_last=checkpoints.keep_last,
            constants=constants_of(state.model),  # nothing is loaded into it yet
        ),
    )
    evaluator = Evaluator(
        state=state,
        pipeline=pipeline,
        backend=backend,
        views=recipe.evaluation.views,
        graph=recipe.execution.graph is not False,
        average_samples=getattr(recipe.optimizer, "statistics_samples", None),
    )
    judge = Judge(
        evaluator=evaluator,
        saver=saver,
        log=log,
        decides=polish.keep == "better",
        measures_gap="generalization_gap" in recipe.monitor,
        weights_classes=recipe.loss.class_weights is not None,
    )
    return Session(
        state=state,
        plan=plan,
        pipeline=pipeline,
        backend=backend,
        criterion=build_criterion(
            recipe.loss, class_weights(recipe, pipeline.train_index, backend.device)
        ),
        spans=Spans(state.model, group, sync_workers=plan.sync_workers),
        log=log,
        step_log=build_step_log(recipe, plan, backend, state, requests=requests, emit=log.emit),
        requests=requests,
        seed=recipe.seed,
        # In fp16 the scaler skips updates by itself, and lowers the scale.
        skip_nonfinite=recipe.nonfinite.action == "skip" and not state.scaler.is_enabled(),
        clip_norm=recipe.optimizer.clip_norm,
        graph=recipe.execution.graph,
        replay=_build_replay(recipe, pipeline, backend, log),
        updates=build_updates(recipe, state, backend),
        judge=judge,
        polish=polish,
        began=time.time() if began is None else began,
        proven=proven,
        remarks=tuple(remarks),
        ignored=tuple(ignored),
    )


def _build_replay(
    recipe: Recipe, pipeline: Pipeline, backend: Backend, log: RunLog
) -> Replay | None:
    execution = recipe.execution
    if execution.replay_every is None:
        return None
    if backend.device.type == "cpu" and DTYPES[recipe.precision].itemsize == 2:
        # Convolutions of oneDNN in these types do not repeat, even within rounding.
        raise RecipeError(
            f"execution.replay_every: {recipe.precision} on a CPU does not repeat, and a worker "
            "without a fault would be named; set precision to fp32, or replay_every to null"
        )
    return Replay(
        every=execution.replay_every,
        action=execution.on_wrong_card,
        pipeline=pipeline,
        backend=backend,
        seed=recipe.seed,
        precision=DTYPES[recipe.precision],
        log=log,
    )


def build_updates(recipe: Recipe, state: TrainState, backend: Backend) -> Updates:
    """Return what makes the updates of a stage: the training loop, or the recipe's protocol."""
    if recipe.protocol is None:
        return synchronous_updates
    updates: Updates = recipe.protocol.build(recipe, state, backend)
    return updates


def _summing_group(recipe: Recipe, backend: Backend) -> Backend:
    """Return the workers that gradients and BatchNorm moments are summed over."""
    return backend if recipe.sums_gradients else Serial(backend.device)


def build_step_log(
    recipe: Recipe,
    plan: Plan,
    backend: Backend,
    state: TrainState,
    *,
    emit: Callable[[StepEvent | System | Note], None],
    requests: Requests | None = None,
) -> StepLog:
    """Build what emits the records of updates; without `requests` nobody has any."""
    section = recipe.nonfinite
    in_fp16 = state.scaler.is_enabled()
    most = section.most if section.action == "skip" else 0
    monitored = recipe.monitor
    if recipe.optimizer.clip_norm is not None and "gradient_norm" not in monitored:
        # It is measured anyway, and shows which updates were clipped.
        monitored = (*monitored, "gradient_norm")
    return StepLog(
        plan,
        backend,
        monitors=Monitors(monitored, plan, backend, state),
        requests=requests or Requests(backend),
        divergence=DivergenceCheck(plan, most_skipped=most, in_fp16=in_fp16, emit=emit),
        emit=emit,
        count_skipped=state.count_skipped,
    )


def class_weights(recipe: Recipe, images: Index, device: torch.device) -> Tensor | None:
    """Return the weight of each class, of mean 1 over the training images; None without weights.

    Raises RecipeError if weights are to be balanced and a class has no training image.
    """
    weights = recipe.loss.class_weights
    if weights is None:
        return None
    labels = images.labels if images.trained is None else images.labels[images.trained]
    counts = np.bincount(labels, minlength=recipe.data.classes)
    try:
        scaled = scaled_weights(None if weights == "balanced" else weights, counts)
    except ValueError as error:
        raise RecipeError(
            f"loss.class_weights: balanced: {error}; remove the class from data.classes and the "
            "folder, or give a list of weights"
        ) from None
    return torch.from_numpy(scaled).to(device)


def criterion_of_trial(recipe: Recipe, device: torch.device) -> Criterion:
    """Build the loss for random samples; weights of classes, if there are any, are 1."""
    weights = None
    if recipe.loss.class_weights is not None:
        weights = torch.ones(recipe.data.classes, dtype=torch.float64, device=device)
    return build_criterion(recipe.loss, weights)


def build_criterion(section: Loss, weights: Tensor | None = None) -> Criterion:
    """Build the loss, with the weights of the classes."""
    match section:
        case CrossEntropy():
            return cross_entropy(
                smoothing=section.label_smoothing, off_target=section.off_target, weights=weights
            )
        case BinaryCrossEntropy():
            return binary_cross_entropy(
                smoothing=section.label_smoothing,
                target_threshold=section.target_threshold,
                classes=section.classes,
                weights=weights,
            )
        case _:
            assert_never(section)


def kept_exact(dtype: Precision, model: nn.Module) -> set[nn.Parameter]:
    """Return the parameters whose gradients are sent in fp32 where the others are in `dtype`."""
    return set() if dtype == "fp32" else norm_parameters(model)


def grouping_of(section: Groups) -> Grouping:
    """Return how gradients are divided into groups."""
    return by_bytes(section.megabytes * 1e6) if isinstance(section, GroupsByBytes) else cubic


def _train_early(
    optimizer: Optimizer, section: EarlyWeights, plan: Plan, model: nn.Module, *, peak_lr: float
) -> None:
    """Stop training the early weights in time; raise RecipeError if one is unknown."""
    weights = dict(model.named_parameters())
    for name in section.names:
        if name not in weights:
            hint = nearest(name, list(weights), otherwise=f"the first is {next(iter(weights))}")
            raise RecipeError(f"model.early.names: the model has no weight {name!r}; {hint}")
        for group in own_groups(optimizer, [weights[name]]):
            group |= {"peak_lr": peak_lr, "until": plan.steps_in(section.until)}


def _slow_backbone(optimizer: Optimizer, section: Backbone, plan: Plan, model: nn.Module) -> None:
    try:
        head = set(classifier(model).parameters())
    except ValueError as error:
        raise RecipeError(f"model.backbone: {error}") from None
    # By identity and not by name: what the classifier is called differs between networks.
    backbone = [weight for weight in model.parameters() if weight not in head]
    after = 0 if section.frozen is None else plan.steps_in(section.frozen)
    for group in own_groups(optimizer, backbone):
        scale_rate(group, section.lr_factor)
        group["after"] = after


def _build_scaler(plan: Plan, device: str, *, enabled: bool) -> GradScaler:
    """Build what scales the loss in fp16.

    The loss is a mean over the global batch, so the first scale, 2^16 for 64 samples, grows with
    it; it doubles after 50 to 2,000 steps (PyTorch: 2,000), to recover in a short run too.
    """
    return GradScaler(
        device,
        enabled=enabled,
        init_scale=2.0 ** (16 + max(0, round(math.log2(plan.global_batch / 64)))),
        growth_interval=max(50, min(2000, plan.steps // 20)),
    )
