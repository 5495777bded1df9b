"""The nine-layer residual network of DAWNBench's CIFAR-10 records.

D. Page, "How to train your ResNet" (2018), parts 4 and 8: it is wide where feature maps are small,
so it learns more per operation than the networks of arXiv:1512.03385, section 4.2. Pooling precedes
BatchNorm (part 8), which then reads a quarter of the values.
"""

from torch import Tensor, nn
from torch.nn import functional as F

LOGIT_SCALE = 0.125
"""Factor of the logits, as in the original."""


class CifarResNet9(nn.Module):
    """Maps N x 3 x H x W, H and W 16 or more, to N x num_classes.

    `width` is the number of channels of the first convolution, 64 in the original; the last one has
    8 times as many.
    """

    def __init__(self, num_classes: int, *, width: int = 64) -> None:
        super().__init__()
        if width < 1:
            raise ValueError(f"width must be 1 or more, got {width}")
        self.prep = _Unit(3, width)
        self.layer1 = nn.Sequential(_Unit(width, 2 * width, pool=2), _Residual(2 * width))
        self.layer2 = _Unit(2 * width, 4 * width, pool=2)
        self.layer3 = nn.Sequential(_Unit(4 * width, 8 * width, pool=2), _Residual(8 * width))
        self.head = nn.Linear(8 * width, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits."""
        maps = self.layer3(self.layer2(self.layer1(self.prep(images))))
        logits: Tensor = self.head(maps.amax((2, 3)))
        return logits * LOGIT_SCALE

    def get_classifier(self) -> nn.Linear:
        """Return the last layer, like timm's models."""
        return self.head


class _Unit(nn.Module):
    """A 3 x 3 convolution, max pooling over `pool` x `pool`, BatchNorm and ReLU."""

    def __init__(self, inputs: int, outputs: int, *, pool: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        self.pool = nn.MaxPool2d(pool) if pool > 1 else nn.Identity()
        self.bn = nn.BatchNorm2d(outputs)

    def forward(self, maps: Tensor) -> Tensor:
        out: Tensor = F.relu(self.bn(self.pool(self.conv(maps))))
        return out


class _Residual(nn.Module):
    """Two units and a shortcut, added after the last ReLU."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.unit1 = _Unit(channels, channels)
        self.unit2 = _Unit(channels, channels)

    def forward(self, maps: Tensor) -> Tensor:
        added: Tensor = maps + self.unit2(self.unit1(maps))
        return added
