"""The exponential moving average (EMA) of a model, kept while it trains.

After every update ema = decay * ema + (1 - decay) * model, and after the first the EMA is the
model, so that nothing of the weights at the start is in it (arXiv:1512.00567, section 8, evaluates
such an average).

PyTorch's AveragedModel computes it. It is given the weights and the running statistics alone and
not the model: it copies what it is given, and a model here holds groups of workers, which cannot be
copied. Statistics are averaged like weights, as timm does: those of the last update belong to
other weights.
"""

from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


class EMA:
    """Weights and running statistics, averaged over the updates so far."""

    def __init__(self, model: nn.Module, *, decay: float) -> None:
        buffers = (buffer for buffer in model.buffers() if buffer.is_floating_point())
        self._live = nn.ParameterList([*model.parameters(), *buffers])
        self._average = AveragedModel(self._live, multi_avg_fn=get_ema_multi_avg_fn(decay))

    def update(self) -> None:
        """Move towards the model as it is; the first time, take it over."""
        self._average.update_parameters(self._live)

    @torch.no_grad()
    def store(self) -> None:
        """Put the EMA into the model."""
        torch._foreach_copy_(list(self._live), list(self._average.module.parameters()))

    def state_dict(self) -> dict[str, Any]:
        """Return the tensors themselves, for a checkpoint."""
        return self._average.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where a checkpoint stopped."""
        self._average.load_state_dict(state)


def store_ema(state: dict[str, Any], model: nn.Module) -> None:
    """Put the EMA that a checkpoint holds into a model of the kind it was kept of."""
    ema = EMA(model, decay=0.0)  # it moves no more
    ema.load_state_dict(state)
    ema.store()
