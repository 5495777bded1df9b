"""What a script passes to an audit, and the loss of its model on a batch."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from largebatch.models.inputs import class_numbers, images_of, labels_of, logits_of
from largebatch.models.wrappers import device_of, input_of

Step = Callable[[Any], object]
"""What a script does with a batch."""

Forward = Callable[[Any, Any], Any]
"""Function that runs a model on a batch, and returns scores, or scores and labels."""

MOST_CALLS = 64
"""Largest number of calls of the step per update; a step that needs more is taken to make none."""


class NoLossError(Exception):
    """The loss of a script's step cannot be computed again, so there is nothing to compare with."""

    def __init__(self, text: str, remedy: str) -> None:
        super().__init__(text)
        self.remedy = remedy


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
    save: Callable[[], Any] | None
    load: Callable[[Any], object] | None
    read: int | None = None
    """Number of batches of the epoch that the script's own loop has read before the audit, which
    gives it more than the epoch has; None for a step that the script passes."""

    ahead: Sequence[object] = ()
    """Batches that the script's own loop has read before the audit and not used."""

    no_loss: NoLossError | None = None
    """Why `loss_fn` is not the loss of the step; None if it is."""

    compiled: Sequence[object] = ()
    """Functions that the script has compiled, where the audit runs its whole loop."""

    micros: list[Any] = field(default_factory=list)
    """The first two micro-batches of the step, which the check of its updates records for the
    checks after it."""

    def loss_on(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:  # noqa: ANN401
        """Return a model's loss on a batch, and the number of its labels."""
        if self.forward is None:
            _require_images(model, batch)
            images = images_of(batch).clone()  # the model may change them in place
            scores = logits_of(model(input_of(model)(images)))
            labels = labels_of(batch)
        else:
            scores, labels = self._pair(model, tree_map_only(Tensor, torch.clone, batch))
        loss, _, labels = self.loss_of(scores, labels.to(device_of(model)))
        return loss, len(labels)

    def scores_and_labels(self, batch: Any, output: Any) -> tuple[Any, Any]:  # noqa: ANN401
        """Return what the loss function takes: scores in the output for a batch or a part of it,
        and the labels of the whole batch.
        """
        if self.forward is None:
            _require_labels_last(batch)
            return logits_of(output), labels_of(batch)
        return self._pair(_Replay(self.inner, output), batch)

    def loss_of(self, scores: Any, labels: Any) -> tuple[Tensor, Any, Any]:  # noqa: ANN401
        """Return the loss, with scores and labels in the forms that `loss_fn` takes.

        Those are the model's output or the scores in it, and the labels as they are or as int64.
        """
        try:
            return self.loss_fn(scores, labels), scores, labels
        except Exception as error:  # a loss says in many ways that it does not take these
            inner = scores_in(scores)
            if inner is not scores:
                return self.loss_of(inner, labels)
            if isinstance(scores, Mapping):
                keys = ", ".join(map(str, scores)) or "(none)"
                raise ValueError(  # noqa: TRY004 -- the content is wrong, not its type
                    f"the model returns a dict with the keys {keys}, which loss_fn does not take: "
                    "pass a `forward` that returns the scores"
                ) from error
            if not isinstance(scores, Tensor) or not isinstance(labels, Tensor):
                raise
            try:
                numbers = class_numbers(labels, scores)
            except ValueError:  # not scores of classes
                raise error from None
        return self.loss_fn(scores, numbers), scores, numbers

    def _pair(self, model: Any, batch: Any) -> tuple[Any, Any]:  # noqa: ANN401
        assert self.forward is not None
        result = self.forward(model, batch)
        is_pair = isinstance(result, tuple) and len(result) == 2
        return result if is_pair else (result, labels_of(batch))


def scores_in(output: Any) -> Any:  # noqa: ANN401 -- of any model
    """Return the scores in a model's output, behind its loss in a tuple or as `logits` in a
    mapping, or the only tensor of a mapping; the output itself if it has none of these.
    """
    if isinstance(output, Mapping):
        # A scalar is the loss, which models of Transformers return too.
        tensors = [it for it in output.values() if isinstance(it, Tensor) and it.ndim]
        return output.get("logits", tensors[0] if len(tensors) == 1 else output)
    output = logits_of(output)
    if isinstance(output, tuple) and len(output) > 1:
        first, second = output[:2]
        is_loss = isinstance(first, Tensor) and not first.ndim
        return second if is_loss and isinstance(second, Tensor) else output
    return output


def _require_images(model: nn.Module, batch: Any) -> None:  # noqa: ANN401 -- as the loader has it
    """Raise ValueError, with what to do, for images that a model of floating weights refuses."""
    _require_labels_last(batch)
    images = images_of(batch)
    weight = next(model.parameters(), None)
    if images.dtype == torch.uint8 and weight is not None and weight.is_floating_point():
        raise ValueError(
            "images are uint8: convert them as your loop does, in `step`, `forward` or the data "
            "set (ToTensor)"
        )


def _require_labels_last(batch: Any) -> None:  # noqa: ANN401 -- as above
    """Raise ValueError, with what to do, for a batch whose first entry has class numbers."""
    if not isinstance(batch, (tuple, list)) or len(batch) < 2:
        return
    first, second = batch[:2]
    if not isinstance(first, Tensor) or not isinstance(second, Tensor):
        return
    if first.ndim == 1 and not first.is_floating_point() and second.ndim > 1:
        raise ValueError(
            "a batch has labels first, then images: pass a `forward` that returns scores and labels"
        )


class _Replay:
    """A model whose forward pass was made before."""

    def __init__(self, model: nn.Module, output: object) -> None:
        self._model = model
        self._output = output

    def __call__(self, *_: object, **__: object) -> object:
        return self._output

    def __getattr__(self, name: str) -> object:
        return getattr(self._model, name)
