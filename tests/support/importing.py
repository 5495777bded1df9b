"""What tests of importing class folders share."""

import io
from pathlib import Path

import numpy as np
from PIL import Image

from largebatch.data.datasets import import_data
from largebatch.data.index.index import read_folder


def imported(source: Path, out: Path) -> Path:
    import_data("imagefolder", source, out, shard_bytes=10**6, progress=lambda _done, _total: None)
    return out


def png(number: int, *, side: int = 2) -> bytes:
    """An image that no other number gives."""
    buffer = io.BytesIO()
    noise = np.random.default_rng(number).integers(0, 256, (side, side, 3), dtype=np.uint8)
    Image.fromarray(noise).save(buffer, format="png")
    return buffer.getvalue()


def contents(out: Path, split: str = "train") -> dict[str, list[bytes]]:
    """The images of every class, cut out of the shards by hand."""
    index = read_folder(out, split)
    found: dict[str, list[bytes]] = {name: [] for name in index.classes}
    for sample, label in enumerate(index.labels.tolist()):
        path, offset, num_bytes, *_ = index.locate(sample)
        found[index.classes[label]].append(path.read_bytes()[offset : offset + num_bytes])
    return found
