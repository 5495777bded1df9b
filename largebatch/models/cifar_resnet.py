"""The residual networks for CIFAR-10 (He et al. 2015, arXiv:1512.03385, section 4.2).

timm's ResNets start by downsampling an image by four, which leaves little of 32 x 32 pixels; these
start with a 3 x 3 convolution at full size and downsample twice, between the stages.
"""

from torch import Tensor, nn
from torch.nn import functional as F

WIDTHS = (16, 32, 64)
"""Number of channels of the three stages."""

DEPTHS = (8, 20, 32, 44, 56, 110)
"""Numbers of layers with weights: 6 n + 2 for n blocks per stage. All but the first are the
paper's."""


class CifarResNet(nn.Module):
    """Maps N x 3 x H x W to N x num_classes; H and W are 32 in the paper."""

    def __init__(self, num_classes: int, *, depth: int) -> None:
        super().__init__()
        if depth not in DEPTHS:
            raise ValueError(f"depth must be one of {', '.join(map(str, DEPTHS))}, got {depth}")
        channels = WIDTHS[0]
        self.conv1 = _convolution(3, channels, stride=1)
        self.bn1 = nn.BatchNorm2d(channels)
        self.stages = nn.Sequential()
        for stage, width in enumerate(WIDTHS):
            blocks = nn.Sequential()
            for block in range((depth - 2) // 6):
                blocks.append(_Block(channels, width, stride=2 if stage and not block else 1))
                channels = width
            self.stages.append(blocks)
        self.head = nn.Linear(channels, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits."""
        maps = self.stages(F.relu(self.bn1(self.conv1(images))))
        logits: Tensor = self.head(maps.mean((2, 3)))
        return logits

    def get_classifier(self) -> nn.Linear:
        """Return the last layer, like timm's models."""
        return self.head


class _Block(nn.Module):
    """Two convolutions and a shortcut without weights, the paper's option A.

    Between stages the shortcut takes every second pixel and pads with channels of zeros.
    """

    def __init__(self, inputs: int, outputs: int, *, stride: int) -> None:
        super().__init__()
        self.conv1 = _convolution(inputs, outputs, stride=stride)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = _convolution(outputs, outputs, stride=1)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.stride, self.added = stride, outputs - inputs

    def forward(self, maps: Tensor) -> Tensor:
        residual = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(maps)))))
        shortcut = maps[:, :, :: self.stride, :: self.stride]
        if self.added:
            shortcut = F.pad(shortcut, (0, 0, 0, 0, 0, self.added))
        return F.relu(shortcut + residual)


def _convolution(inputs: int, outputs: int, *, stride: int) -> nn.Conv2d:
    """Return a 3 x 3 convolution with He's weights (arXiv:1502.01852, equation 14)."""
    convolution = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
    nn.init.kaiming_normal_(convolution.weight, mode="fan_out", nonlinearity="relu")
    return convolution
