"""Simulated gradient times, for workers that share a core.

Workers of a study may have fewer cores than there are hosts. So each computes the gradient of a
few samples only, and sleeps before backward until the time of its nominal mini-batch is over.
The gradient and all messages are real; the time is that of a host with its own core.
"""

import time
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from largebatch.lab.protocols.compute_times import ComputeTime, Constant, compute_times
from largebatch.recipe.section import NonNegative, Positive, Section
from largebatch.training.loss import Criterion


class Compute(Section):
    """Seconds of a gradient: (`overhead` + `sample` x its samples) x a draw of `factor`."""

    overhead: NonNegative = 0.0
    sample: Positive
    factor: ComputeTime = Constant(kind="constant", seconds=1.0)
    """Distribution around 1; recorded: times of single gradients over their mean."""

    def usual(self, samples: float) -> float:
        """Return the seconds of a gradient whose draw of `factor` is 1."""
        return self.overhead + self.sample * samples

    def mean(self, samples: float) -> float:
        """Return the mean seconds of a gradient."""
        return self.usual(samples) * self.factor.expectation

    def times(self, samples: float, *, seed: int, worker: int) -> Iterator[float]:
        """Yield the seconds of each gradient of a worker, the same for each layout and seed."""
        usual = self.usual(samples)
        return compute_times(self.factor, seed=seed, learner=worker, factor=usual)


class PacedCriterion:
    """A criterion that sleeps until a gradient has taken its set time.

    The time starts with the forward pass. Backward comes on top; for a `late` gradient so does
    the excess of its few samples over the set time.
    """

    def __init__(self, criterion: Criterion, model: nn.Module, seconds: Iterator[float]) -> None:
        self._criterion, self._seconds = criterion, seconds
        self._begun = 0.0
        self.gradients = 0
        self.late = 0
        """Number of gradients that took longer than their set time."""

        model.register_forward_pre_hook(self._begin)

    def _begin(self, *_: object) -> None:
        self._begun = time.perf_counter()

    def __call__(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return the loss, after the set time."""
        loss = self._criterion(outputs, labels)
        if torch.is_grad_enabled():
            left = self._begun + next(self._seconds) - time.perf_counter()
            self.gradients += 1
            self.late += left < 0
            time.sleep(max(0.0, left))
        return loss
