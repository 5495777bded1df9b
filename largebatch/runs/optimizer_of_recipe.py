"""Section of a recipe -> optimizer, of ours, of torch or of the library that has it."""

from typing import assert_never

from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim.optimizer import ParamsT

from largebatch.errors import RecipeError
from largebatch.models import param_groups
from largebatch.optim.lars import LARS
from largebatch.optim.sgd import build_sgd
from largebatch.optional import require_schedulefree, require_shampoo, require_timm
from largebatch.recipe import optimizers
from largebatch.recipe.recipe import Recipe


def build_optimizer(recipe: Recipe, model: nn.Module) -> Optimizer:
    """Build the optimizer; biases and normalisation layers are neither decayed nor adapted.

    In fp16 on an accelerator LARS and SGD skip updates there; the host waits in every update to
    know whether to make one of the others, whose libraries count updates in Python.

    Raises RecipeError where `execution.kernels` cannot update this model, MissingPackageError where
    they, or the optimizer's library, are not installed.
    """
    section, lr = recipe.optimizer, recipe.schedule.peak_lr
    groups = param_groups(model, weight_decay=section.weight_decay)
    if isinstance(section, optimizers.LARS):
        return _build_lars(section, groups, recipe)
    for group in groups:
        del group["adapt"]
    match section:
        case optimizers.SGD():
            momentum, scaled = section.momentum, recipe.precision == "fp16"
            nesterov = section.nesterov
            return build_sgd(groups, lr=lr, momentum=momentum, nesterov=nesterov, scaled=scaled)
        case optimizers.Shampoo():
            return _build_shampoo(section, groups, lr=lr)
        case optimizers.ScheduleFree():
            optimizer: Optimizer = require_schedulefree().SGDScheduleFree(
                groups,
                lr=lr,
                momentum=section.momentum,
                r=section.weight_power,
                weight_lr_power=section.weight_lr_power,
            )
            optimizer.train()  # type: ignore[attr-defined]  # schedulefree's have it
            return optimizer
        case optimizers.LAMB():
            require_timm()
            from timm.optim.lamb import Lamb

            lamb: Optimizer = Lamb(
                groups,
                lr=lr,
                betas=(section.beta1, section.beta2),
                eps=section.eps,
                bias_correction=section.bias_correction,
                max_grad_norm=section.max_grad_norm,
            )
            return lamb
        case _:
            assert_never(section)


def _build_lars(section: optimizers.LARS, groups: ParamsT, recipe: Recipe) -> Optimizer:
    try:
        return LARS(
            groups,
            lr=recipe.schedule.peak_lr,
            momentum=section.momentum,
            eta=section.eta,
            eps=section.eps,
            clip_ratio=section.clip_ratio,
            clip_gradient=section.clip_gradient,
            convention=section.convention,
            kernels=recipe.execution.kernels,
        )
    except ValueError as error:
        raise RecipeError(f"execution.kernels: {error}") from None


def _build_shampoo(section: optimizers.Shampoo, groups: ParamsT, *, lr: float) -> Optimizer:
    grafts = require_shampoo().optimizer.utils.graft.LayerWiseGrafting
    from largebatch.optim.shampoo import Shampoo

    return Shampoo(
        groups,
        lr=lr,
        betas=(section.momentum, section.beta2),
        inverse_exponent_override=section.root or 0,
        start_preconditioning_step=section.start_step,
        preconditioning_compute_steps=section.root_every,
        block_size=section.block_size,
        graft_type=grafts[section.graft.upper()],
        nesterov=section.nesterov,
        matrix_eps=section.matrix_eps,
    )


def build_momentum_sgd(recipe: Recipe, model: nn.Module, *, lr: float) -> SGD:
    """Build plain momentum SGD with the decay and the momentum of the recipe's optimizer."""
    section = recipe.optimizer
    if isinstance(section, optimizers.LAMB):
        decay, momentum = 0.0, section.beta1  # its own decay is of another scale
    else:
        decay, momentum = section.weight_decay, section.momentum
    groups = param_groups(model, weight_decay=decay)
    for group in groups:
        del group["adapt"]
    nesterov = isinstance(section, optimizers.SGD) and section.nesterov
    scaled = recipe.precision == "fp16"
    return build_sgd(groups, lr=lr, momentum=momentum, nesterov=nesterov, scaled=scaled)
