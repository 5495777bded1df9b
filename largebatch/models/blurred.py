"""ResNet-50 with blurred downsampling, as FFCV trains it (libffcv/ffcv-imagenet).

Zhang 2019, "Making convolutional networks shift-invariant again" (arXiv:1904.11486), blurs before
pixels are left out. FFCV's train_imagenet.py blurs the input of every convolution of stride 2 but
the first, at full size: the weights stay those of ResNet-50, and the convolution its stride. timm's
resnetblur50 is another network: it blurs behind three of them, which then have stride 1, and after
the first pooling.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from largebatch.models import zoo

_MIN_CHANNELS = 16  # FFCV's, which leaves out the first convolution, of the image


def resnet50_blurred(num_classes: int, **arguments: object) -> nn.Module:
    """Return torchvision's ResNet-50, whose six later convolutions of stride 2 blur their input.

    `arguments` are those of torchvision's ResNet.
    """
    model = zoo.build("torchvision/resnet50", num_classes=num_classes, arguments=arguments)
    for block in list(model.modules()):
        for name, layer in list(block.named_children()):
            if (
                isinstance(layer, nn.Conv2d)
                and max(layer.stride) > 1
                and layer.in_channels >= _MIN_CHANNELS
            ):
                setattr(block, name, BlurredConv2d(layer))
    return model


class BlurredConv2d(nn.Module):
    """A convolution of an image that was blurred with 1 2 1 in both directions.

    Behind the border the image counts as zero, as in FFCV's.
    """

    kernel: Tensor

    def __init__(self, conv: nn.Conv2d) -> None:
        super().__init__()
        self.conv = conv
        weights = torch.tensor([1.0, 2.0, 1.0]) / 4
        kernel = torch.outer(weights, weights).expand(conv.in_channels, 1, 3, 3)
        # Known without a file of weights, which then fit those of an unblurred network but for the
        # names of six layers.
        self.register_buffer("kernel", kernel.clone(), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        """Return the maps."""
        blurred = F.conv2d(images, self.kernel, padding=1, groups=self.conv.in_channels)
        maps: Tensor = self.conv(blurred)
        return maps
