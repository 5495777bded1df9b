"""LAMB (You et al. 2020, arXiv:1904.00962): the optimizer of timm."""

from torch.optim import Optimizer

from largebatch.optim.building import Weights
from largebatch.optional import require_timm
from largebatch.recipe import optimizers as sections

require_timm()

from timm.optim.lamb import Lamb as LAMB  # noqa: E402, N814

__all__ = ["LAMB"]


def build_lamb(section: sections.LAMB, weights: Weights) -> Optimizer:
    """Build LAMB."""
    groups = weights.groups(weight_decay=section.weight_decay)
    betas = section.beta1, section.beta2
    settings = section.model_dump(include={"eps", "bias_correction", "max_grad_norm"})
    optimizer: Optimizer = LAMB(groups, lr=weights.lr, betas=betas, **settings)
    return optimizer
