"""Evaluation on several views of each image: test-time augmentation."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from largebatch.models.inputs import logits_of


class MeanOfViews(nn.Module):
    """Average a model's logits over 2 or 6 views of each image, N x C x H x W, H and W 2 or more.

    2 views: the image and its mirror image. 6: these count half, and the same two moved by one
    pixel up and left, and down and right, a quarter each; reflection fills the borders, as in
    airbench (arXiv:2404.00498, section 3.5).
    """

    def __init__(self, model: nn.Module, *, views: int) -> None:
        super().__init__()
        self.model, self.moves = model, views > 2

    def forward(self, images: Tensor) -> Tensor:
        """Return the mean logits, N x K."""
        logits = self._mirrored(images)
        if not self.moves:
            return logits
        height, width = images.shape[2:]
        larger = F.pad(images, (1, 1, 1, 1), "reflect")
        moved = (larger[..., y : y + height, y : y + width] for y in (0, 2))
        return torch.lerp(logits, torch.stack([*map(self._mirrored, moved)]).mean(0), 0.5)

    def _mirrored(self, images: Tensor) -> Tensor:
        both = (images, images.flip(-1))
        return torch.stack([logits_of(self.model(view)) for view in both]).mean(0)
