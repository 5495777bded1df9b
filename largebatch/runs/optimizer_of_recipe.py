"""Section of a recipe -> optimizer, of ours, of torch or of the library that has it."""

from typing import Any, assert_never

from torch import nn
from torch.optim import SGD, Optimizer

from largebatch import proof
from largebatch.distributed.backend import Group
from largebatch.errors import RecipeError
from largebatch.models import classifier_weights, hidden_matrices, param_groups
from largebatch.optim import kernels as optimizer_kernels
from largebatch.optim.adamw import build_adamw
from largebatch.optim.lars import LARS
from largebatch.optim.sgd import build_sgd
from largebatch.optional import require_apex, require_schedulefree, require_shampoo
from largebatch.recipe import optimizers
from largebatch.recipe.recipe import Recipe


def build_optimizer(recipe: Recipe, model: nn.Module, workers: Group) -> Optimizer:
    """Build the optimizer; biases and normalisation layers are neither decayed nor adapted.

    `workers` share the work of an update, where the optimizer can divide it. Raises RecipeError
    where `execution.kernels` or Muon cannot update this model, MissingPackageError for a missing
    library.
    """
    section, lr, kernels = recipe.optimizer, recipe.schedule.peak_lr, recipe.execution.kernels
    device = next(model.parameters()).device
    if kernels == "apex" and proof.has_kernels(proof.OPTIMIZER, device):
        require_apex()
        # They are tried like ours, and the environment variable switches them off too.
        kernels = "apex" if optimizer_kernels.works(device) else "torch"
    if isinstance(section, optimizers.Muon):
        return _build_muon(section, model, workers, lr=lr)
    groups = param_groups(model, weight_decay=section.weight_decay)
    if isinstance(section, optimizers.LARS):
        settings = section.model_dump(exclude={"kind", "weight_decay"})
        try:
            return LARS(groups, lr=lr, kernels=kernels, **settings)
        except ValueError as error:
            raise RecipeError(f"execution.kernels: {error}") from None
    for group in groups:
        del group["adapt"]
    match section:
        case optimizers.SGD():
            groups[1] |= {
                "weight_decay": section.bias_weight_decay,
                "lr_factor": (section.bias_lr or lr) / lr,
            }
            return build_sgd(
                groups,
                lr=lr,
                momentum=section.momentum,
                nesterov=section.nesterov,
                scaled=recipe.precision == "fp16",
            )
        case optimizers.Shampoo():
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
        case optimizers.AdamW():
            betas = section.beta1, section.beta2
            return build_adamw(groups, lr=lr, betas=betas, eps=section.eps)
        case optimizers.LAMB():
            from largebatch.optim.lamb import LAMB  # needs timm

            betas = section.beta1, section.beta2
            settings = section.model_dump(include={"eps", "bias_correction", "max_grad_norm"})
            lamb: Optimizer = LAMB(groups, lr=lr, betas=betas, **settings)
            return lamb
        case _:
            assert_never(section)


def _build_muon(
    section: optimizers.Muon, model: nn.Module, workers: Group, *, lr: float
) -> Optimizer:
    from largebatch.optim.muon import Muon  # needs timm

    matrices = hidden_matrices(model)
    if not matrices:
        raise RecipeError(
            f"optimizer.kind: muon: {type(model).__name__} has no hidden matrices; take another"
        )
    others = _build_others(section.others, model, matrices, muon_lr=lr)
    settings = section.model_dump(exclude={"kind", "others"})
    return Muon(matrices, others, workers, lr=lr, **settings)


def _build_others(
    section: optimizers.MuonSGD | optimizers.MuonAdamW,
    model: nn.Module,
    matrices: list[nn.Parameter],
    *,
    muon_lr: float,
) -> Optimizer:
    taken, classifiers = set(matrices), classifier_weights(model)
    decayed, plain = (group["params"] for group in param_groups(model, weight_decay=0.0))
    head = [weight for weight in decayed if weight in classifiers]
    rest = [weight for weight in decayed if weight not in taken | classifiers]
    lr, decay = section.lr or muon_lr, section.weight_decay
    head_lr, bias_decay = section.head_lr or lr, section.bias_weight_decay
    groups: list[dict[str, Any]] = [
        {"params": rest, "lr_ratio": lr / muon_lr, "weight_decay": decay},
        {"params": head, "lr_ratio": head_lr / muon_lr, "weight_decay": decay},
        {"params": plain, "lr_ratio": lr / muon_lr, "weight_decay": bias_decay},
    ]
    match section:
        case optimizers.MuonSGD():
            momentum, nesterov = section.momentum, section.nesterov
            return build_sgd(groups, lr=lr, momentum=momentum, nesterov=nesterov, scaled=False)
        case optimizers.MuonAdamW():
            betas = section.beta1, section.beta2
            return build_adamw(groups, lr=lr, betas=betas, eps=section.eps)
        case _:
            assert_never(section)


def build_momentum_sgd(
    own: optimizers.Optimizer, model: nn.Module, *, lr: float, scaled: bool
) -> SGD:
    """Build plain momentum SGD with the decay and the momentum of the recipe's optimizer."""
    section = own.others if isinstance(own, optimizers.Muon) else own
    if isinstance(section, optimizers.LAMB | optimizers.AdamW | optimizers.MuonAdamW):
        decay, momentum = 0.0, section.beta1  # its own decay is of another scale
    else:
        decay, momentum = section.weight_decay, section.momentum
    groups = param_groups(model, weight_decay=decay)
    for group in groups:
        del group["adapt"]
    nesterov = isinstance(section, optimizers.SGD | optimizers.MuonSGD) and section.nesterov
    return build_sgd(groups, lr=lr, momentum=momentum, nesterov=nesterov, scaled=scaled)
