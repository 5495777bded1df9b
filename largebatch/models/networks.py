"""The networks of this package, for small images: N x 3 x H x W to N x num_classes."""

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from largebatch.models.fusion import norm_relu

_LENET_PARTS = {4: (20, 50, 4, (500,)), 5: (6, 16, 5, (120, 84))}
"""Maps of both convolutions, side of the pooled maps and hidden units, by layers with weights."""


class LeNet5(nn.Sequential):
    """LeNet-5 (LeCun et al. 1998): two convolutions with max pooling, then hidden layers.

    No BatchNorm; H and W are at least 16. `layers` counts those with weights:

        4   Caffe's: 20 and 50 maps, 500 hidden units
        5   LeCun's widths: 6 and 16 maps, 120 and 84 hidden units, with ReLU and max pooling

    The second pooling returns 4 x 4 (5 x 5) maps for any input; at 28 x 28 (32 x 32) it is the
    usual one over 2 x 2. Raises ValueError for another number of layers.
    """

    def __init__(self, num_classes: int, *, layers: int = 4) -> None:
        super().__init__()
        if layers not in _LENET_PARTS:
            raise ValueError(f"layers ({layers}) must be 4, as Caffe has it, or 5")
        first, second, side, hidden = _LENET_PARTS[layers]
        after = [nn.ReLU()] if layers > 4 else []  # Caffe's has none there
        units = (second * side * side, *hidden)
        self.features = nn.Sequential(
            nn.Conv2d(3, first, kernel_size=5),
            *after,
            nn.MaxPool2d(2),
            nn.Conv2d(first, second, kernel_size=5),
            *after,
            nn.AdaptiveMaxPool2d(side),
            nn.Flatten(),
            *(
                layer
                for inputs, outputs in zip(units, hidden, strict=False)
                for layer in (nn.Linear(inputs, outputs), nn.ReLU())
            ),
        )
        self.head = nn.Linear(units[-1], num_classes)


class CifarQuick(nn.Sequential):
    """Caffe's `cifar10_quick` without its hidden layer, as in Rudra (arXiv:1509.04210).

    For 32 x 32 pixels; 89,578 parameters for 10 classes. `batch_norm` adds BatchNorm after every
    convolution, which the papers do not have.
    """

    def __init__(self, num_classes: int, *, batch_norm: bool = False) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        pools: Any = nn.MaxPool2d, nn.AvgPool2d, nn.AvgPool2d
        for inputs, outputs, pool in zip((3, 32, 32), (32, 32, 64), pools, strict=True):
            layers.append(nn.Conv2d(inputs, outputs, kernel_size=5, padding=2))
            layers += [nn.BatchNorm2d(outputs)] if batch_norm else []
            layers += [nn.ReLU(), pool(3, stride=2, ceil_mode=True)]
        self.features = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(4), nn.Flatten())
        self.head = nn.Linear(64 * 4 * 4, num_classes)


_WIDTHS = (16, 32, 64)
"""Number of channels of the three stages."""


class CifarResNet(nn.Module):
    """The residual networks for CIFAR-10 (He et al. 2015, arXiv:1512.03385, section 4.2).

    timm's ResNets start by downsampling an image by four, which leaves little of 32 x 32 pixels;
    these start with a 3 x 3 convolution at full size and downsample twice, between the stages.
    `depth` counts layers with weights: 6 n + 2 for n blocks per stage.
    """

    norm_relu_layers = (("bn1",),)

    def __init__(self, num_classes: int, *, depth: int) -> None:
        super().__init__()
        channels = _WIDTHS[0]
        self.conv1 = _he_convolution(3, channels, stride=1)
        self.bn1 = nn.BatchNorm2d(channels)
        self.stages = nn.Sequential()
        for stage, width in enumerate(_WIDTHS):
            blocks = nn.Sequential()
            for block in range((depth - 2) // 6):
                blocks.append(
                    _ResidualBlock(channels, width, stride=2 if stage and not block else 1)
                )
                channels = width
            self.stages.append(blocks)
        self.head = nn.Linear(channels, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits."""
        maps = self.stages(norm_relu(self.bn1, self.conv1(images)))
        logits: Tensor = self.head(maps.mean((2, 3)))
        return logits


class _ResidualBlock(nn.Module):
    """Two convolutions and a shortcut without weights, the paper's option A.

    Between stages the shortcut takes every second pixel and pads with channels of zeros.
    """

    norm_relu_layers = (("bn1",), ("bn2",))

    def __init__(self, inputs: int, outputs: int, *, stride: int) -> None:
        super().__init__()
        self.conv1 = _he_convolution(inputs, outputs, stride=stride)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = _he_convolution(outputs, outputs, stride=1)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.stride = stride
        self.added = outputs - inputs

    def forward(self, maps: Tensor) -> Tensor:
        shortcut = maps[:, :, :: self.stride, :: self.stride]
        if self.added:
            shortcut = F.pad(shortcut, (0, 0, 0, 0, 0, self.added))
        maps = norm_relu(self.bn1, self.conv1(maps))
        return norm_relu(self.bn2, self.conv2(maps), shortcut)


def _he_convolution(inputs: int, outputs: int, *, stride: int) -> nn.Conv2d:
    """Return a 3 x 3 convolution with He's weights (arXiv:1502.01852, equation 14)."""
    convolution = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
    nn.init.kaiming_normal_(convolution.weight, mode="fan_out", nonlinearity="relu")
    return convolution


_LOGIT_SCALE = 0.125  # factor of the logits, as in the original


class CifarResNet9(nn.Module):
    """The nine-layer residual network of DAWNBench's CIFAR-10 records; H and W are 16 or more.

    D. Page, "How to train your ResNet" (2018), parts 4 and 8: it is wide where feature maps are
    small, so it learns more per operation than the networks of arXiv:1512.03385, section 4.2.
    Pooling precedes BatchNorm (part 8), which then reads a quarter of the values.

    `width` is the number of channels of the first convolution, 64 in the original; the last one has
    8 times as many.
    """

    def __init__(self, num_classes: int, *, width: int = 64) -> None:
        super().__init__()
        if width < 1:
            raise ValueError(f"width must be 1 or more, got {width}")
        self.prep = _Unit(3, width)
        self.layer1 = nn.Sequential(_Unit(width, 2 * width, pool=2), _ResidualUnits(2 * width))
        self.layer2 = _Unit(2 * width, 4 * width, pool=2)
        self.layer3 = nn.Sequential(_Unit(4 * width, 8 * width, pool=2), _ResidualUnits(8 * width))
        self.head = nn.Linear(8 * width, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits."""
        maps = self.layer3(self.layer2(self.layer1(self.prep(images))))
        logits: Tensor = self.head(maps.amax((2, 3)))
        return logits * _LOGIT_SCALE


class _Unit(nn.Module):
    """A 3 x 3 convolution, max pooling over `pool` x `pool`, BatchNorm and ReLU."""

    norm_relu_layers = (("bn",),)

    def __init__(self, inputs: int, outputs: int, *, pool: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        self.pool = nn.MaxPool2d(pool) if pool > 1 else nn.Identity()
        self.bn = nn.BatchNorm2d(outputs)

    def forward(self, maps: Tensor) -> Tensor:
        return norm_relu(self.bn, self.pool(self.conv(maps)))


class _ResidualUnits(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.unit1 = _Unit(channels, channels)
        self.unit2 = _Unit(channels, channels)

    def forward(self, maps: Tensor) -> Tensor:
        added: Tensor = maps + self.unit2(self.unit1(maps))
        return added


NUM_IMAGES = 5_000
"""Number of training images that the first filters are computed from, as in the original."""

PATCH = 2
"""Side of the whitened patches in pixels."""

EPS = 5e-4
"""Added to the variances of the patches before taking their roots."""


class Airbench(nn.Module):
    """The network of airbench94: 94 % on CIFAR-10 in seconds (K. Jordan, arXiv:2404.00498).

    H and W are 16 or more. A fixed first convolution whitens patches of 2 x 2 pixels. Its filters
    come from training images, so whoever trains the network calls `init_from_images` before the
    first update. Checkpoints and saved weights hold the filters.

    `width` is the number of channels of the first of three blocks, 64 in the original; the other
    two have 4 times as many. The scales of the BatchNorm layers stay 1. The logits are divided by
    `divisor`, 9 where the original trains with SGD. Without one, as in the original with Muon, they
    are divided by the number of features, and the weights of the classifier begin with a standard
    deviation of 1: about 28 times torch's, so that SGD changes them 28 squared times as slowly.
    """

    def __init__(self, num_classes: int, *, width: int = 64, divisor: float | None = None) -> None:
        super().__init__()
        if width < 1:
            raise ValueError(f"width must be 1 or more, got {width}")
        self.whiten = _Whitening()
        widths = [len(self.whiten.weight), width, 4 * width, 4 * width]
        self.blocks = nn.Sequential(*map(_AirbenchBlock, widths, widths[1:]))
        self.head = nn.Linear(4 * width, num_classes, bias=False)
        if divisor is None:
            divisor = self.head.in_features
            with torch.no_grad():
                self.head.weight.div_(self.head.weight.std())
        self.divisor = divisor

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits."""
        maps = self.blocks(F.gelu(self.whiten(images)))
        # Reflection repeats maxima. Unlike amax, pooling sends the gradient to the first of them.
        features = F.max_pool2d(maps, maps.shape[2:]).flatten(1)
        logits: Tensor = self.head(features)
        return logits / self.divisor

    def init_from_images(self, batches: Iterable[Tensor]) -> None:
        """Compute the first filters from the first `NUM_IMAGES` images of these batches."""
        filters = whitening_filters(_first(batches, NUM_IMAGES))
        self.whiten.weight.copy_(torch.cat([filters, -filters]))


def whitening_filters(batches: Iterable[Tensor]) -> Tensor:
    """Return 12 x 3 x 2 x 2 filters whose outputs are uncorrelated, with mean squares near 1.

    They are the eigenvectors of the patches' second moments, divided by the roots of the
    eigenvalues. Computed in float64 on the CPU; the largest entry of a filter is positive.
    """
    size = 3 * PATCH**2
    moments = torch.zeros(size, size, dtype=torch.float64)
    number = 0
    for images in batches:
        patches = F.unfold(images.cpu().double(), PATCH).transpose(0, 1).flatten(1)
        moments += patches @ patches.T
        number += patches.shape[1]
    squares, vectors = torch.linalg.eigh(moments / number)
    filters: Tensor = (vectors / (squares + EPS).sqrt()).T
    largest = filters.gather(1, filters.abs().argmax(dim=1, keepdim=True))
    return (filters * largest.sign()).view(-1, 3, PATCH, PATCH)


def _first(batches: Iterable[Tensor], number: int) -> Iterable[Tensor]:
    for images in batches:
        yield images[:number]
        number -= len(images)
        if number <= 0:
            return


class _Whitening(nn.Module):
    weight: Tensor

    def __init__(self) -> None:
        super().__init__()
        like = nn.Conv2d(3, 2 * 3 * PATCH**2, PATCH)
        self.register_buffer("weight", like.weight.detach())
        self.bias = cast("nn.Parameter", like.bias)

    def forward(self, images: Tensor) -> Tensor:
        maps: Tensor = F.conv2d(images, self.weight, self.bias)
        return maps


class _AirbenchBlock(nn.Module):
    """Two 3 x 3 convolutions, each with BatchNorm and GELU; the first halves the maps."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv1 = _airbench_convolution(inputs, outputs)
        self.norm1 = _airbench_norm(outputs)
        self.conv2 = _airbench_convolution(outputs, outputs)
        self.norm2 = _airbench_norm(outputs)

    def forward(self, maps: Tensor) -> Tensor:
        maps = F.gelu(self.norm1(F.max_pool2d(self.conv1(maps), 2)))
        return F.gelu(self.norm2(self.conv2(maps)))


def _airbench_convolution(inputs: int, outputs: int) -> nn.Conv2d:
    """Return a convolution whose first filters copy its inputs."""
    convolution = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
    with torch.no_grad():
        nn.init.dirac_(convolution.weight[:inputs])
    return convolution


def _airbench_norm(channels: int) -> nn.BatchNorm2d:
    """Return a BatchNorm whose scale is not trained and whose statistics move quickly."""
    norm = nn.BatchNorm2d(channels, eps=1e-12, momentum=0.4)
    norm.weight.requires_grad = False
    return norm
