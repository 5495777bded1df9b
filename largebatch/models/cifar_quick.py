"""A small network for CIFAR-10, used by the staleness studies.

Caffe's `cifar10_quick` without its hidden layer, as in Rudra (arXiv:1509.04210): three convolutions
with pooling and one fully connected layer, about 90,000 parameters.
"""

from torch import Tensor, nn


class CifarQuick(nn.Module):
    """Maps N x 3 x 32 x 32 to N x num_classes; 89,578 parameters for 10 classes.

    `batch_norm` adds BatchNorm after every convolution, which the papers do not have.
    """

    def __init__(self, num_classes: int, *, batch_norm: bool = False) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *_stage(3, 32, nn.MaxPool2d(3, stride=2, ceil_mode=True), batch_norm=batch_norm),
            *_stage(32, 32, nn.AvgPool2d(3, stride=2, ceil_mode=True), batch_norm=batch_norm),
            *_stage(32, 64, nn.AvgPool2d(3, stride=2, ceil_mode=True), batch_norm=batch_norm),
            nn.AdaptiveAvgPool2d(4),
            nn.Flatten(),
        )
        self.head = nn.Linear(64 * 4 * 4, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits."""
        logits: Tensor = self.head(self.features(images))
        return logits

    def get_classifier(self) -> nn.Linear:
        """Return the last layer, like timm's models."""
        return self.head


def _stage(inputs: int, outputs: int, pool: nn.Module, *, batch_norm: bool) -> list[nn.Module]:
    convolution = nn.Conv2d(inputs, outputs, kernel_size=5, padding=2)
    norm = [nn.BatchNorm2d(outputs)] if batch_norm else []
    return [convolution, *norm, nn.ReLU(), pool]
