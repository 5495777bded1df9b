"""A network in float64 with the layers of timm's models, which a recipe names `tiny_float64`.

`--import tiny_net` registers it.
"""

from typing import Any

import torch
from torch import Tensor, nn

from largebatch.optional import require_timm

require_timm()
from timm.models import register_model  # noqa: E402 -- timm needs torchvision's operators

NAME = "tiny_float64"


class TinyNet(nn.Module):
    """Two convolutions with BatchNorm, and a head."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, stride=2, bias=False)
        self.norm = nn.BatchNorm2d(4)
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Conv2d(4, 5, 3, bias=False), nn.BatchNorm2d(5), nn.ReLU())]
        )
        self.head = nn.Linear(5, num_classes)
        self.double()

    def forward(self, images: Tensor) -> Tensor:
        x = self.norm(self.stem(images.double())).relu()
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x.mean(dim=(2, 3)))
        return logits

    def group_matcher(self, *, coarse: bool = False) -> dict[str, Any]:
        """As of timm's models."""
        return {"stem": r"^stem|^norm", "blocks": [(r"^blocks\.(\d+)", None)]}


@register_model  # type: ignore[untyped-decorator]  # timm's
def tiny_float64(*, num_classes: int, **_: object) -> nn.Module:
    return TinyNet(num_classes)


def tiny_net(seed: int, *, num_classes: int) -> TinyNet:
    """Build the network of a recipe with this seed."""
    torch.manual_seed(seed)
    return TinyNet(num_classes)
