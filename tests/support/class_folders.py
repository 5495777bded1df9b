"""Small folders of images, what an index says of one as plain values, and what was imported."""

import io
from pathlib import Path

import numpy as np
from PIL import Image

from largebatch.data.datasets import import_data
from largebatch.data.index.index import Index, read_folder
from largebatch.storage import silent


def write_image(path: Path, *, height: int = 4, width: int = 6, mode: str = "RGB") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, (width, height)).save(path)


def write_folder(root: Path, split: str = "train") -> Path:
    """Write four images of three classes."""
    write_image(root / split / "dog/b.png", height=5, width=7)
    write_image(root / split / "dog/a.JPEG", height=9, width=3)
    write_image(root / split / "cat/x.jpg")
    write_image(root / split / "Zebra/z.jpg")
    return root


def fields(index: Index) -> dict[str, object]:
    """Plain values, which compare with ==."""
    columns = ("labels", "heights", "widths", "num_bytes")
    plain = {name: getattr(index, name) for name in ("root", "classes", "bad", "digest")}
    return {
        **plain,
        "paths": list(index.paths),
        **{name: getattr(index, name).tolist() for name in columns},
    }


def png(number: int, *, side: int = 2) -> bytes:
    """An image that no other number gives."""
    buffer = io.BytesIO()
    noise = np.random.default_rng(number).integers(0, 256, (side, side, 3), dtype=np.uint8)
    Image.fromarray(noise).save(buffer, format="png")
    return buffer.getvalue()


def write_classes(root: Path, *, side: int = 2, **numbers: int) -> Path:
    """Write some images into each class folder."""
    for place, (name, number) in enumerate(numbers.items()):
        (root / name).mkdir(parents=True)
        for image in range(number):
            (root / name / f"{image:03d}.png").write_bytes(png(100 * place + image, side=side))
    return root


def imported(
    source: Path,
    out: Path,
    *,
    name: str = "imagefolder",
    size: int = 10**6,
    shuffle: int | None = None,
    **options: object,
) -> Path:
    """Import into shards of this size, in the order of the source or shuffled with a seed."""
    import_data(name, source, out, shard_bytes=size, progress=silent, seed=shuffle, options=options)
    return out


def images_of(index: Index) -> list[bytes]:
    """Cut every image out of the shards by hand."""
    found = []
    for sample in range(len(index)):
        path, offset, num_bytes, *_ = index.locate(sample)
        found.append(Path(path).read_bytes()[offset : offset + num_bytes])
    return found


def contents(out: Path, split: str = "train") -> dict[str, list[bytes]]:
    """Return the images of every class."""
    index = read_folder(out, split)
    found: dict[str, list[bytes]] = {name: [] for name in index.classes}
    for label, content in zip(index.labels.tolist(), images_of(index), strict=True):
        found[index.classes[label]].append(content)
    return found
