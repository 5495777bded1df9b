"""Images and labels of a loader's batch; scores of a model's output."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

AnyBatch = Tensor | Sequence[Tensor] | Mapping[str, Tensor] | Sequence[Mapping[str, Tensor]]
"""Images (N x C x ...); or a tuple or list of images, labels (N) and ignored entries; or a mapping
with one of the keys below, also as the only entry of a list (DALI's iterator for PyTorch). Tensors
are on any device."""

IMAGE_KEYS = ("image", "images", "pixel_values", "data", "img")
LABEL_KEYS = ("label", "labels")


def images_of(batch: AnyBatch) -> Tensor:
    """Return the images of a batch; raise ValueError with its content if there are none."""
    return _entry(batch, 0, keys=IMAGE_KEYS)


def labels_of(batch: AnyBatch) -> Tensor:
    """Return the labels of a batch; raise ValueError with its content if there are none."""
    return _entry(batch, 1, keys=LABEL_KEYS)


def logits_of(output: Any) -> Tensor:  # noqa: ANN401 -- of any model
    """Return a model's output, or its attribute `logits` as in Hugging Face's models."""
    logits: Tensor = getattr(output, "logits", output)
    return logits


def scores_of(output: object) -> Tensor:
    """Return the scores in a model's output: a tensor, alone in a tuple or list, or `logits`.

    Raises ValueError for other outputs: which of several tensors has the scores is not known.
    """
    scores = logits_of(output)
    if isinstance(output, Mapping) and "logits" in output:
        scores = output["logits"]
    elif isinstance(output, (tuple, list)) and len(output) == 1:
        (scores,) = output
    if not isinstance(scores, Tensor):
        raise ValueError(  # noqa: TRY004 -- the content is wrong, not its type
            f"the model returns {_described(output)}, expected scores or `logits`; pass a `forward`"
        )
    return scores


def class_numbers(labels: Tensor, scores: Tensor) -> Tensor:
    """Return labels (N, N x 1 or N x T of any integer type) as int64, N or N x T like the scores.

    Raises ValueError unless they are integers, one for each row of scores for at least 2 classes.
    Whether the numbers are those of classes is not checked: that would wait for the device.
    """
    if labels.shape == (*scores.shape[:-1], 1):
        labels = labels.squeeze(-1)
    if labels.is_floating_point() or labels.is_complex():
        kind = str(labels.dtype).removeprefix("torch.")
        hint = f"expected integers, got {kind}: of one-hot labels pass labels.argmax(1)"
    elif labels.shape != scores.shape[:-1]:
        hint = "expected one class number for each sample"
    elif scores.shape[-1] < 2:
        hint = "expected one score for each class, of 2 or more"
    else:
        return labels.long()
    raise ValueError(f"labels are {sizes(labels)} for scores of {sizes(scores)}; {hint}")


def sizes(values: Tensor) -> str:
    """Return the shape of a tensor for messages."""
    return " x ".join(map(str, values.shape)) or "a number"


def _entry(batch: AnyBatch, position: int, *, keys: Sequence[str]) -> Tensor:
    entry: object = None
    # DALI's iterator returns a list with a mapping for each of its pipelines.
    if isinstance(batch, Sequence) and len(batch) == 1 and isinstance(batch[0], Mapping):
        (batch,) = batch
    if isinstance(batch, Mapping):
        entry = next((batch[key] for key in keys if key in batch), None)
    elif isinstance(batch, Tensor):
        # A tensor alone is the images: it is also a sequence, of single ones.
        entry = batch if position == 0 else None
    elif isinstance(batch, Sequence) and len(batch) > position:
        entry = batch[position]
    if not isinstance(entry, Tensor):
        raise ValueError(  # noqa: TRY004 -- the content of the batch is wrong, not its type
            f"a batch is {_described(batch)}; expected "
            f"{'(images, labels)' if position else 'images, (images, labels)'} or a mapping with a "
            f"tensor under {' or '.join(keys)}; pass a `forward` for others"
        )
    return entry


def _described(batch: object) -> str:
    if isinstance(batch, Mapping):
        return f"a mapping with the keys {', '.join(map(str, batch)) or '(none)'}"
    kind = type(batch).__name__
    if isinstance(batch, Sequence) and not isinstance(batch, str | bytes):
        return f"a {kind} of ({', '.join(type(entry).__name__ for entry in batch)})"
    return f"a {kind}"
