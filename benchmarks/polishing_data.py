"""Images of the polishing study: a fixed part of each data set, in its own shards.

Two cores go through 3,000 images a second, so the study trains on a part of the training set,
drawn once with the same number of every class and the same for every seed. Rates are tuned on
images that lie outside of that part and outside of the test set, so no number that is reported
was chosen by the images that it is measured on.
"""

import os
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np

from largebatch.data.datasets import import_data
from largebatch.data.datasets.packing import DataSet, Sample, write_shards
from largebatch.data.decoders.reader import read
from largebatch.data.index.index import Index, load_or_read
from largebatch.data.types import IntArray

sys.path.append(str(Path(__file__).parent.parent / "tests" / "support"))
from mosaics import import_cifar10

SETS = ("fashion_mnist", "cifar10")
"""Folders of the data sets in LARGEBATCH_DATA."""

SUBSET_SEED = 20_000
"""Seed that draws the training images; no run has it."""

SHARD_BYTES = 256 * 10**6


def prepare(
    work: Path, name: str, *, train: int, val: int | None = None, test: int | None = None
) -> Path:
    """Return the folder with `train` training images of a data set; create it if needed.

    They are evaluated on the whole test set, on `test` images of it, or, if `val` is given, on
    `val` other training images, for tuning.
    """
    of = "" if val is None else f"-tuning-{val}"
    out = work / f"{name}-{train}{of if test is None else f'-test-{test}'}"
    if out.exists():
        return out
    whole = _import(work / "all" / name, name)
    first, last = load_or_read(whole, "train"), load_or_read(whole, "val")
    drawn = draw(first, [train, val or 0])
    chosen = {"train": (first, drawn[0]), "val": (first, drawn[1])}
    if val is None:
        chosen["val"] = last, draw(last, [test or len(last)])[0]
    data_set = DataSet(
        first.classes,
        {split: len(rows) for split, (_, rows) in chosen.items()},
        lambda split: _samples(*chosen[split]),
    )
    write_shards(data_set, out, shard_bytes=SHARD_BYTES, progress=lambda *_: None)
    return out


def draw(index: Index, sizes: list[int]) -> list[IntArray]:
    """Draw disjoint parts of an index, each with equally many images of every class.

    The first part does not depend on how many others there are, so tuning and study train on the
    same images.
    """
    classes = len(index.classes)
    wrong = [size for size in sizes if size % classes]
    if wrong:
        raise ValueError(f"{wrong[0]} images cannot be the same number of {classes} classes")
    random = np.random.default_rng(SUBSET_SEED)
    orders = [random.permutation(np.flatnonzero(index.labels == one)) for one in range(classes)]
    ends = np.cumsum([0, *sizes]) // classes
    if ends[-1] > min(map(len, orders)):
        raise ValueError(
            f"{sum(sizes)} images need {ends[-1]} of every class, and one has "
            f"{min(map(len, orders))}"
        )
    return [
        np.sort(np.concatenate([order[first:last] for order in orders]))
        for first, last in pairwise(ends)
    ]


def _import(out: Path, name: str) -> Path:
    source = Path(os.environ["LARGEBATCH_DATA"]) / name
    if not out.exists() and name == "cifar10":
        import_cifar10(source, out, shard_bytes=SHARD_BYTES)
    elif not out.exists():
        import_data("fashion-mnist", source, out, shard_bytes=SHARD_BYTES, progress=lambda *_: None)
    return out


def _samples(index: Index, rows: IntArray) -> Iterator[Sample]:
    for row in rows.tolist():
        location = index.locate(row)
        yield Sample(read(location), "png", int(index.labels[row]))
