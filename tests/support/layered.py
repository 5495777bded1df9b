"""A small network with layers as timm's models have them, its mixed samples, and recipes for it."""

from typing import Any

import crown
import torch
from torch import Tensor, nn

from largebatch import load_recipe
from largebatch.optional import require_timm
from largebatch.recipe.recipe import Recipe

require_timm()
from timm.layers import DropPath  # noqa: E402 -- timm needs torchvision's operators

STEPS, BATCH, CLASSES = 4, 16, 5
PEAK = 0.05
LOSS = "loss={kind: bce, target_threshold: 0.2, label_smoothing: 0.1}"
SCHEDULE = f"schedule={{peak_lr: {PEAK}, warmup: null, decay: {{kind: constant}}}}"


class Layers(nn.Module):
    """A stem, two blocks with drop path, and a head, named as timm's models name theirs."""

    def __init__(self, *, drop_path: float) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.drop = DropPath(drop_path)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images).relu()
        for block in self.blocks:
            x = x + self.drop(block(x).relu())
        logits: Tensor = self.head(x)
        return logits

    def group_matcher(self, *, coarse: bool = False) -> dict[str, Any]:
        """As of timm's models."""
        return {"stem": "^stem", "blocks": [(r"^blocks\.(\d+)", None)]}


def net(drop_path: float = 0.0) -> Layers:
    torch.manual_seed(1)
    return Layers(drop_path=drop_path).double()


def data() -> tuple[Tensor, Tensor]:
    """Return the samples of all updates, and the shares of their labels; some are mixed."""
    generator = torch.Generator().manual_seed(2)
    images = torch.randn(STEPS * BATCH, 6, dtype=torch.float64, generator=generator)
    labels = torch.randint(CLASSES, (STEPS * BATCH, 2), generator=generator)
    share = torch.rand(STEPS * BATCH, 1, dtype=torch.float64, generator=generator)
    own, other = nn.functional.one_hot(labels, CLASSES).double().unbind(1)
    return images, share * own + (1 - share) * other


def recipe_of(optimizer: str, *changes: str) -> Recipe:
    path = crown.DIGITS
    return load_recipe(path, [f"optimizer={{{optimizer}}}", SCHEDULE, LOSS, *changes])
