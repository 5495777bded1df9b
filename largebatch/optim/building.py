"""What the builder of an optimizer gets: the weights of a model, and how they are trained."""

from dataclasses import dataclass
from typing import Any

from torch import nn

from largebatch.distributed.backend import Group
from largebatch.models import param_groups
from largebatch.recipe.choices import Kernels


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """The weights that an optimizer updates."""

    model: nn.Module
    lr: float
    """Peak learning rate of the schedule, which sets the rate of every update."""

    workers: Group
    """Workers that may share the work of an update."""

    kernels: Kernels
    scaled: bool
    """True if a GradScaler scales the loss."""

    def groups(self, *, weight_decay: float) -> list[dict[str, Any]]:
        """Return two parameter groups: decayed weights; biases and normalisation layers."""
        decayed, plain = param_groups(self.model, weight_decay=weight_decay)
        for group in (decayed, plain):
            del group["adapt"]
        return [decayed, plain]

    def adapted_groups(self, *, weight_decay: float) -> list[dict[str, Any]]:
        """Return the same groups with `adapt`: False for biases and normalisation layers."""
        return param_groups(self.model, weight_decay=weight_decay)
