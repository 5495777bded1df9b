"""Shampoo of pytorch-optimizer, fit for several workers and for checkpoints.

The library finds the largest eigenvalue of a matrix from a random vector, so that workers whose
generators differ would not have the same weights; and it keeps objects in its state, of which a
checkpoint holds the tensors.
"""

from collections.abc import Callable
from typing import Any

import torch
from pytorch_optimizer import ScalableShampoo
from torch import Tensor

from largebatch.accelerator import is_remote

_MATRICES = ("statistics", "pre_conditioners")


class Shampoo(ScalableShampoo):
    """ScalableShampoo whose update is a function of weights, gradients and state alone."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # noqa: ANN401 -- a loss
        """Make an update; every one draws the same random vectors."""
        weight = self.param_groups[0]["params"][0]
        where = weight.device
        own = [where] if is_remote(where) else []
        with torch.random.fork_rng(own, device_type=where.type):
            torch.manual_seed(0)
            return super().step(closure)

    def state_dict(self) -> dict[str, Any]:
        """Return everything as tensors and plain values."""
        packed = super().state_dict()
        plain = {number: _plain(entry) for number, entry in packed["state"].items()}
        return {**packed, "state": plain}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from `state_dict`; raise ValueError where its matrices are not of these blocks."""
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            for weight in group["params"]:
                if weight in self.state:
                    saved = self.state.pop(weight)
                    _fill(self._fresh(weight, group), saved)

    def _fresh(self, weight: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        """Let the library make the state of one weight, which takes a gradient."""
        grad, weight.grad = weight.grad, torch.zeros_like(weight)
        self.init_group({**group, "params": [weight]})
        weight.grad = grad
        entry: dict[str, Any] = self.state[weight]
        return entry


def _plain(entry: dict[str, Any]) -> dict[str, Any]:
    """Return what a weight's entry holds, without the objects that hold it."""
    matrices = {key: getattr(entry["pre_conditioner"], key) for key in _MATRICES}
    graft = {key: value for key, value in vars(entry["graft"]).items() if isinstance(value, Tensor)}
    return {"momentum": entry["momentum"], "pre_conditioner": matrices, "graft": graft}


def _fill(entry: dict[str, Any], saved: dict[str, Any]) -> None:
    """Copy what was saved into a fresh entry."""
    _copy(entry["momentum"], saved["momentum"])
    for key, value in saved["graft"].items():
        _copy(getattr(entry["graft"], key), value)
    for key in _MATRICES:
        own, given = getattr(entry["pre_conditioner"], key), saved["pre_conditioner"][key]
        if len(own) != len(given):
            raise ValueError(f"Shampoo: {len(given)} {key}, expected {len(own)}")
        for one, other in zip(own, given, strict=True):
            _copy(one, other)


def _copy(own: Tensor, saved: Tensor) -> None:
    if own.shape != saved.shape:
        raise ValueError(f"Shampoo: shape {list(saved.shape)}, expected {list(own.shape)}")
    own.copy_(saved)
