"""LeNet-5 (LeCun et al. 1998) in the common form of Caffe."""

from torch import Tensor, nn


class LeNet5(nn.Module):
    """Two convolutions of 20 and 50 maps with max pooling, then 500 hidden units; no BatchNorm.

    Maps N x 3 x H x W, H and W at least 16, to N x num_classes. The second pooling returns 4 x 4
    maps for any input; at 28 x 28 it is the usual one over 2 x 2.
    """

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 20, kernel_size=5),
            nn.MaxPool2d(2),
            nn.Conv2d(20, 50, kernel_size=5),
            nn.AdaptiveMaxPool2d(4),
            nn.Flatten(),
            nn.Linear(50 * 4 * 4, 500),
            nn.ReLU(),
        )
        self.head = nn.Linear(500, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits."""
        logits: Tensor = self.head(self.features(images))
        return logits

    def get_classifier(self) -> nn.Linear:
        """Return the last layer, like timm's models."""
        return self.head
