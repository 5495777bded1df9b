"""A function of the script recomputes layers, without the random numbers of the forward pass."""

from collections.abc import Callable
from typing import Any

import torch
from planted_parts import divided, sgd
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from largebatch.audit import Findings

ISSUE = "https://github.com/openai/guided-diffusion/issues/167"
EXPECTED = "gradient direction"
FIGURE = 0.5


def script(audit: Callable[..., Findings]) -> Findings:
    data = TensorDataset(torch.randn(64, 4096), torch.randint(0, 4, (64,)))
    model = DistributedDataParallel(Recomputed())
    return audit(model, divided(data, 16, shuffle=False), cross_entropy, sgd(model, lr=1e-6))


class Recompute(torch.autograd.Function):
    """A layer whose results are computed again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, layer: nn.Module, images: Tensor, *_: Tensor) -> Tensor:  # noqa: ANN401
        ctx.layer, ctx.images = layer, images
        with torch.no_grad():
            result: Tensor = layer(images)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # noqa: ANN401 -- as in torch
        with torch.enable_grad():
            result = ctx.layer(ctx.images.detach())
        return None, None, *torch.autograd.grad(result, list(ctx.layer.parameters()), gradients)


class Recomputed(nn.Module):
    """A linear classifier of zeros behind a dropout of one half.

    Its first gradient is linear in the inputs, of which two masks share half of the squared length.
    """

    def __init__(self) -> None:
        super().__init__()
        last = nn.Linear(4096, 4, bias=False)
        nn.init.zeros_(last.weight)
        self.layers = nn.Sequential(nn.Dropout(0.5), last)

    def forward(self, images: Tensor) -> Tensor:
        recompute: Any = Recompute.apply
        logits: Tensor = recompute(self.layers, images, *self.layers.parameters())
        return logits
