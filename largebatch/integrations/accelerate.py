"""The audit of a loop with Accelerate; `largebatch.integrations.polished` is for its averages."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from largebatch.audit import Findings, audit
from largebatch.models.inputs import images_of, labels_of


def audit_loop(
    accelerator: Any,
    model: nn.Module,
    loader: Any,
    loss_fn: Callable[[Any, Any], Tensor],
    optimizer: Any,
    *,
    max_norm: float | None = None,
) -> Findings:
    """Audit the loop of Accelerate's documents, with its accumulation, and undo the updates.

    The objects have been prepared by the accelerator; `max_norm` clips gradients. Pass a step that
    differs to `largebatch.audit`.

    >>> findings = audit_loop(accelerator, model, loader, loss_fn, optimizer)  # doctest: +SKIP
    """

    def step(batch: Any) -> None:
        # These lines are those of Accelerate's documents: outside the last micro-batch the
        # optimizer's step does nothing, so the audit sees what users run.
        with accelerator.accumulate(model):
            accelerator.backward(loss_fn(model(images_of(batch)), labels_of(batch)))
            if max_norm is not None and accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
            optimizer.zero_grad()

    return audit(model, loader, loss_fn, optimizer, step, set_epoch=loader.set_epoch)
