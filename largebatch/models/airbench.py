"""The network of airbench94: 94 % on CIFAR-10 in seconds (K. Jordan, arXiv:2404.00498).

A fixed first convolution whitens patches of 2 x 2 pixels. Its filters come from training images, so
whoever trains the network calls `init_from_images` before the first update. Checkpoints and saved
weights hold the filters.
"""

from collections.abc import Iterable
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

NUM_IMAGES = 5_000
"""Number of training images that the first filters are computed from, as in the original."""

PATCH = 2
"""Side of the whitened patches in pixels."""

EPS = 5e-4
"""Added to the variances of the patches before taking their roots."""


class Airbench(nn.Module):
    """Maps N x 3 x H x W, H and W 16 or more, to N x num_classes.

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
        self.blocks = nn.Sequential(*map(_Block, widths, widths[1:]))
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

    def get_classifier(self) -> nn.Linear:
        """Return the last layer, like timm's models."""
        return self.head


def whitening_filters(batches: Iterable[Tensor]) -> Tensor:
    """Return 12 x 3 x 2 x 2 filters whose outputs are uncorrelated, with mean squares near 1.

    They are the eigenvectors of the patches' second moments, divided by the roots of the
    eigenvalues. Computed in float64 on the CPU; the largest entry of a filter is positive.
    """
    size = 3 * PATCH**2
    moments, number = torch.zeros(size, size, dtype=torch.float64), 0
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
    """A convolution with fixed filters and a trained bias."""

    weight: Tensor

    def __init__(self) -> None:
        super().__init__()
        like = nn.Conv2d(3, 2 * 3 * PATCH**2, PATCH)
        self.register_buffer("weight", like.weight.detach())
        self.bias = cast("nn.Parameter", like.bias)

    def forward(self, images: Tensor) -> Tensor:
        maps: Tensor = F.conv2d(images, self.weight, self.bias)
        return maps


class _Block(nn.Module):
    """Two 3 x 3 convolutions, each with BatchNorm and GELU; the first halves the maps."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = _convolution(inputs, outputs), _norm(outputs)
        self.conv2, self.norm2 = _convolution(outputs, outputs), _norm(outputs)

    def forward(self, maps: Tensor) -> Tensor:
        maps = F.gelu(self.norm1(F.max_pool2d(self.conv1(maps), 2)))
        return F.gelu(self.norm2(self.conv2(maps)))


def _convolution(inputs: int, outputs: int) -> nn.Conv2d:
    """Return a convolution whose first filters copy its inputs."""
    convolution = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
    with torch.no_grad():
        nn.init.dirac_(convolution.weight[:inputs])
    return convolution


def _norm(channels: int) -> nn.BatchNorm2d:
    """Return a BatchNorm whose scale is not trained and whose statistics move quickly."""
    norm = nn.BatchNorm2d(channels, eps=1e-12, momentum=0.4)
    norm.weight.requires_grad = False
    return norm
