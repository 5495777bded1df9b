"""Measure the input time of the training thread, with a decoder that does nothing.

    python -m benchmarks.speed.input_host [--rounds 15] [--batches 40]

A training set of ImageNet's size, 1,281,167 names in 1,000 class folders; batches of 256, cropped
and flipped at random. Order, boxes and flips are drawn, images are read, and batches are passed to
the threads of the decoder and taken from them; but an image is a file of one byte, and its pixel is
left as it is. Counted is the processor time of the thread that trains, which is what input keeps
from launching work on a device: other threads, and waiting for them, are not in it. Every round is
compared with the target of 3 microseconds an image.
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.speed.index import CLASSES, SAMPLES, recipe_of
from benchmarks.speed.measuring import paired_ratio, spread, write
from largebatch.data.decoders.prefetch import FillTask, in_parts, open_prefetcher
from largebatch.data.decoders.reader import Reading, open_reader, read_ahead
from largebatch.data.decoders.torchvision import AT_A_TIME
from largebatch.data.index.index import FORMAT, Content, Index, index_of
from largebatch.data.pipeline import Pipeline
from largebatch.data.types import (
    Bytes,
    Decode,
    DecodedBatches,
    Floats,
    IntArray,
    Request,
    Resources,
    View,
)
from largebatch.recipe.arithmetic.plan import make_plan

TARGET = 3e-6
"""Target in seconds per image."""

WARM_UP = 5
"""Number of uncounted batches: the first waits for the order of an epoch."""


def write_images(root: Path) -> Index:
    """Return an index of ImageNet's size; all names of a class refer to one small file."""
    random = np.random.default_rng(0)
    name = "0.JPEG"
    changed = 10**18
    classes = [f"n{10_000_000 + 1234 * label}" for label in range(CLASSES)]
    for folder in classes:
        path = root / "train" / folder / name
        path.parent.mkdir(parents=True)
        path.write_bytes(b"x")
        os.utime(path, ns=(changed, changed))
    header = {
        "format": FORMAT,
        "split": "train",
        "classes": classes,
        "ignored": [],
        "folders": [changed] * CLASSES,
        "shards": [],
        "bad": [],
        "digest": "made up",
    }
    arrays: dict[str, npt.NDArray[Any]] = {
        "labels": np.sort(random.integers(0, CLASSES, SAMPLES)),
        "heights": random.integers(200, 600, SAMPLES),
        "widths": random.integers(200, 600, SAMPLES),
        "orientations": np.ones(SAMPLES, np.uint8),
        "by_pillow": np.zeros(SAMPLES, np.uint8),
        "num_bytes": np.ones(SAMPLES, np.int64),
        "mtimes": np.full(SAMPLES, changed),
        "names": np.frombuffer(name.encode() * SAMPLES, np.uint8).reshape(SAMPLES, -1),
    }
    return index_of(Content(header, arrays), root)


@contextmanager
def open_idle_decoder(index: Index, view: View, resources: Resources) -> Iterator[Decode]:
    """Yield a decoder like torchvision's, whose threads ignore the images."""

    def divide(reading: Reading) -> tuple[IntArray, list[FillTask]]:
        samples = reading.request.samples
        rows = in_parts(len(samples), threads=resources.threads, most=AT_A_TIME)
        return index.labels[samples], [FillTask(each, _leave) for each in rows]

    def decode(requests: Iterable[Request]) -> DecodedBatches:
        for reading, batch in fill_ahead(read_ahead(requests, reader), divide):
            reader.release(reading)
            yield reading.request, batch

    with (
        open_reader(index, resources.reads) as reader,
        open_prefetcher(view, resources) as fill_ahead,
    ):
        yield decode


def _leave(pixels: Bytes | Floats) -> None:
    pixels[:] = 0


def open_pipeline(index: Index, args: argparse.Namespace) -> Pipeline:
    """Return the pipeline of one worker that trains on these images."""
    one_pixel = ("data.image_size=1", "data.eval_resize=1")
    recipe = recipe_of(args.batch, *one_pixel, f"execution.device_batch={args.batch}")
    resources = Resources(torch.device("cpu"), args.threads, args.batch, reads=args.batch // 4)
    return Pipeline(
        seed=recipe.seed,
        data=recipe.data,
        plan=make_plan(recipe, workers=1),
        rank=0,
        train_index=index,
        val_index=index,
        open_decoder=lambda of, view: open_idle_decoder(of, view, resources),
        evaluated_samples=np.empty(0, np.int64),
        held_out_samples=np.empty(0, np.int64),
    )


def main() -> None:
    """Measure, then print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--batches", type=int, default=40, help="of a round")
    parser.add_argument("--threads", type=int, default=2, help="that decode")
    args = parser.parse_args()
    torch.set_num_threads(1)
    seconds = []
    with tempfile.TemporaryDirectory() as folder:
        pipeline = open_pipeline(write_images(Path(folder)), args)
        with closing(pipeline.training(range(pipeline.plan.steps), clean=False)) as batches:
            for _ in range(WARM_UP):
                next(batches)
            for _ in range(args.rounds):
                start = time.thread_time()
                for _ in range(args.batches):
                    next(batches)
                seconds.append((time.thread_time() - start) / (args.batches * args.batch))
    result: dict[str, Any] = {
        "settings": vars(args),
        "microseconds an image": spread([1e6 * each for each in seconds]),
        "ratios": {"ours / target": paired_ratio(seconds, [TARGET] * len(seconds))},
    }
    print(json.dumps(result, indent=2))
    print(write("input_host", result))


if __name__ == "__main__":
    main()
