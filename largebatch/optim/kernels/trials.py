"""Trials of the kernels of LARS and SGD: steps of an optimizer, beside PyTorch's operations."""

import copy
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from largebatch import accelerator
from largebatch.optim.lars import LARS
from largebatch.proof import OPTIMIZER, Trial, Trials, deciding

_SCALE = 1024.0
"""Factor of gradients in fp16: a power of 2, so that dividing by it changes no bit."""

_STEPS = 2  # the second one has momentum

Build = Callable[[nn.Module], Optimizer]


class _Weights(nn.Module):
    """Weights of every type that the kernels take; the first has several chunks."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        kinds: list[tuple[tuple[int, ...], torch.dtype]] = [
            ((3, 3001), torch.float32),
            ((40, 100), torch.bfloat16),
            ((65, 33), torch.float16),
            ((17,), torch.float32),
        ]
        for number, (shape, dtype) in enumerate(kinds):
            weight = nn.Parameter(torch.randn(shape, device=device).to(dtype))
            self.register_parameter(f"weight{number}", weight)


def trials(device: torch.device, _: Mapping[str, object]) -> Trials:
    """Return trials for any model: LARS on weights of each type."""

    def build(model: nn.Module) -> Optimizer:
        *matrices, bias = model.parameters()
        groups: list[dict[str, Any]] = [
            {"params": matrices},
            {"params": [bias], "adapt": False},
        ]
        return LARS(groups, lr=0.5, eta=0.1, weight_decay=0.1)

    def make() -> Iterator[Trial]:
        accelerator.seed(0, device)
        return trials_of("LARS", build, _Weights(device), scaled=True)

    return {OPTIMIZER: make}


def trials_of(
    name: str, build: Build, model: nn.Module, *, scaled: bool, count: int = 1
) -> Iterator[Trial]:
    """Yield the trials of an optimizer's steps: plain and skipped ones; with `scaled` in fp16.

    `build` is called for each side, with the decision about kernels that the side has.
    """
    for is_scaled in (False, True) if scaled else (False,):
        for skips in (True,) if is_scaled else (False, True):
            settings = {"is_scaled": is_scaled, "skips": skips}
            ours = _Steps(build, copy.deepcopy(model), None, **settings)
            theirs = _Steps(build, copy.deepcopy(model), "PyTorch's", **settings)
            exact = _Steps(build, copy.deepcopy(model).double(), "PyTorch's", **settings)
            words = [name, f"{len(ours.weights)} weights"]
            words += ["scaled gradients"] * is_scaled + ["steps that may be skipped"] * skips
            yield Trial(
                name=", ".join(words),
                ours=ours.first,
                theirs=theirs.first,
                exact=exact.first,
                count=count,
                timed=(ours.step, theirs.step),
            )


class _Steps:
    """Steps of an optimizer with the same gradients, by kernels or without (`refusal`)."""

    def __init__(
        self, build: Build, model: nn.Module, refusal: str | None, *, is_scaled: bool, skips: bool
    ) -> None:
        self.weights = [it for it in model.parameters() if it.requires_grad]
        self._device = self.weights[0].device
        self._deciding = partial(deciding, self._device, {OPTIMIZER: refusal})
        self._scale = _SCALE if is_scaled else 1.0
        self._is_scaled = is_scaled
        self._skips = skips
        with self._deciding():
            self._optimizer = build(model)
        self._no = torch.zeros((), device=self._device)
        self._scales = torch.full((), _SCALE, device=self._device)

    def first(self) -> list[Tensor]:
        """Make the first steps, the last of which is skipped; return weights and state."""
        for number in range(_STEPS):
            self._draw_gradients(number)
            self._step(self._no)
        if self._skips:
            self._draw_gradients(_STEPS)
            self._step(self._no + 1)
        tensors: list[object] = []
        for weight in self.weights:
            state = dict(self._optimizer.state[weight])
            # Only weights of 16 bits have a master, which is the weight in float64.
            tensors += [weight, state.pop("master", weight), *state.values()]
        kept = (it for it in tensors if isinstance(it, Tensor) and it.is_floating_point())
        return [it.detach().clone() for it in kept]

    def step(self) -> list[Tensor]:
        """Make one step more, with the last gradients."""
        self._step(self._no)
        return []

    def _draw_gradients(self, number: int) -> None:
        accelerator.seed(number, self._device)
        for weight in self.weights:
            # Gradients of a trial in float64 are those of the others.
            drawn = torch.randn(weight.shape, device=self._device).to(torch.float16)
            weight.grad = torch.empty_like(weight).copy_(drawn).mul_(self._scale / 16)

    def _step(self, found_inf: Tensor) -> None:
        optimizer: Any = self._optimizer
        with self._deciding():
            if getattr(optimizer, "_step_supports_amp_scaling", False):
                if self._is_scaled or self._skips:
                    optimizer.grad_scale = self._scales if self._is_scaled else None
                    optimizer.found_inf = found_inf
                optimizer.step()
            elif not self._skips or not found_inf.item():  # sync: in a process of trials
                for weight in self.weights if self._is_scaled else ():
                    assert weight.grad is not None
                    weight.grad.div_(self._scale)
                optimizer.step()
