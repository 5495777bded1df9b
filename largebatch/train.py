"""The training loop. If you read one file of this package, read this one.

A step is: set the rate, accumulate one global batch of gradients, reduce, update. The loop knows
nothing of YAML, of LARS, or of how many workers there are; `run` puts those together. It is a
generator: whoever drives it logs, evaluates and saves between two updates, or stops.
"""

from collections.abc import Callable, Generator, Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from largebatch.backends.reducer import Reducer
from largebatch.contracts import Batch
from largebatch.norm import Spans
from largebatch.schedules import Schedule

Criterion = Callable[[Tensor, Tensor], Tensor]
"""(logits N x K, labels N) -> the sum of the loss over the samples, 0-d."""


class Update(NamedTuple):
    """One optimizer update that was just made."""

    step: int
    lr: float
    loss: Tensor
    """This worker's part of the global batch's mean loss, on the device; the parts add up."""


def train(  # noqa: PLR0913 -- these are the nouns of training; a config object would only hide them
    model: nn.Module,
    optimizer: Optimizer,
    batches: Iterator[Batch],
    schedule: Schedule,
    criterion: Criterion,
    reducer: Reducer,
    spans: Spans,
    *,
    steps: range,
    accumulation: int,
    global_batch: int,
    seed: Callable[[int], int],
) -> Generator[Update, None, None]:
    """Make one optimizer update for each of `steps`, in order, and yield after each.

    `seed` gives every step its own seed for dropout and the like, so that a resumed run needs no
    generator state.
    """
    for step in steps:
        model.train()
        torch.manual_seed(seed(step))
        lr = schedule(step)
        for group in optimizer.param_groups:
            group["lr"] = lr
        reducer.zero()
        loss = torch.zeros((), device=reducer.device)
        for micro in range(accumulation):
            images, labels = next(batches)
            part = criterion(model(images), labels) / global_batch
            if micro == accumulation - 1:
                spans.reduce()
                reducer.arm()
            part.backward()
            loss += part.detach()
        reducer.wait()
        optimizer.step()
        spans.update()
        yield Update(step, lr, loss)


def step_seeds(seed: int, rank: int) -> Callable[[int], int]:
    """Return the seed of each step on one worker: counter-based, different on every worker."""
    return lambda step: int(np.random.SeedSequence((seed, rank, step)).generate_state(1)[0])
