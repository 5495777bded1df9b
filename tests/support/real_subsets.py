"""A few real images of every class, written as class folders: enough to start a recipe."""

import gzip
import zipfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image

Pixels = npt.NDArray[np.uint8]

CLASSES = 10
TRAIN, VAL = 24, 6
"""Images of each class."""

SAMPLES = (f"data.train_samples={CLASSES * TRAIN}", f"data.val_samples={CLASSES * VAL}")
"""What to override in a recipe."""


def write_subset(source: Path, folder: Path) -> Path:
    """Write TRAIN and VAL images of each class of a data set in LARGEBATCH_DATA; return where."""
    write = {"cifar10": _cifar10, "fashion_mnist": _fashion_mnist, "imagenette224": _imagenette}
    for split in ("train", "val"):
        write[source.name](source, folder / split, split)
    return folder


def cut(path: Path) -> Pixels:
    """Return the 5,000 images of 32 x 32 in a mosaic of 50 columns, as LARGEBATCH_DATA has them."""
    with Image.open(path) as image:
        mosaic = np.asarray(image.convert("RGB"))
    return mosaic.reshape(100, 32, 50, 32, 3).swapaxes(1, 2).reshape(-1, 32, 32, 3)


def _cifar10(source: Path, folder: Path, split: str) -> None:
    part = {"train": "train", "val": "test"}[split]
    images = cut(min(source.glob(f"{part}-*.webp")))
    labels = np.load(source / f"{part}_labels.npy")[: len(images)]
    names = (source / "classes.txt").read_text().split()
    _write(folder, images, labels, names, number=TRAIN if split == "train" else VAL)


def _fashion_mnist(source: Path, folder: Path, split: str) -> None:
    part = {"train": "train", "val": "t10k"}[split]
    pixels = gzip.decompress((source / f"{part}-images-idx3-ubyte.gz").read_bytes())
    labels = gzip.decompress((source / f"{part}-labels-idx1-ubyte.gz").read_bytes())
    images = np.frombuffer(pixels, dtype=np.uint8, offset=16).reshape(-1, 28, 28)
    names = list(map(str, range(CLASSES)))
    known = np.frombuffer(labels, dtype=np.uint8, offset=8)
    _write(folder, images, known, names, number=TRAIN if split == "train" else VAL)


def _imagenette(source: Path, folder: Path, split: str) -> None:
    names = [line.split("\t") for line in (source / "classes.tsv").read_text().splitlines()]
    with zipfile.ZipFile(source / f"{split}.zip") as archive:
        files = sorted(name for name in archive.namelist() if name.endswith(".JPEG"))
        for _, synset, name in names:
            (folder / name).mkdir(parents=True)
            chosen = [file for file in files if synset in file.split("/")]
            for file in chosen[: TRAIN if split == "train" else VAL]:
                (folder / name / Path(file).name).write_bytes(archive.read(file))


def _write(
    folder: Path,
    images: Iterable[Pixels],
    labels: npt.NDArray[np.integer],
    names: list[str],
    *,
    number: int,
) -> None:
    counts = dict.fromkeys(range(len(names)), 0)
    for place, (pixels, label) in enumerate(zip(images, labels.tolist(), strict=False)):
        if counts[label] == number:
            continue
        counts[label] += 1
        path = folder / names[label] / f"{place:05d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path)
    assert set(counts.values()) == {number}, counts
