"""Layers with dropout are recomputed in both ways of torch.utils.checkpoint, with their masks."""

from collections.abc import Callable

from planted_parts import FEATURES, divided, perceptron, random_data, sgd
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from largebatch.audit import Findings


def script(audit: Callable[..., Findings]) -> Findings:
    loader = divided(random_data(), 16, shuffle=False)
    first = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Dropout(0.5))
    last = perceptron(nn.Dropout(0.5), nn.ReLU())
    early, late = Recomputed(first, is_reentrant=False), Recomputed(last, is_reentrant=True)
    model = DistributedDataParallel(nn.Sequential(early, late))
    return audit(model, loader, cross_entropy, sgd(model))


class Recomputed(nn.Module):
    """Layers whose results are not kept for the backward pass."""

    def __init__(self, layers: nn.Module, *, is_reentrant: bool) -> None:
        super().__init__()
        self.layers, self.is_reentrant = layers, is_reentrant

    def forward(self, images: Tensor) -> Tensor:
        result: Tensor = checkpoint(self.layers, images, use_reentrant=self.is_reentrant)
        return result
