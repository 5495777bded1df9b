"""Shampoo of pytorch-optimizer, adapted to several workers and to checkpoints.

The library computes the largest eigenvalue of a matrix from a random vector, so workers with
different generators would get different weights. And its state contains objects; a checkpoint
stores their tensors.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from largebatch.accelerator import is_remote
from largebatch.optim.building import Weights
from largebatch.optional import require_shampoo
from largebatch.recipe import optimizers as sections

require_shampoo()

from pytorch_optimizer import ScalableShampoo  # noqa: E402 -- after a check that it is installed

_MATRICES = ("statistics", "pre_conditioners")


class Shampoo(ScalableShampoo):
    """ScalableShampoo whose update depends only on weights, gradients and state."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # noqa: ANN401 -- a loss
        """Update the weights; every update draws the same random vectors."""
        weight = self.param_groups[0]["params"][0]
        device = weight.device
        devices = [device] if is_remote(device) else []
        with torch.random.fork_rng(devices, device_type=device.type):
            torch.manual_seed(0)
            return super().step(closure)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as tensors and plain values."""
        packed = super().state_dict()
        plain = {number: _plain(entry) for number, entry in packed["state"].items()}
        return {**packed, "state": plain}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state; raise ValueError if its matrices do not match the blocks."""
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            for weight in group["params"]:
                if weight in self.state:
                    saved = self.state.pop(weight)
                    _fill(self._fresh(weight, group), saved)

    def _fresh(self, weight: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        """Return a new state of one weight, created by the library, which needs a gradient."""
        grad = weight.grad
        weight.grad = torch.zeros_like(weight)
        self.init_group({**group, "params": [weight]})
        weight.grad = grad
        entry: dict[str, Any] = self.state[weight]
        return entry


def _plain(entry: dict[str, Any]) -> dict[str, Any]:
    matrices = {key: getattr(entry["pre_conditioner"], key) for key in _MATRICES}
    graft = {key: value for key, value in vars(entry["graft"]).items() if isinstance(value, Tensor)}
    return {"momentum": entry["momentum"], "pre_conditioner": matrices, "graft": graft}


def _fill(entry: dict[str, Any], saved: dict[str, Any]) -> None:
    _copy(entry["momentum"], saved["momentum"])
    for key, value in saved["graft"].items():
        _copy(getattr(entry["graft"], key), value)
    for key in _MATRICES:
        matrices, saved_matrices = (
            getattr(entry["pre_conditioner"], key),
            saved["pre_conditioner"][key],
        )
        if len(matrices) != len(saved_matrices):
            raise ValueError(f"Shampoo: {len(saved_matrices)} {key}, expected {len(matrices)}")
        for matrix, saved_matrix in zip(matrices, saved_matrices, strict=True):
            _copy(matrix, saved_matrix)


def _copy(own: Tensor, saved: Tensor) -> None:
    if own.shape != saved.shape:
        raise ValueError(f"Shampoo: shape {list(saved.shape)}, expected {list(own.shape)}")
    own.copy_(saved)


def build_shampoo(section: sections.Shampoo, weights: Weights) -> Shampoo:
    """Build Shampoo of pytorch-optimizer."""
    # The library names its enumeration by words in capitals, a recipe by those of the paper.
    grafts = require_shampoo().optimizer.utils.graft.LayerWiseGrafting
    return Shampoo(
        weights.groups(weight_decay=section.weight_decay),
        lr=weights.lr,
        betas=(section.momentum, section.beta2),
        inverse_exponent_override=section.root or 0,
        start_preconditioning_step=section.start_step,
        preconditioning_compute_steps=section.root_every,
        block_size=section.block_size,
        graft_type=grafts[section.graft.upper()],
        nesterov=section.nesterov,
        matrix_eps=section.matrix_eps,
    )
