"""Fashion-MNIST and CIFAR-10 as arrays, and parts of them as folders of PNG files.

    python -m benchmarks.studies.images OUT [--quality 85]

LARGEBATCH_DATA names the folder of both data sets. The command writes them to OUT for a machine
without them, in 57 MiB: CIFAR-10's mosaics as JPEG. LARGEBATCH_DATA is OUT there.
"""

import argparse
import gzip
import os
import shutil
import sys
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image

sys.path.append(str(Path(__file__).parents[2] / "tests" / "support"))
from real_subsets import cut

SUBSET_SEED = 20_000  # draws the training images; no run has it

Images = tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]
"""Pixels, N x H x W x 3, and labels."""


def load(name: str) -> tuple[Images, Images]:
    """Return the training and the test images of a data set."""
    folder = Path(os.environ["LARGEBATCH_DATA"]) / name
    if name == "cifar10":
        return _mosaics(folder, "train"), _mosaics(folder, "test")
    return _idx(folder, "train"), _idx(folder, "t10k")


def _mosaics(folder: Path, split: str) -> Images:
    mosaics = sorted(path for path in folder.glob(f"{split}-*") if path.suffix in {".webp", ".jpg"})
    pixels = np.concatenate([cut(path) for path in mosaics])
    return pixels, np.load(folder / f"{split}_labels.npy").astype(np.int64)


def _idx(folder: Path, split: str) -> Images:
    def read(name: str, skip: int) -> npt.NDArray[np.uint8]:
        content = gzip.decompress((folder / f"{split}-{name}-ubyte.gz").read_bytes())
        return np.frombuffer(content, np.uint8, offset=skip)

    pixels = read("images-idx3", 16).reshape(-1, 28, 28, 1).repeat(3, axis=3)
    return pixels, read("labels-idx1", 8).astype(np.int64)


def write_part(work: Path, name: str, *, train: int, val: int = 10_000) -> Path:
    """Return a folder with `train` training and `val` test images; create it if needed."""
    out = work / f"{name}-{train}" if val == 10_000 else work / f"{name}-{train}-{val}"
    if out.exists():
        return out
    part = work / f"{out.name}.part"
    shutil.rmtree(part, ignore_errors=True)  # of a call that was stopped
    whole, test = load(name)
    (rows,) = draw(whole[1], [train])
    splits = {"train": (whole[0][rows], whole[1][rows]), "val": (test[0][:val], test[1][:val])}
    for split, (pixels, labels) in splits.items():
        paths = [part / split / f"{it}/{number:05}.png" for number, it in enumerate(labels)]
        with get_context("fork").Pool() as pool:  # one process takes half a minute
            pool.starmap(_save, zip(pixels, paths, strict=True), chunksize=500)
    part.rename(out)
    return out


def _save(image: npt.NDArray[np.uint8], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(image).save(path)


def draw(labels: npt.NDArray[np.int64], sizes: list[int]) -> list[npt.NDArray[np.int64]]:
    """Draw disjoint parts of a data set, each with equally many images of every class.

    The first part does not depend on the number of others. Raises ValueError if a size is not a
    multiple of the number of classes, or if the images are too few.
    """
    classes = np.unique(labels)
    if wrong := [size for size in sizes if size % len(classes)]:
        raise ValueError(f"{wrong[0]} images cannot be the same number of {len(classes)} classes")
    random = np.random.default_rng(SUBSET_SEED)
    orders = [random.permutation(np.flatnonzero(labels == one)) for one in classes]
    ends = np.cumsum([0, *sizes]) // len(classes)
    if ends[-1] > min(map(len, orders)):
        raise ValueError(f"{ends[-1]} images of a class of {min(map(len, orders))}")
    return [
        np.sort(np.concatenate([order[first:last] for order in orders]))
        for first, last in pairwise(ends)
    ]


def main() -> None:
    """Write both data sets to a folder that is small enough to be sent."""
    parser = argparse.ArgumentParser(description="pack Fashion-MNIST and CIFAR-10")
    parser.add_argument("out", type=Path)
    parser.add_argument("--quality", type=int, default=85, help="of CIFAR-10's JPEG")
    args = parser.parse_args()
    source = Path(os.environ["LARGEBATCH_DATA"])
    (args.out / "cifar10").mkdir(parents=True)
    shutil.copytree(source / "fashion_mnist", args.out / "fashion_mnist")
    for path in sorted((source / "cifar10").iterdir()):
        if path.suffix == ".npy":
            shutil.copy(path, args.out / "cifar10")
        elif path.suffix == ".webp":
            target = args.out / "cifar10" / f"{path.stem}.jpg"
            Image.open(path).convert("RGB").save(target, quality=args.quality, subsampling=0)


if __name__ == "__main__":
    main()
