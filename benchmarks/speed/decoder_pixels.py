"""Measure by how much pixels of DALI differ from those of torchvision, in levels of 255.

    LARGEBATCH_DATA=DIR python -m benchmarks.speed.decoder_pixels [--epochs 10]

The 100 full-size ImageNet JPEGs, at 224 pixels, in the random crops of several epochs and in the
centre crop of validation. Both decoders are given the same boxes. Both decode to the same bits; the
filters of their resizing differ, most where one hangs over the edge of the box. So the outermost
rows and columns are counted separately. Writes
benchmarks/results/decoder_pixels_<hardware>_<date>.json.
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

from benchmarks.speed.input_pipeline import CPU, batches, requests
from benchmarks.speed.measuring import write
from largebatch.data.augment import clean_request
from largebatch.data.decoders import dali, torchvision
from largebatch.data.index.index import Index, load_or_read
from largebatch.data.types import Request, Resources, View

SIDE, RESIZE = 224, 256
ROUNDING = 0.01
"""Levels by which float32 may be off."""


def compare(
    index: Index, asked: list[Request], interpolation: Literal["bilinear", "bicubic"]
) -> dict[str, dict[str, float]]:
    """Return the largest difference, the mean one and the share above one level, by place."""
    view = View(
        image_size=SIDE,
        mean=(0.0, 0.0, 0.0),
        std=(1 / 255, 1 / 255, 1 / 255),
        interpolation=interpolation,
    )
    resources = Resources(CPU, threads=2, batch_size=len(index))
    both = (
        batches(module.open_decoder(index, view, resources), iter(asked))
        for module in (dali, torchvision)
    )
    inside = torch.zeros(SIDE, SIDE, dtype=torch.bool)
    inside[1:-1, 1:-1] = True
    found: dict[str, list[torch.Tensor]] = {"inside": [], "outermost": []}
    for theirs, ours in zip(*both, strict=True):
        difference = (theirs.images - ours.images).abs()
        for place, pixels in zip(found, (inside, ~inside), strict=True):
            found[place].append(difference[:, :, pixels].flatten())
    return {place: summary(torch.cat(parts)) for place, parts in found.items()}


def summary(difference: torch.Tensor) -> dict[str, float]:
    return {
        "largest": difference.max().item(),
        "mean": difference.double().mean().item(),
        "share above one level": (difference > 1 + ROUNDING).double().mean().item(),
        "n": difference.numel(),
    }


def main() -> None:
    """Measure, then print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=10)
    args = parser.parse_args()
    result: dict[str, Any] = {"settings": vars(args) | {"pixels": SIDE, "resize": RESIZE}}
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["XDG_CACHE_HOME"] = scratch
        folder = Path(scratch, "train/any")
        folder.mkdir(parents=True)
        source = Path(os.environ["LARGEBATCH_DATA"]) / "imagenet_samples/samples.zip"
        with zipfile.ZipFile(source) as samples:
            for name in samples.namelist():
                (folder / Path(name).name).write_bytes(samples.read(name))
        index = load_or_read(Path(scratch), "train")
        crops = list(islice(requests(index, len(index)), args.epochs))
        centre = clean_request(index, np.arange(len(index)), image_size=SIDE, resize=RESIZE)
        for interpolation in ("bilinear", "bicubic"):
            for what, asked in (("random crops", crops), ("centre crop", [centre])):
                result[f"{interpolation}, {what}"] = compare(index, asked, interpolation)
    print(json.dumps(result, indent=2))
    print(write("decoder_pixels", result))


if __name__ == "__main__":
    main()
