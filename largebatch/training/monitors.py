"""The fields that `monitor` adds to the records: norm, trust ratios, noise scale, resources.

The norm is measured between the sum of the gradients and the optimizer, because some optimizers
overwrite `.grad`.
"""

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from largebatch.distributed.backend import Backend
from largebatch.optim.lars import LARS
from largebatch.recipe.arithmetic.plan import Plan
from largebatch.recipe.choices import Monitor
from largebatch.tracking.environment import Sampler
from largebatch.tracking.events import SYSTEM, Step, System
from largebatch.tracking.noise_scale import RunningNoise
from largebatch.training.loop import Update
from largebatch.training.state import TrainState

SAMPLES = 200
"""Number of measurements of the workers' resources in a run; at most one in each update."""


class Monitors:
    """Measures the fields that the recipe monitors, on every worker."""

    def __init__(
        self, monitored: Collection[Monitor], plan: Plan, backend: Backend, state: TrainState
    ) -> None:
        self._plan, self._state, self._backend = plan, state, backend
        self._norm, self._ratios = "gradient_norm" in monitored, "trust_ratios" in monitored
        self._sampler = Sampler(backend.device) if "system" in monitored else None
        self._noise = RunningNoise(plan)

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the parameters whose trust ratios are measured."""
        return tuple(self._adapted())

    @property
    def measure_norm(self) -> Callable[[], Tensor] | None:
        """Function that measures the gradients in train(); None if their norm is not monitored."""
        parameters = self._state.model.parameters
        return (lambda: gradient_norm(parameters())) if self._norm else None

    def measure(self, update: Update) -> Tensor:
        """Return the values of the last update for `fields`, on the device."""
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
        """Return the fields of a step's record for the values of `measure`.

        A skipped update has no trust ratios.
        """
        used = () if skipped else values[self._norm :]
        ratios = tuple(float(f"{ratio:.5g}") for ratio in used)
        norm = {"gradient_norm": values[0]} if self._norm else {}
        return {**norm, "trust_ratios": ratios} if ratios else norm

    def sample(self, step: int) -> list[float]:
        """Return a row of SYSTEM for each worker; empty in most updates.

        Only this worker's row is not zero, so the sum over the workers has every row.
        """
        updates = self._plan.updates
        due = step % max(1, updates // SAMPLES) == 0 or step == updates - 1
        if self._sampler is None or not due:
            return []
        rows = [0.0] * (len(SYSTEM) * self._backend.world_size)
        first = len(SYSTEM) * self._backend.rank
        rows[first : first + len(SYSTEM)] = self._sampler.read()
        return rows

    def noise(self, step: int, squares: Sequence[float], *, loss_scale: float) -> dict[str, Any]:
        """Return the noise scale's fields of a step's record; none without the reducer's squares.

        `squares` are summed over the workers.
        """
        return self._noise.add(step, *squares, loss_scale=loss_scale) if squares else {}

    def system(self, step: Step, rows: Sequence[float]) -> System | None:
        """Return the record of the rows of `sample`, summed over the workers; None without any."""
        if not rows:
            return None
        columns = {name: tuple(rows[place :: len(SYSTEM)]) for place, name in enumerate(SYSTEM)}
        return System(stage=step.stage, step=step.step, **columns)  # type: ignore[arg-type]  # all columns

    def _adapted(self) -> dict[str, nn.Parameter]:
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
    """Return the norm of all gradients together: 0-d, on the device; as exact as in LARS."""
    gradients = [weight.grad for weight in parameters if weight.grad is not None]
    if gradients[0].device.type != "cpu":
        from largebatch.optim.kernels import batched

        length: Tensor = torch.linalg.vector_norm(batched.norms(gradients))
        return length
    from largebatch.optim.kernels import fused

    dense = torch.ops.aten.is_non_overlapping_and_dense
    whole = (grad if dense(grad) else grad.contiguous() for grad in gradients)
    return torch.tensor(math.hypot(*map(fused.norm, whole)), dtype=torch.float64)
