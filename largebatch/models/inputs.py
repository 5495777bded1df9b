"""Batches as loaders give them: tensors, tuples, mappings; on whatever device."""

from collections.abc import Mapping, Sequence

from torch import Tensor

AnyBatch = Tensor | Sequence[Tensor] | Mapping[str, Tensor]
"""Images (N x C x ...); or a tuple or list of images, labels (N) and more that is not looked at; or
a mapping with one of the keys below."""

IMAGE_KEYS = ("image", "images", "pixel_values")
LABEL_KEYS = ("label", "labels")


def images_of(batch: AnyBatch) -> Tensor:
    """Return the images of a batch; raise ValueError saying what it holds instead."""
    return _entry(batch, 0, keys=IMAGE_KEYS)


def labels_of(batch: AnyBatch) -> Tensor:
    """Return the labels of a batch; raise ValueError saying what it holds instead."""
    return _entry(batch, 1, keys=LABEL_KEYS)


def _entry(batch: AnyBatch, place: int, *, keys: Sequence[str]) -> Tensor:
    if isinstance(batch, Mapping):
        found = next((batch[key] for key in keys if key in batch), None)
    elif isinstance(batch, Tensor):
        found = [batch, None][place]
    else:
        found = batch[place] if isinstance(batch, Sequence) and len(batch) > place else None
    if not isinstance(found, Tensor):
        raise ValueError(  # noqa: TRY004 -- whatever a batch is, its content is wrong
            f"a batch is {_described(batch)}; expected "
            f"{'(images, labels)' if place else 'images, (images, labels)'} or a mapping with a "
            f"tensor under {' or '.join(keys)}"
        )
    return found


def _described(batch: object) -> str:
    if isinstance(batch, Mapping):
        return f"a mapping with the keys {', '.join(map(str, batch)) or '(none)'}"
    kind = type(batch).__name__
    if isinstance(batch, Sequence) and not isinstance(batch, str | bytes):
        return f"a {kind} of ({', '.join(type(entry).__name__ for entry in batch)})"
    return f"a {kind}"
