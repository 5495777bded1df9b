"""Section of a recipe -> optimizer, by the builder that the section names."""

from torch import nn
from torch.optim import SGD, Optimizer

from largebatch import proof
from largebatch.distributed.backend import Group
from largebatch.errors import RecipeError
from largebatch.models import layer_depths, param_groups
from largebatch.optim import kernels as optimizer_kernels
from largebatch.optim.building import Weights
from largebatch.optim.rates import decay_rates
from largebatch.optim.sgd import build_sgd
from largebatch.optional import require_apex
from largebatch.recipe import optimizers
from largebatch.recipe.recipe import Recipe


def build_optimizer(recipe: Recipe, model: nn.Module, workers: Group) -> Optimizer:
    """Build the optimizer; biases and normalisation layers are neither decayed nor adapted.

    `workers` share the work of an update, where the optimizer can divide it. Raises RecipeError
    where `execution.kernels` or the optimizer cannot update this model, MissingPackageError for a
    missing library.
    """
    kernels = recipe.execution.kernels
    device = next(model.parameters()).device
    if kernels == "apex" and proof.has_kernels(proof.OPTIMIZER, device):
        require_apex()
        # They are tried like ours, and the environment variable switches them off too.
        kernels = "apex" if optimizer_kernels.works(device) else "torch"
    weights = Weights(
        model=model,
        lr=recipe.schedule.peak_lr,
        workers=workers,
        kernels=kernels,
        scaled=recipe.precision == "fp16",
    )
    optimizer: Optimizer = recipe.optimizer.build(weights)
    if recipe.optimizer.layer_decay is not None:
        depths = depths_of_recipe(recipe, model)
        decay_rates(optimizer, depths, recipe.optimizer.layer_decay)
    return optimizer


def depths_of_recipe(recipe: Recipe, model: nn.Module) -> dict[nn.Parameter, int]:
    """Return the depths of the layers for optimizer.layer_decay; raise RecipeError without any."""
    try:
        return layer_depths(model)
    except ValueError as error:
        raise RecipeError(
            f"optimizer.layer_decay: model.name: {recipe.model.name}: {error}; take a model of "
            "timm, give your own one group_matcher(), or leave layer_decay out"
        ) from None


def build_momentum_sgd(
    section: optimizers.Optimizer, model: nn.Module, *, lr: float, scaled: bool
) -> SGD:
    """Build the momentum SGD of the affine stage, with settings of the recipe's optimizer."""
    settings = section.in_affine_stage()
    groups = param_groups(model, weight_decay=settings.weight_decay)
    for group in groups:
        del group["adapt"]  # momentum SGD has no trust ratio
    return build_sgd(
        groups, lr=lr, momentum=settings.momentum, nesterov=settings.nesterov, scaled=scaled
    )
