"""Measure images per second of a recipe with RandAugment and Mixup, beside timm's own loader.

    LARGEBATCH_DATA=DIR python -m benchmarks.speed.input_augmented [--rounds 7] [--batches 12]

Full-size ImageNet JPEGs, random crop of 224 pixels (bicubic), flip, RandAugment of timm
(rand-m9-mstd0.5-inc1), normalise, Mixup of pairs. timm's loader is that of its train.py: worker
processes that mix while they join a batch (FastCollateMixup), and a prefetcher that normalises.
Ours is the pipeline of a run: threads that decode, threads that operate on pixels, then the mix. As
many threads of each kind as timm has processes share the same cores. Rounds and turns are those of
input_pipeline.py; ratios are of times, ours first.
"""

import argparse
import json
import os
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from benchmarks.speed.input_pipeline import compared, compete
from benchmarks.speed.measuring import write
from largebatch import load_recipe
from largebatch.data.pipeline import open_images
from largebatch.distributed.serial import Serial
from largebatch.optional import require_timm
from largebatch.recipe.arithmetic.plan import make_plan

RECIPE = "resnet50_1024_nus"
COPIES = 20  # names of each image: one epoch is longer than the measurement
CPU = torch.device("cpu")
MIXUP = 0.2


def write_images(samples: Path, folder: Path) -> int:
    """Write each image into a class of its own, under several names; return their number."""
    with zipfile.ZipFile(samples) as archive:
        names = archive.namelist()
        for name in names:
            for split, copies in (("train", COPIES), ("val", 1)):
                place = folder / split / Path(name).stem
                place.mkdir(parents=True)
                first = place / f"0{Path(name).suffix}"
                first.write_bytes(archive.read(name))
                for number in range(1, copies):
                    os.link(first, place / f"{number}{first.suffix}")
    return len(names)


def ours(folder: Path, classes: int, decoder: str, args: argparse.Namespace) -> Iterator[object]:
    """Yield the batches that a run would train on."""
    augment = "{kind: rand_augment, set: timm, magnitude: 9, std: 0.5, increasing: true, "
    recipe = load_recipe(
        RECIPE,
        [
            *(f"data.classes={classes}", f"data.val_samples={classes}"),
            *(f"data.train_samples={classes * COPIES}", "data.interpolation=bicubic"),
            *(f"data.augment={augment}interpolation: bicubic}}", f"data.mix={{mixup: {MIXUP}}}"),
            f"batch={{global_batch: {args.batch}, bn_span: {args.batch}}}",
            *(f"execution.device_batch={args.batch}", f"execution.decoder={decoder}"),
            *("execution.cache=none", "schedule.warmup=null", "polish=null"),
        ],
    )
    plan = make_plan(recipe)
    pipeline = open_images(recipe, plan, Serial(CPU), folder=folder)
    yield from pipeline.training(range(plan.steps), clean=False)


def timms(folder: Path, classes: int, args: argparse.Namespace) -> Iterator[object]:
    """Yield the batches of timm's loader, with the same settings."""
    require_timm()
    from timm.data import FastCollateMixup, ImageDataset, auto_augment, create_loader

    posterize = auto_augment.posterize

    def with_no_bits(image: Image.Image, bits: int, **words: object) -> Image.Image:
        """Return black for 0 bits, which timm draws for 1 image in 660, and Pillow 13 refuses."""
        return posterize(image, bits, **words) if bits else Image.new("RGB", image.size)

    auto_augment.NAME_TO_OP["PosterizeIncreasing"] = with_no_bits
    mixup = FastCollateMixup(
        mixup_alpha=MIXUP, mode="pair", label_smoothing=0.1, num_classes=classes
    )
    loader = create_loader(
        ImageDataset(str(folder / "train")),
        input_size=(3, 224, 224),
        batch_size=args.batch,
        is_training=True,
        auto_augment="rand-m9-mstd0.5-inc1",
        interpolation="bicubic",
        num_workers=args.threads,
        collate_fn=mixup,
        device=CPU,
    )
    while True:
        yield from loader


def main() -> None:
    """Measure, then print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    data = os.environ.get("LARGEBATCH_DATA")
    parser.add_argument("--data", type=Path, default=data, required=data is None)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--batches", type=int, default=12, help="counted, in each round")
    # More than the five batches that timm's processes have ready when their turn begins.
    parser.add_argument("--uncounted", type=int, default=8, help="batches before them")
    parser.add_argument("--pause", type=float, default=1.0, help="seconds before each turn")
    parser.add_argument("--threads", type=int, default=2, help="processes of timm's loader")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["XDG_CACHE_HOME"] = scratch
        folder = Path(scratch) / "images"
        classes = write_images(args.data / "imagenet_samples/samples.zip", folder)
        rates = compete(
            {
                "ours": ours(folder, classes, "torchvision", args),
                "timm": timms(folder, classes, args),
            },
            args,
        )
    result: dict[str, Any] = {
        "settings": {**vars(args), "data": "LARGEBATCH_DATA"},
        **compared("ours", rates, {"timm": 1.0}),
    }
    print(json.dumps(result, indent=2))
    print(write("input_augmented", result))


if __name__ == "__main__":
    main()
