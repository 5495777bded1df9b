"""Layers are recomputed in the backward pass without the random numbers of the forward pass."""

from collections.abc import Callable

import torch
from planted_parts import divided, sgd
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from largebatch.audit import Findings

ISSUE = "https://github.com/allenai/OLMo-core/pull/828"
EXPECTED = "gradient direction"
FIGURE = 0.5


def script(audit: Callable[..., Findings]) -> Findings:
    data = TensorDataset(torch.randn(64, 4096), torch.randint(0, 4, (64,)))
    model = DistributedDataParallel(Recomputed())
    return audit(model, divided(data, 16, shuffle=False), cross_entropy, sgd(model, lr=1e-6))


class Recomputed(nn.Module):
    """A linear classifier of zeros behind a dropout of one half.

    Its first gradient is linear in the inputs, of which two masks share half of the squared length.
    """

    def __init__(self) -> None:
        super().__init__()
        self.dropout, self.last = nn.Dropout(0.5), nn.Linear(4096, 4, bias=False)
        nn.init.zeros_(self.last.weight)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = checkpoint(
            lambda it: self.last(self.dropout(it)),
            images,
            use_reentrant=False,
            preserve_rng_state=False,
        )
        return logits
