"""What a script passes to an audit."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from largebatch.audit.findings import Finding
from largebatch.audit.ranks import Ranks
from largebatch.audit.reference import loss_and_labels
from largebatch.models.inputs import images_of, labels_of, logits_of
from largebatch.models.wrappers import device_of, input_of

Step = Callable[[Any], object]
"""What a script does with a batch."""

Forward = Callable[[Any, Any], Any]
"""Function that runs a model on a batch, and returns scores, or scores and labels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The arguments of `audit`, with an optimizer and a step where they were left out."""

    model: nn.Module
    inner: nn.Module
    """The model without wrappers that communicate."""

    loader: Any
    loss_fn: Callable[[Any, Any], Tensor]
    optimizer: Optimizer
    step: Step
    steps: int
    set_epoch: Callable[[int], object] | None
    base: tuple[int, float] | None
    rate: Callable[[int], float] | None
    epochs: float | None
    val_loader: Any
    evaluate: Callable[[], float] | None
    averaged: nn.Module | None
    forward: Forward | None

    def scores_and_labels(self, model: nn.Module, batch: Any) -> tuple[Any, Tensor]:  # noqa: ANN401
        """Run a model on a batch; return what the loss function takes, on the model's device."""
        if self.forward is None:
            images, labels = images_of(batch).clone(), labels_of(batch)  # it may change in place
            return logits_of(model(input_of(model)(images))), labels.to(device_of(model))
        output = self.forward(model, tree_map_only(Tensor, torch.clone, batch))
        scores, labels = _pair(output) or (output, labels_of(batch))
        return scores, labels.to(device_of(model))

    def loss_on(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:  # noqa: ANN401
        """Return a model's loss on a batch, and the number of its labels."""
        scores, labels = self.scores_and_labels(model, batch)
        return loss_and_labels(self.loss_fn, scores, labels)[0], len(labels)

    def scores_in(self, batch: Any, output: Any) -> Any:  # noqa: ANN401
        """Return what the loss function takes from the model's output for a batch or a part."""
        if self.forward is None:
            return logits_of(output)
        found = self.forward(_Replay(self.inner, output), batch)
        return (_pair(found) or (found,))[0]


def _pair(output: Any) -> tuple[Any, Tensor] | None:  # noqa: ANN401 -- what `forward` returned
    """Return scores and labels, if it is these."""
    return output if isinstance(output, tuple) and len(output) == 2 else None


class _Replay:
    """A model whose forward pass was made before."""

    def __init__(self, model: nn.Module, output: object) -> None:
        self._model, self._output = model, output

    def __call__(self, *_: object, **__: object) -> object:
        return self._output

    def __getattr__(self, name: str) -> object:
        return getattr(self._model, name)


Checker = Callable[[Subject, Ranks], list[Finding]]
"""A check, which every worker calls and whose changes are undone after it."""
