"""Images and labels of a loader's batch: a tensor, tuple or mapping, on any device; logits."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

AnyBatch = Tensor | Sequence[Tensor] | Mapping[str, Tensor]
"""Images (N x C x ...); or a tuple or list of images, labels (N) and ignored entries; or a mapping
with one of the keys below."""

IMAGE_KEYS = ("image", "images", "pixel_values")
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


def _entry(batch: AnyBatch, place: int, *, keys: Sequence[str]) -> Tensor:
    if isinstance(batch, Mapping):
        entry = next((batch[key] for key in keys if key in batch), None)
    elif isinstance(batch, Tensor):
        entry = [batch, None][place]
    else:
        entry = batch[place] if isinstance(batch, Sequence) and len(batch) > place else None
    if not isinstance(entry, Tensor):
        raise ValueError(  # noqa: TRY004 -- the content of the batch is wrong, not its type
            f"a batch is {_described(batch)}; expected "
            f"{'(images, labels)' if place else 'images, (images, labels)'} or a mapping with a "
            f"tensor under {' or '.join(keys)}"
        )
    return entry


def _described(batch: object) -> str:
    if isinstance(batch, Mapping):
        return f"a mapping with the keys {', '.join(map(str, batch)) or '(none)'}"
    kind = type(batch).__name__
    if isinstance(batch, Sequence) and not isinstance(batch, str | bytes):
        return f"a {kind} of ({', '.join(type(entry).__name__ for entry in batch)})"
    return f"a {kind}"
