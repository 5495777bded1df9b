"""Recipe, plan and model -> the state that training changes: optimizer, schedule, averages."""

import math

from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from largebatch.distributed.backend import Backend
from largebatch.errors import RecipeError, nearest
from largebatch.models import affine_parameters
from largebatch.optim.rates import train_early
from largebatch.recipe.arithmetic.plan import Plan
from largebatch.recipe.recipe import Recipe
from largebatch.runs.optimizer_of_recipe import build_momentum_sgd, build_optimizer
from largebatch.runs.reduction import build_reducer
from largebatch.schedules.build import build_schedule
from largebatch.schedules.functions import cosine
from largebatch.training.averages import EMA, SWA
from largebatch.training.loss import Criterion, cross_entropy
from largebatch.training.state import TrainState, Updater


def build_state(
    recipe: Recipe,
    plan: Plan,
    model: nn.Module,
    backend: Backend,
    *,
    keeps_gradients: bool = False,
) -> TrainState:
    """Build the optimizer, the schedule, the reducer, the loss scaler and the averages.

    `keeps_gradients` is passed to build_reducer.
    """
    schedule = build_schedule(recipe.schedule, plan)
    reducer = build_reducer(recipe, plan, model, backend, keeps_gradients=keeps_gradients)
    optimizer = build_optimizer(recipe, model, backend)
    _train_early(optimizer, recipe, plan, model)
    return TrainState(
        model=model,
        updater=Updater(optimizer, schedule, reducer),
        scaler=build_scaler(recipe, plan, backend),
        average=_build_average(recipe, plan, model),
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
