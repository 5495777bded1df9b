"""The work of a learner between a pull and a push: a gradient."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from largebatch import accelerator
from largebatch.data.types import Batch
from largebatch.distributed.backend import Backend
from largebatch.distributed.reducer import Reducer
from largebatch.models.batchnorm import Spans
from largebatch.training.loop import Criterion, step_seeds


@dataclass(frozen=True, kw_only=True)
class Gradients:
    """Gradients of a model by the number of their mini-batch.

    `reducer` and `spans` belong to this worker alone: nothing is summed, and each learner
    normalises its own mini-batch and has its own running statistics.
    """

    model: nn.Module
    weights: Sequence[nn.Parameter]
    batch: Callable[[int], Batch]
    criterion: Criterion
    reducer: Reducer
    spans: Spans
    learners: int
    seed: int
    """Seed of dropout and the like, which depend only on it and the number of the mini-batch."""

    def of(self, mini_batch: int) -> tuple[list[Tensor], float]:
        """Return the mean gradient over a mini-batch at the current weights, and its loss."""
        self.model.train()
        update, learner = divmod(mini_batch, self.learners)
        accelerator.seed(step_seeds(self.seed, learner)(update), self.reducer.device)
        images, labels = self.batch(mini_batch)
        self.reducer.zero()
        loss = self.criterion(self.model(images), labels) / len(labels)
        self.spans.reduce()
        self.reducer.arm()
        loss.backward()
        self.reducer.wait()
        self.spans.update()
        found = []
        for weight in self.weights:
            assert weight.grad is not None  # else the reducer has raised
            found.append(weight.grad)
        return found, loss.item()  # sync: the gradient is about to leave the device


def average_statistics(model: nn.Module, backend: Backend, *, learners: int) -> None:
    """Set the running statistics of every worker to their mean over the learners.

    The learners are the first workers. Running means move linearly, so after hardsync the result
    equals that of synchronous training, which moves towards the mean over the spans of all workers.
    """
    buffers = list(model.buffers())
    if not buffers:
        return
    counts = backend.rank < learners
    flat = torch.cat([buffer.flatten().double() for buffer in buffers]) * counts / learners
    flat = flat.to(backend.device)
    backend.all_reduce(flat).wait()
    parts = flat.split([buffer.numel() for buffer in buffers])
    for buffer, mean in zip(buffers, parts, strict=True):
        exact = mean if buffer.is_floating_point() else mean.round()
        buffer.copy_(exact.view_as(buffer))
