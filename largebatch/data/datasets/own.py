"""A user's data set: map-style, like those for torch's DataLoader.

Every worker opens it by an importable function, `module:function`, which returns a training and a
validation data set. An item is a PIL image with 8 bits per channel or a uint8 tensor of 3 or 1 x H
x W, and its class number. Worker 0 reads every item once before the run, for its size and label, so
an item must not change. One thread at a time reads items: data sets are seldom thread-safe.
"""

import hashlib
import importlib
import operator
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from PIL import Image

from largebatch.data.decoders.crops import crop_and_resize
from largebatch.data.decoders.prefetch import FillTask, in_parts, open_prefetcher
from largebatch.data.decoders.torchvision import AT_A_TIME
from largebatch.data.index.headers import BadImageError, require_mode
from largebatch.data.index.index import Index, pack, unpack
from largebatch.data.types import Bytes, Decode, Floats, IntArray, Request, Resources, View
from largebatch.distributed.backend import Backend
from largebatch.distributed.connection import broadcast_bytes
from largebatch.errors import DataError
from largebatch.optional import require_torchvision


@dataclass(frozen=True, slots=True)
class Items:
    """One split of a user's data set."""

    name: str  # name of the split and its function, for messages
    dataset: Any  # map-style
    lock: threading.Lock = field(default_factory=threading.Lock)

    def read(self, number: int) -> tuple[Image.Image, int]:
        """Return an item as an RGB image and its label; raise DataError if it is not a pair."""
        # One thread at a time: most data sets were written for one thread of a worker process.
        with self.lock:
            item = self.dataset[number]
            if isinstance(item, tuple | list) and item and isinstance(item[0], Image.Image):
                item[0].load()  # now, because images may share an open file
        try:
            image, label = item
            return _to_pillow(image), _class_number(label)
        except (TypeError, ValueError, BadImageError) as error:
            raise DataError(
                f"{self.name}, item {number}: {error}; expected a PIL image with 8 bits per "
                "channel or a uint8 tensor of 3 or 1 x H x W, and an int. The recipe's data "
                "section replaces resizing, random crops, ToTensor and Normalize; remove them"
            ) from None


def import_own(module: str) -> ModuleType:
    """Import a user's module, also from the current folder, like `python -m`, or a file NAME.py."""
    require_torchvision()  # needed by timm and most data sets
    folder = str(Path.cwd())
    if module.endswith(".py"):
        folder = str(Path(module).parent.resolve())
        module = Path(module).stem
    if folder not in sys.path:
        sys.path.insert(0, folder)
    if not module or module.startswith("."):  # Python's message for these does not help
        raise DataError(f"expected the full name of a module, such as shapes, got {module!r}")
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        raise DataError(
            f"{module}: there is no such module in {folder} or on PYTHONPATH; start the "
            "command in its folder, or install it"
        ) from None


def own_function(name: str) -> Callable[[], Any]:
    """Return `module:function`; raise DataError if there is none."""
    module, _, function = name.partition(":")
    call = getattr(import_own(module), function, None) if function else None
    if not callable(call):
        raise DataError(
            f"{name}: there is no such function; expected MODULE:FUNCTION such as mine:build"
        )
    return call  # type: ignore[no-any-return]


def open_own(name: str) -> tuple[Items, Items]:
    """Call `module:function` and return its data sets, training first."""
    result = own_function(name)()
    needed = ("__len__", "__getitem__")
    is_pair = isinstance(result, tuple) and len(result) == 2
    if not is_pair or not all(hasattr(split, method) for split in result for method in needed):
        raise DataError(
            f"{name}: expected it to return two data sets with a length and items, (train, val)"
        )
    train, val = result
    return Items(f"train of {name}", train), Items(f"val of {name}", val)


def index_items(items: Items, *, classes: int, backend: Backend) -> Index:
    """Read every item on worker 0 and return the index on all workers.

    Raises DataError for a bad item.
    """
    content = None
    if backend.rank == 0:
        names = getattr(items.dataset, "classes", None)
        if not isinstance(names, (list, tuple)) or len(names) != classes:
            names = [f"class {number}" for number in range(classes)]
        content = pack({"classes": list(map(str, names))}, _measure(items, classes))
    header, arrays = unpack(broadcast_bytes(content, backend))
    digest = hashlib.sha256(items.name.partition(" ")[0].encode("ascii"))
    for name in sorted(arrays):
        digest.update(arrays[name].data)
    return Index(
        root=Path(items.name),
        classes=tuple(header["classes"]),
        paths=[items.name] * len(arrays["labels"]),
        labels=arrays["labels"],
        heights=arrays["heights"],
        widths=arrays["widths"],
        digest=digest.hexdigest(),
    )


def _measure(items: Items, classes: int) -> dict[str, IntArray]:
    rows = np.zeros((len(items.dataset), 3), dtype=np.int64)
    if not len(rows):
        raise DataError(f"{items.name}: the data set is empty")
    for number, row in enumerate(rows):
        image, label = items.read(number)
        if not 0 <= label < classes:
            raise DataError(
                f"{items.name}, item {number}: its label is {label}, expected 0 to {classes - 1} "
                "(data.classes of the recipe)"
            )
        row[:] = label, image.height, image.width
    return dict(zip(("labels", "heights", "widths"), rows.T.copy(), strict=True))


@contextmanager
def open_decoder(items: Items, index: Index, view: View, resources: Resources) -> Iterator[Decode]:
    """Yield a decoder whose threads end with the block."""
    require_torchvision()

    def divide(request: Request) -> tuple[IntArray, list[FillTask]]:
        rows = in_parts(len(request.samples), threads=resources.threads, most=AT_A_TIME)
        parts = [FillTask(part, partial(_fill, items, index, view, request, part)) for part in rows]
        return index.labels[request.samples], parts

    with open_prefetcher(view, resources) as fill_ahead:
        yield lambda requests: fill_ahead(requests, divide)


def _fill(
    items: Items, index: Index, view: View, request: Request, rows: slice, pixels: Bytes | Floats
) -> None:
    samples = request.samples[rows].tolist()
    boxes = request.boxes[rows].tolist()
    flips = request.flips[rows].tolist()
    images = zip(samples, boxes, flips, pixels, strict=True)
    for sample, box, flip, out in images:
        image, label = items.read(sample)
        read = image.height, image.width, label
        indexed = index.heights[sample], index.widths[sample], index.labels[sample]
        # A data set that augments by itself gives another image each time: the boxes would be of
        # another one.
        if indexed != read:
            raise DataError(
                f"{items.name}, item {sample}: its height, width and class are {read}, but were "
                f"{tuple(map(int, indexed))} when the run started; items must not change: random "
                "crops and flips belong into the recipe's data section"
            )
        out[:] = crop_and_resize(
            image,
            box,
            flip=flip,
            size=view.image_size,
            interpolation=view.interpolation,
        )


def _class_number(label: object) -> int:
    try:
        return operator.index(label)  # type: ignore[arg-type]  # raises TypeError
    except TypeError as error:
        raise TypeError(
            f"{error}; a label is the number of one class: to mix images, set data.mix in the "
            "recipe and return plain ones"
        ) from None


def _to_pillow(image: object) -> Image.Image:
    if isinstance(image, Image.Image):
        require_mode(image.mode)
        return image.convert("RGB")
    if not isinstance(image, torch.Tensor):
        raise TypeError(f"its image is a {type(image).__name__}")
    if image.dtype != torch.uint8 or image.ndim != 3 or image.shape[0] not in {1, 3}:
        shape = " x ".join(map(str, image.shape))
        raise TypeError(f"its image is a tensor of {image.dtype}, {shape}")
    return Image.fromarray(image.expand(3, -1, -1).permute(1, 2, 0).contiguous().numpy())
