"""NVIDIA DALI as the decoder: on the processor, or on the GPU where the worker has one.

DALI does what it is fast at and decides nothing: paths, boxes and flips come in from outside, which
measured as fast as its own reader, and its shards, seeds, shuffling and last-batch policies are
not used.
"""

import importlib
import os
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch.utils import dlpack

from largebatch.contracts import Batch, Batches, Request
from largebatch.data.index import Index
from largebatch.errors import MissingPackageError
from largebatch.recipe import Triple

AHEAD = 2
"""How many batches are finished or under way when one is asked for."""


def decode(  # noqa: PLR0913 -- every decoder is called alike
    index: Index,
    requests: Iterable[Request],
    *,
    image_size: int,
    mean: Triple,
    std: Triple,
    device: torch.device,
    threads: int,
    batch_size: int,
) -> Batches:
    """Return one batch of at most `batch_size` for each request, in order.

    A box is cut out, resized with antialiased bilinear interpolation, then mirrored if asked for.
    DALI's threads and memory are given back when the batches end or are closed.
    """
    dali = _require_dali()
    on_gpu = device.type == "cuda"
    if on_gpu and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    pipeline = dali.Pipeline(
        batch_size=batch_size,
        num_threads=threads,
        device_id=device.index if on_gpu else None,
        prefetch_queue_depth=AHEAD,
    )
    with pipeline:
        inputs = _inputs(index, requests)
        graph = _graph(dali, inputs, image_size=image_size, mean=mean, std=std, on_gpu=on_gpu)
        pipeline.set_outputs(*graph)
    return _run(pipeline, device)


def _run(pipeline: Any, device: torch.device) -> Batches:  # noqa: ANN401 -- DALI is optional
    """Hand the outputs over to torch, without a copy; the last reference ends the pipeline."""
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
    while True:
        try:
            images, labels = pipeline.run(stream)
        except StopIteration:
            return
        yield Batch(dlpack.from_dlpack(images.as_tensor()), dlpack.from_dlpack(labels.as_tensor()))


def _graph(
    dali: ModuleType,
    inputs: Iterator[tuple[Any, ...]],
    *,
    image_size: int,
    mean: Triple,
    std: Triple,
    on_gpu: bool,
) -> tuple[Any, Any]:
    """Describe the pipeline: read, decode the box, resize, mirror and normalise."""
    fn, types = dali.fn, dali.types
    paths, corners, shapes, flips, labels = fn.external_source(
        source=inputs,
        num_outputs=5,
        dtype=[types.UINT8, types.INT32, types.INT32, types.INT32, types.INT64],
        ndim=[1, 1, 1, 0, 0],
    )
    images = fn.decoders.image_slice(
        fn.io.file.read(paths),
        device="mixed" if on_gpu else "cpu",
        start=corners,
        shape=shapes,
        axis_names="HW",
        adjust_orientation=False,
        jpeg_fancy_upsampling=True,  # so that the GPU's colours are the processor's
    )
    images = fn.resize(
        images,
        size=[image_size, image_size],
        interp_type=types.INTERP_LINEAR,
        antialias=True,  # what makes it Pillow's bilinear, but for the outermost pixels
    )
    images = fn.crop_mirror_normalize(
        images,
        mirror=flips,
        mean=[255 * value for value in mean],
        std=[255 * value for value in std],
        dtype=types.FLOAT,
        output_layout="CHW",
    )
    return images, labels.gpu() if on_gpu else labels


def _inputs(index: Index, requests: Iterable[Request]) -> Iterator[tuple[Any, ...]]:
    """Turn requests into the pipeline's inputs: paths, corners, shapes, flips and labels."""
    for request in requests:
        paths = [os.fsencode(index.root / index.paths[sample]) for sample in request.samples]
        yield (
            [np.frombuffer(path, dtype=np.uint8) for path in paths],
            np.ascontiguousarray(request.boxes[:, :2], dtype=np.int32),
            np.ascontiguousarray(request.boxes[:, 2:], dtype=np.int32),
            request.flips.astype(np.int32),
            index.labels[request.samples],
        )


def _require_dali() -> ModuleType:
    try:
        return importlib.import_module("nvidia.dali")
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith("nvidia"):
            raise
        raise MissingPackageError(
            "NVIDIA DALI",
            purpose="--decoder dali (--decoder torchvision works without it)",
            install="pip install nvidia-dali-cuda120",
        ) from None
