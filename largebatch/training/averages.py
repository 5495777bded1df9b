"""Averages of a model's weights: EMA and SWA, updated while it trains.

EMA moves in every update: ema = decay * ema + (1 - decay) * model. After the first update it is the
model (arXiv:1512.00567, section 8, evaluates such an average). SWA is the plain mean of the
weights at a regular interval over the last part of the schedule (arXiv:1803.05407, algorithm 1).

PyTorch's AveragedModel holds and loads the averages. It does not update them, because that would
wait for the GPU. It receives the weights and the running statistics, which are averaged alike, and
not the model, whose process groups cannot be copied.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel


class _Average:
    """Weights and running statistics, averaged over some of the updates so far."""

    def __init__(self, model: nn.Module) -> None:
        self._live = averaged(model)
        self._average = AveragedModel(nn.ParameterList(self._live))
        self._averages: list[Tensor] = list(self._average.parameters())

    @property
    def num_models(self) -> int:
        """Number of states of the model in the average, counted on the host."""
        return int(self._average.n_averaged)

    def move(self, skipped: Tensor | None) -> None:
        """Do what every update does, so that a graph can replay it: nothing for SWA.

        Nothing moves where `skipped` is true on the device.
        """

    @torch.no_grad()
    def count(self, step: int) -> None:
        """Count the model after the update of a step, which has called `move`; copy the first."""
        if not self._includes(step):
            return
        self._average.n_averaged += 1
        if self.num_models == 1:  # until now the average holds the initial weights
            torch._foreach_copy_(self._averages, self._live)
        else:
            self._add()

    @torch.no_grad()
    def store(self) -> None:
        """Copy the average into the model."""
        torch._foreach_copy_(self._live, self._averages)

    def state_dict(self) -> dict[str, Any]:
        """Return the tensors themselves, for a checkpoint."""
        return self._average.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where a checkpoint stopped."""
        self._average.load_state_dict(state)

    def forget(self) -> None:
        """Take the last update, which was skipped, out of the count; SWA counts it."""

    def _includes(self, step: int) -> bool:
        raise NotImplementedError

    def _add(self) -> None:
        """Add the model to the average, unless `move` has done so."""


class EMA(_Average):
    """The exponential moving average over all updates."""

    def __init__(self, model: nn.Module, *, decay: float) -> None:
        super().__init__(model)
        self._share = 1 - decay

    def forget(self) -> None:
        """Take the last update, which was skipped, out of the count; call before the next count."""
        self._average.n_averaged -= 1

    def _includes(self, step: int) -> bool:  # noqa: ARG002 -- SWA's needs it
        return True

    @torch.no_grad()
    def move(self, skipped: Tensor | None) -> None:
        """Move towards the model, unless `skipped` is true on the device."""
        if skipped is None:
            torch._foreach_lerp_(self._averages, self._live, self._share)
            return
        # Both results are computed and one is multiplied by zero: a graph cannot branch, and the
        # host must not wait for `skipped`. Weights stay finite in a skipped update, so 0 x is 0.
        moved = torch._foreach_lerp(self._averages, self._live, self._share)
        torch._foreach_mul_(self._averages, skipped.to(moved[0].dtype))  # one of the two is zero
        torch._foreach_mul_(moved, (~skipped).to(moved[0].dtype))
        torch._foreach_add_(self._averages, moved)


class SWA(_Average):
    """The mean of the weights after some of the updates."""

    def __init__(self, model: nn.Module, *, after: range) -> None:
        super().__init__(model)
        self._after = after

    def _includes(self, step: int) -> bool:
        return step + 1 in self._after

    def _add(self) -> None:
        torch._foreach_lerp_(self._averages, self._live, 1 / self.num_models)


def averaged(model: nn.Module) -> list[Tensor]:
    """Return the tensors of a new model that are averaged: its weights and running statistics.

    Constants with infinite values, such as a causal mask, are left out: inf - inf is not a number.
    """
    buffers = (buffer for buffer in model.buffers() if buffer.is_floating_point())
    tensors = [*model.parameters(), *buffers]
    return [tensor for tensor in tensors if tensor.isfinite().all()]  # sync: before the run
