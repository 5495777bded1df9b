"""LeNet-5 (LeCun et al. 1998), in the form of Caffe and with its own five layers."""

from torch import Tensor, nn

_PARTS = {4: (20, 50, 4, (500,)), 5: (6, 16, 5, (120, 84))}
"""Maps of both convolutions, side of the pooled maps and hidden units, by layers with weights."""


class LeNet5(nn.Module):
    """Two convolutions with max pooling, then hidden layers; no BatchNorm.

    Maps N x 3 x H x W, H and W at least 16, to N x num_classes. `layers` counts those with weights:

        4   Caffe's: 20 and 50 maps, 500 hidden units
        5   LeCun's widths: 6 and 16 maps, 120 and 84 hidden units, with ReLU and max pooling

    The second pooling returns 4 x 4 (5 x 5) maps for any input; at 28 x 28 (32 x 32) it is the
    usual one over 2 x 2. Raises ValueError for another number of layers.
    """

    def __init__(self, num_classes: int, *, layers: int = 4) -> None:
        super().__init__()
        if layers not in _PARTS:
            raise ValueError(f"layers ({layers}) must be 4, as Caffe has it, or 5")
        first, second, side, hidden = _PARTS[layers]
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

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits."""
        logits: Tensor = self.head(self.features(images))
        return logits

    def get_classifier(self) -> nn.Linear:
        """Return the last layer, like timm's models."""
        return self.head
