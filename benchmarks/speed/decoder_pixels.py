"""Measure by how much pixels of DALI differ from those of torchvision, in levels of 255.

    LARGEBATCH_DATA=DIR python -m benchmarks.speed.decoder_pixels [--epochs 5]

The 100 full-size ImageNet JPEGs, at several sizes, in the random crops of some epochs and in the
centre crop of validation. Both decoders get the same boxes and decode to the same bits; the filters
of their resizing differ, most where one hangs over the edge of the box. So the outermost rows and
columns are counted apart, and of these the four corners. Then two images of which an edge is black
and all else white, whose difference is the largest that a linear filter can have: an eighth of it
hangs over one edge (255 / 8 = 32 levels), 15 / 64 of it over a corner (60 levels).
"""

import argparse
import json
import os
import tempfile
import zipfile
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image

from benchmarks.speed.input_pipeline import CPU, batches, requests
from benchmarks.speed.measuring import write
from largebatch.data.augment import clean_request
from largebatch.data.decoders import dali, torchvision
from largebatch.data.index.index import Index, load_or_read
from largebatch.data.types import Request, Resources, View

SIZES = (32, 64, 128, 160, 224)
RESIZE = 8 / 7
"""Ratio of the validation's resize to its centre crop."""

ROUNDING = 0.01
"""Levels by which float32 may be off."""


def compare(
    index: Index, asked: list[Request], size: int, interpolation: Literal["bilinear", "bicubic"]
) -> dict[str, dict[str, float]]:
    """Return the largest difference, the mean one and the share above one level, by place."""
    view = View(
        image_size=size,
        mean=(0.0, 0.0, 0.0),
        std=(1 / 255, 1 / 255, 1 / 255),
        interpolation=interpolation,
    )
    resources = Resources(CPU, threads=2, batch_size=len(index))
    decoders = (dali.open_decoder, torchvision.open_decoder)
    both = [batches(opened(index, view, resources), iter(asked)) for opened in decoders]
    found: dict[str, list[torch.Tensor]] = {"inside": [], "outermost": [], "corners": []}
    is_edge = torch.zeros(size, dtype=torch.bool)
    is_edge[[0, -1]] = True
    edges = is_edge[:, None].int() + is_edge.int()  # 0 inside, 1 at an edge, 2 in a corner
    for theirs, ours in zip(*both, strict=True):
        difference = (theirs.images - ours.images).abs()
        for number, place in enumerate(found):
            found[place].append(difference[:, :, edges == number].flatten())
    return {place: summary(torch.cat(parts)) for place, parts in found.items()}


def summary(difference: torch.Tensor) -> dict[str, float]:
    return {
        "largest": difference.max().item(),
        "mean": difference.double().mean().item(),
        "share above one level": (difference > 1 + ROUNDING).double().mean().item(),
        "n": difference.numel(),
    }


def write_edges(folder: Path) -> Index:
    """Write images of which an edge, or two, are black and all else is white."""
    for name, edges in (("edge", 1), ("corner", 2)):
        pixels = np.full((512, 512, 3), 255, dtype=np.uint8)
        pixels[0] = 0
        if edges == 2:
            pixels[:, 0] = 0
        place = folder / "train" / name
        place.mkdir(parents=True)
        Image.fromarray(pixels).save(place / "image.png")
    return load_or_read(folder, "train")


def main() -> None:
    """Measure, then print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=5)
    args = parser.parse_args()
    result: dict[str, Any] = {"settings": vars(args) | {"pixels": SIZES, "resize": "8/7"}}
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["XDG_CACHE_HOME"] = scratch
        folder = Path(scratch, "photographs/train/any")
        folder.mkdir(parents=True)
        source = Path(os.environ["LARGEBATCH_DATA"]) / "imagenet_samples/samples.zip"
        with zipfile.ZipFile(source) as samples:
            for name in samples.namelist():
                (folder / Path(name).name).write_bytes(samples.read(name))
        index = load_or_read(Path(scratch, "photographs"), "train")
        edges = write_edges(Path(scratch, "edges"))
        crops = list(islice(requests(index, len(index)), args.epochs))
        for interpolation in ("bilinear", "bicubic"):
            for size in SIZES:
                rows = np.arange(len(index))
                resize = round(size * RESIZE)
                centre = clean_request(index, rows, image_size=size, resize=resize)
                whole = clean_request(edges, np.arange(2), image_size=size, resize=None)
                result[f"{interpolation}, {size} pixels"] = {
                    "random crops": compare(index, crops, size, interpolation),
                    "centre crop": compare(index, [centre], size, interpolation),
                    "black edges": compare(edges, [whole], size, interpolation),
                }
    print(json.dumps(result, indent=2))
    print(write("decoder_pixels", result))


if __name__ == "__main__":
    main()
