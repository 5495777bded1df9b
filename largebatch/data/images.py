"""The images of a run: which there are, and which of them are trained on, evaluated and held out.

Worker 0 reads and checks the folder and sends the index to the others. Nothing is decoded here.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from largebatch.address import Place, place_of
from largebatch.data.index.folder import describe
from largebatch.data.index.index import (
    Index,
    check_classes,
    index_of,
    open_content,
    share_index,
)
from largebatch.data.order import Stream, divide
from largebatch.data.types import HostCache, IntArray
from largebatch.distributed.backend import Backend
from largebatch.errors import DataError
from largebatch.recipe.data import Data, Order
from largebatch.recipe.execution import DEFAULT_DECODER
from largebatch.recipe.recipe import Recipe
from largebatch.storage import ReadProgress, silent

if TYPE_CHECKING:
    from largebatch.data.datasets.own import Items

MATTERS = 0.1
"""Part of the pairs of neighbouring images that are of one class, above that of a random order:
from this on chunks are not random parts of the images."""

IMPOSSIBLE = 1e-9  # probability at which shuffled images are taken for sorted ones


@dataclass(frozen=True, slots=True, kw_only=True)
class Images:
    """The images of a recipe; `read_images` reads them."""

    train: Index
    val: Index
    """Images of the validation split, which is not used if the recipe holds images out for it."""

    evaluated: IntArray
    """Rows of `validation` that an evaluation measures."""

    held_out: IntArray
    """Training samples excluded from training and statistics; they decide which stages are kept."""

    validates_on_train: bool
    """True if an evaluation measures training images that are held out for it."""

    items: "Mapping[str, Items]" = field(default_factory=dict)
    """A user's data sets, by the digest of their index; empty for images of a folder."""

    @property
    def validation(self) -> Index:
        """The index of the images that an evaluation measures."""
        return self.train if self.validates_on_train else self.val

    @property
    def ignored(self) -> list[str]:
        """Descriptions of the files that are not used."""
        named = {"train": self.train, "val": self.validation}
        if self.validates_on_train:
            del named["val"]
        lines = [describe(index.ignored, where=name) for name, index in named.items()]
        return [line for line in lines if line]

    def check_order(self, order: Order | None) -> str | None:
        """Return a warning if chunks of this order have images of few classes; None if they do not.

        Chunks are to be random parts of the images: otherwise an update has few classes, too.
        Raises DataError if the images cannot be in a random order, as those sorted by class.
        """
        rows = self.train.trained
        labels = self.train.labels if rows is None else self.train.labels[rows]
        number = len(labels)
        if order is None or order.chunk == 1 or order.window_samples >= number:
            return None
        equal = float((labels[1:] == labels[:-1]).mean())
        counts = np.bincount(labels).astype(np.float64)
        at_random = float((counts * (counts - 1)).sum() / (number * (number - 1)))
        excess = equal - at_random
        # Six standard deviations of random images, and a difference that matters.
        if excess < max(MATTERS, 3 / math.sqrt(number)):
            return None
        found = (
            f"data.order: {100 * equal:.3g} % of neighbouring training images are of one class, at "
            f"random {100 * at_random:.3g} % would be"
        )
        remedy = "shuffle them with `largebatch data import webdataset`, or leave data.order out"
        # McDiarmid's inequality for a random order (On the method of bounded differences, 1989):
        # two images that change places change at most four of the pairs of neighbours, so an
        # excess of e of all pairs has at most the probability exp(-(e * pairs)^2 / (8 * images)).
        if excess > math.sqrt(8 * number * math.log(1 / IMPOSSIBLE)) / (number - 1):
            raise DataError(f"{found}: they are sorted by class; {remedy}")
        return f"{found}: updates have few classes, which costs accuracy; {remedy}"


def read_images(
    recipe: Recipe,
    backend: Backend,
    *,
    folder: Place | str | None,
    dataset: str | None = None,
    cache: HostCache | None = None,
    progress: ReadProgress = silent,
) -> Images:
    """Read which images a recipe has, on all workers.

    They come from `folder`, which may be an address such as "s3://bucket/imagenet", or from
    `dataset`, a function as in datasets/own.py. `cache` is where a host keeps what it reads from an
    address, and `progress` reports the indexing of a folder without an index. Raises DataError if
    the folder or the data set does not match the recipe.
    """
    data = recipe.data
    folder = None if folder is None else place_of(folder)
    recipe.refuse_folder(folder)
    items: dict[str, Items] = {}
    if dataset is not None:
        train, val, items = _read_own(recipe, dataset, folder, backend)
    else:
        # Where pixels are cached, training reads no files: all are compared with the index now.
        caches = recipe.execution.cache in {"memory", "device"}
        train, val = read_indexes(data, backend, folder, every_file=caches, progress=progress)
        train = replace(train, cache=cache)
        val = replace(val, cache=cache)
    trained, evaluated, held_out = divide_samples(recipe, len(train), len(val))
    return Images(
        train=replace(train, trained=trained),
        val=val,
        evaluated=evaluated,
        held_out=held_out,
        validates_on_train=data.held_out is not None,
        items=items,
    )


def divide_samples(
    recipe: Recipe, num_train: int, num_val: int
) -> tuple[IntArray | None, IntArray, IntArray]:
    """Return the training samples (None: all), the validation samples and the deciding ones.

    The validation samples are training samples if the recipe holds some out for validation; the
    deciding ones decide which stages of polishing are kept.
    """
    trained: IntArray | None = None
    evaluated = np.arange(num_val)
    section = recipe.data.held_out
    if section is not None:
        trained, evaluated = divide(
            num_train, held_out=section.samples, seed=section.seed, stream=Stream.VALIDATION
        )
    number = recipe.polish.held_out if recipe.polish else None
    if number is None:
        return trained, evaluated, np.empty(0, dtype=np.int64)
    rows = np.arange(num_train) if trained is None else trained
    remaining, deciding = divide(len(rows), held_out=number, seed=recipe.seed)
    return rows[remaining], evaluated, rows[deciding]


def read_indexes(
    data: Data, backend: Backend, folder: Place | None, *, every_file: bool, progress: ReadProgress
) -> tuple[Index, Index]:
    """Return the indexes of both splits; `every_file` compares all files with them."""
    if data.source == "synthetic":
        from largebatch.data.decoders import synthetic

        sizes = (data.train_samples, data.val_samples)
        train, val = (synthetic.synthetic_index(n, data.classes, data.image_size) for n in sizes)
        return train, val
    if backend.rank > 0:
        return share_index(None, None, backend), share_index(None, None, backend)
    root = _root_of(data, folder)
    contents = [
        open_content(root, split, every_file=every_file, progress=progress)
        for split in ("train", "val")
    ]
    _require_described(data, *(index_of(content, root) for content in contents))
    train, val = (share_index(root, content, backend) for content in contents)
    return train, val


def _root_of(data: Data, folder: Place | None) -> Place:
    """Return the folder of the images; raise DataError if it must be given and is not."""
    if data.source == "digits":
        from largebatch.data.datasets.digits import write_digits

        return write_digits()
    if folder is None:
        raise DataError(
            "this recipe reads a folder; pass --data DIR with train and val of <class>/* or *.tar"
        )
    return folder


def _read_own(
    recipe: Recipe, dataset: str, folder: Place | None, backend: Backend
) -> "tuple[Index, Index, dict[str, Items]]":
    from largebatch.data.datasets import own

    data = recipe.data
    execution = recipe.execution
    unused = {
        f"data.source: {data.source}": data.source != "folder",
        f"--data {folder}": folder is not None,
        f"execution.cache: {execution.cache}": execution.cache not in {None, "none"},
        f"execution.reads: {execution.reads}": execution.reads is not None,
        f"execution.decoder: {execution.decoder}": execution.decoder not in {None, DEFAULT_DECODER},
    }
    for setting, is_set in unused.items():
        if is_set:
            raise DataError(f"--dataset {dataset} opens the images: {setting} would not be used")
    train_items, val_items = own.open_own(dataset)
    train = own.index_items(train_items, classes=data.classes, backend=backend)
    val = own.index_items(val_items, classes=data.classes, backend=backend)
    _require_described(data, train, val)
    return train, val, {train.digest: train_items, val.digest: val_items}


def _require_described(data: Data, train: Index, val: Index) -> None:
    """Raise DataError unless the recipe describes these images."""
    check_classes(train.root, train.classes, val.classes)
    counts = {"classes": len(train.classes), "train_samples": len(train), "val_samples": len(val)}
    wrong = {key: number for key, number in counts.items() if number != getattr(data, key)}
    if wrong:
        expected = ", ".join(f"{key} {getattr(data, key)}" for key in wrong)
        change = " ".join(f"--set data.{key}={number}" for key, number in wrong.items())
        raise DataError(
            f"{train.root}: the recipe describes {expected}; if the images are right, add {change}"
        )
