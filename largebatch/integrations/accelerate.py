"""Helpers for loops with Accelerate; the objects that are passed have been prepared by it."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from largebatch.audit import Findings, audit
from largebatch.integrations import exchange
from largebatch.models.inputs import images_of, labels_of
from largebatch.polish import polish


@contextmanager
def polished(
    accelerator: Any,  # noqa: ANN401 -- an Accelerator
    model: nn.Module,
    averaged: AveragedModel,
    batches: Iterable[Any],
) -> Iterator[None]:
    """Hold the polished average in the model in this block, to evaluate or save it.

    `averaged` averages the unwrapped model. `batches` are clean training images, of which every
    worker may pass all or its own share.
    """
    inner = accelerator.unwrap_model(model)
    exchange(inner, averaged)
    try:
        polish(inner, batches)
        yield
    finally:
        exchange(inner, averaged)


def audit_loop(
    accelerator: Any,  # noqa: ANN401 -- an Accelerator
    model: nn.Module,
    loader: Any,  # noqa: ANN401 -- any loader
    loss_fn: Callable[[Any, Any], Tensor],
    optimizer: Any,  # noqa: ANN401 -- an AcceleratedOptimizer
    *,
    max_norm: float | None = None,
) -> Findings:
    """Audit the loop of Accelerate's documents, with its accumulation, and undo the updates.

    `max_norm` clips gradients. Pass a step that differs to `largebatch.audit`.
    """

    def step(batch: Any) -> None:  # noqa: ANN401 -- as the loader has it
        with accelerator.accumulate(model):
            accelerator.backward(loss_fn(model(images_of(batch)), labels_of(batch)))
            if max_norm is not None and accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
            optimizer.zero_grad()

    return audit(model, loader, loss_fn, optimizer, step, set_epoch=loader.set_epoch)
