"""What `monitor` adds to the records: gradient norm, trust ratios, and what the workers use.

The ratios that LARS has used and the system's counters are read after an update; the norm between
the sum of the gradients and the optimizer, for some optimizers write into `.grad`. So none of them
can change a weight, and nothing is computed that is not monitored. The noise scale alone is
measured by the reducer.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from largebatch.distributed.backend import Backend
from largebatch.optim.kernels import batched, fused
from largebatch.optim.lars import LARS
from largebatch.recipe.arithmetic.plan import Plan
from largebatch.recipe.recipe import Recipe
from largebatch.tracking.events import SYSTEM
from largebatch.tracking.system import Sampler
from largebatch.training.loop import Update
from largebatch.training.state import TrainState

SAMPLES = 200
"""How often in a run it is measured what the workers use, if it has so many updates."""


class Monitors:
    """Measures what the recipe monitors, on every worker alike."""

    def __init__(self, recipe: Recipe, plan: Plan, backend: Backend, state: TrainState) -> None:
        self._plan, self._state, self._backend = plan, state, backend
        self._norm = "gradient_norm" in recipe.monitor
        self._ratios = "trust_ratios" in recipe.monitor
        self._sampler = Sampler(backend.device) if "system" in recipe.monitor else None

    @property
    def layers(self) -> tuple[str, ...]:
        """The names of the parameters whose trust ratios are measured; none if none are."""
        return tuple(self._adapted())

    @property
    def measure_norm(self) -> Callable[[], Tensor] | None:
        """What train() measures the gradients by; None where their norm is not monitored."""
        parameters = self._state.model.parameters
        return (lambda: gradient_norm(parameters())) if self._norm else None

    def measure(self, update: Update) -> Tensor:
        """Return what the update that was just made left, as `fields` takes it; on the device."""
        device = self._backend.device
        parts = [torch.empty(0, device=device)]
        if self._norm:
            assert update.gradient_norm is not None
            parts.append(update.gradient_norm.unsqueeze(0) / update.scaled_by)
        adapted = self._adapted().values()
        if adapted:
            found: dict[Tensor, Tensor] = self._state.updater.optimizer.trust_ratios()  # type: ignore[attr-defined]  # LARS's
            absent = torch.full((), torch.nan, device=device)  # torch.tensor would wait for a GPU
            parts.append(torch.stack([found.get(weight, absent) for weight in adapted]))
        return torch.cat(parts)

    def fields(self, values: list[float], *, skipped: bool) -> dict[str, Any]:
        """Return the fields of a step's record for what `measure` returned.

        An update that was skipped used no ratio.
        """
        used = () if skipped else values[self._norm :]
        ratios = tuple(float(f"{ratio:.5g}") for ratio in used)
        norm = {"gradient_norm": values[0]} if self._norm else {}
        return {**norm, "trust_ratios": ratios} if ratios else norm

    def sample(self, step: int) -> list[float]:
        """Return a row of SYSTEM for each worker, zeros but for this one's; empty in most updates.

        The sum over the workers then has every row.
        """
        updates = self._plan.updates
        due = step % max(1, updates // SAMPLES) == 0 or step == updates - 1
        if self._sampler is None or not due:
            return []
        rows = [0.0] * (len(SYSTEM) * self._backend.world_size)
        first = len(SYSTEM) * self._backend.rank
        rows[first : first + len(SYSTEM)] = self._sampler.read()
        return rows

    def _adapted(self) -> dict[str, nn.Parameter]:
        """Return the parameters that LARS adapts now, by name."""
        optimizer = self._state.updater.optimizer if self._ratios else None
        if not isinstance(optimizer, LARS):
            return {}
        adapted = {
            weight
            for group in optimizer.param_groups
            if group["adapt"]
            for weight in group["params"]
            if weight.numel()
        }
        named = self._state.model.named_parameters()
        return {name: weight for name, weight in named if weight in adapted}


@torch.no_grad()
def gradient_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Return the length of all gradients together: 0-d, on the device; as exact as LARS's own."""
    gradients = [weight.grad for weight in parameters if weight.grad is not None]
    if gradients[0].device.type != "cpu":
        length: Tensor = torch.linalg.vector_norm(batched.norms(gradients))
        return length
    dense = torch.ops.aten.is_non_overlapping_and_dense
    whole = (grad if dense(grad) else grad.contiguous() for grad in gradients)
    return torch.tensor(math.hypot(*map(fused.norm, whole)), dtype=torch.float64)
