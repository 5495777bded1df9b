"""How long a gradient takes where several workers share a core: that time is set, and slept.

Workers of a study may have fewer cores than there are hosts. So each computes the gradient of a few
samples only, and before backward sleeps until the time of its nominal mini-batch is over. The
gradient is real, and so is all that is sent; the time is that of a host with a core of its own.
"""

import time
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from largebatch.recipe.sections import NonNegative, Positive, Section
from largebatch.training.loss import Criterion
from largebatch.training.protocols.compute_times import ComputeTime, Constant, compute_times


class Compute(Section):
    """Seconds of a gradient: (`overhead` + `sample` x its samples) x what `factor` draws."""

    overhead: NonNegative = 0.0
    sample: Positive
    factor: ComputeTime = Constant(kind="constant", seconds=1.0)
    """A distribution around 1; recorded: times of single gradients over their mean."""

    def times(self, samples: float, *, seed: int, worker: int) -> Iterator[float]:
        """Yield the seconds of each gradient of a worker, the same for each layout and seed."""
        factor = self.overhead + self.sample * samples
        return compute_times(self.factor, seed=seed, learner=worker, factor=factor)


class PacedCriterion:
    """The criterion of a run; it sleeps until a gradient has taken as long as it is set to.

    The time of a gradient begins with its forward pass. Backward comes on top, and so, where a
    gradient is `late`, does what its few samples took longer than the time that was set.
    """

    def __init__(self, criterion: Criterion, model: nn.Module, seconds: Iterator[float]) -> None:
        self._criterion, self._seconds = criterion, seconds
        self._begun = 0.0
        self.gradients = 0
        self.late = 0
        """How many of them took longer than they were to."""

        model.register_forward_pre_hook(self._begin)

    def _begin(self, *_: object) -> None:
        self._begun = time.perf_counter()

    def __call__(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return the loss, a while later."""
        loss = self._criterion(outputs, labels)
        if torch.is_grad_enabled():
            left = self._begun + next(self._seconds) - time.perf_counter()
            self.gradients += 1
            self.late += left < 0
            time.sleep(max(0.0, left))
        return loss
