"""NVIDIA DALI as the decoder: on the GPU if the worker has one, otherwise on the CPU.

DALI only decodes and resizes: bytes, boxes and flips are its inputs. The index and all boxes are of
the displayed image: the stored one transposed for TRANSPOSED (EXIF 2.32, tag 274), then flipped
vertically for UPSIDE and horizontally for MIRRORED. DALI decodes only a box: the stored box is cut
out, and the resized square is oriented.
"""

import io
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing, contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils import dlpack

from largebatch.data.decoders.prefetch import Transfer
from largebatch.data.decoders.reader import Reading, open_reader, read_ahead
from largebatch.data.decoders.torchvision import to_pillow
from largebatch.data.index.headers import START, TRANSPOSED, is_heic
from largebatch.data.index.index import Index
from largebatch.data.types import (
    Batch,
    Batches,
    BoolArray,
    Bytes,
    Decode,
    IntArray,
    Request,
    Resources,
    View,
)
from largebatch.optional import require_dali

UPSIDE, MIRRORED = (3, 4, 7, 8), (2, 3, 6, 7)
AHEAD = 2  # number of batches finished or in progress when one is requested

_Numbers = npt.NDArray[np.int32]
_Inputs = tuple[Any, _Numbers, _Numbers, _Numbers]
"""Encoded images, as DALI tensors or a list of arrays; corners, shapes and flips of boxes."""

_UnderWay = tuple[Reading, _Inputs]


@contextmanager
def open_decoder(index: Index, view: View, resources: Resources) -> Iterator[Decode]:
    """Yield a decoder; raise MissingPackageError without DALI.

    A box is cropped, resized, then mirrored if requested. DALI's pipeline is built once, for any
    number of passes, and its threads and memory are released at the end of the block.
    """
    dali, device = require_dali(), resources.device
    on_gpu = device.type == "cuda"
    if on_gpu and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    # The inputs of the current pass; dropped after it, as DALI's cyclic graphs live longer.
    source = SimpleNamespace(inputs=iter(()))
    pipeline = dali.Pipeline(
        batch_size=resources.batch_size,
        num_threads=resources.threads,
        device_id=device.index if on_gpu else None,
        prefetch_queue_depth=AHEAD,
    )
    with pipeline:
        pipeline.set_outputs(_graph(dali, source, view, on_gpu=on_gpu))
    transfer = Transfer(device)

    def decode(requests: Iterable[Request]) -> Batches:
        stream = torch.cuda.current_stream(device) if on_gpu else None
        under_way = deque[_UnderWay]()
        with closing(_inputs(dali, index, read_ahead(requests, reader), under_way)) as inputs:
            source.inputs = inputs
            try:
                while True:
                    try:
                        (images,) = pipeline.run(stream)
                    except StopIteration:
                        pipeline.reset()  # for the next pass
                        return
                    except RuntimeError:
                        _name_culprit(index, under_way)
                        raise
                    reading, _ = under_way.popleft()
                    reader.release(reading)
                    pixels = dlpack.from_dlpack(images.as_tensor())
                    if view.channels_last:
                        pixels = pixels.permute(0, 3, 1, 2)
                    _turn_resized(pixels, index, reading.request)
                    labels = torch.from_numpy(index.labels[reading.request.samples])
                    yield Batch(pixels, *transfer.send(labels))
            finally:
                source.inputs = iter(())

    with open_reader(index, resources.reads) as reader:
        yield decode


def _graph(dali: ModuleType, source: SimpleNamespace, view: View, *, on_gpu: bool) -> Any:  # noqa: ANN401 -- DALI is optional
    fn, types = dali.fn, dali.types
    encoded, corners, shapes, flips = fn.external_source(
        source=lambda: next(source.inputs),
        num_outputs=4,
        dtype=[types.UINT8, types.INT32, types.INT32, types.INT32],
        ndim=[1, 1, 1, 0],
        no_copy=not on_gpu,  # a GPU may still read its inputs when a batch is returned
    )
    images = fn.decoders.image_slice(
        encoded,
        device="mixed" if on_gpu else "cpu",
        start=corners,
        shape=shapes,
        axis_names="HW",
        adjust_orientation=False,  # done by _turn_resized
        jpeg_fancy_upsampling=True,  # so that the GPU's colours match the CPU's
    )
    bicubic = view.interpolation == "bicubic"
    images = fn.resize(
        images,
        size=[view.image_size, view.image_size],
        interp_type=types.INTERP_CUBIC if bicubic else types.INTERP_LINEAR,
        antialias=True,  # Pillow's filter, except for the outermost pixels
    )
    return fn.crop_mirror_normalize(
        images,
        mirror=flips,
        mean=[255 * value for value in view.mean],
        std=[255 * value for value in view.std],
        dtype=types.FLOAT,
        output_layout="HWC" if view.channels_last else "CHW",
    )


def _inputs(
    dali: ModuleType, index: Index, readings: Iterable[Reading], under_way: deque[_UnderWay]
) -> Generator[_Inputs, None, None]:
    """Yield the pipeline's inputs for each request: images, corners, shapes and flips.

    DALI reads them in place, so `under_way` holds them until their batch is finished. They are
    passed as DALI's list type: DALI reads a Python list several times to convert it.
    """
    tensors = dali.tensors
    for reading in readings:
        boxes, flips = _as_stored(index, reading.request)
        samples = reading.request.samples.tolist()
        contents = [
            _for_dali(index, sample, content)
            for sample, content in zip(samples, reading.contents, strict=True)
        ]
        inputs = (
            tensors.TensorListCPU([tensors.TensorCPU(content, "") for content in contents]),
            np.ascontiguousarray(boxes[:, :2], dtype=np.int32),
            np.ascontiguousarray(boxes[:, 2:], dtype=np.int32),
            flips.astype(np.int32),
        )
        under_way.append((reading, inputs))
        yield inputs


def _for_dali(index: Index, sample: int, content: Bytes) -> Bytes:
    """Return an encoded image; one of a format that DALI does not read as the pixels in a PPM."""
    if not is_heic(content[:START].data):
        return content
    ppm = io.BytesIO()
    to_pillow(index, sample, content).save(ppm, format="ppm")
    return np.frombuffer(ppm.getvalue(), np.uint8)


def _name_culprit(index: Index, under_way: Iterable[_UnderWay]) -> None:
    """Raise DataError with the path of an image that Pillow cannot decode: DALI names none."""
    for reading, _ in under_way:
        samples = reading.request.samples.tolist()
        for sample, content in zip(samples, reading.contents, strict=True):
            to_pillow(index, sample, content)


def _as_stored(index: Index, request: Request) -> tuple[IntArray, BoolArray]:
    """Return boxes in stored pixels, and flips: False where `_turn_resized` also flips."""
    if index.orientations is None:
        return request.boxes, request.flips
    orientations = index.orientations[request.samples]
    if (orientations == 1).all():
        return request.boxes, request.flips
    top, left, height, width = request.boxes.T
    far_top = index.heights[request.samples] - top - height
    far_left = index.widths[request.samples] - left - width
    top = np.where(np.isin(orientations, UPSIDE), far_top, top)
    left = np.where(np.isin(orientations, MIRRORED), far_left, left)
    boxes = np.stack([top, left, height, width], axis=-1)
    transposed = np.isin(orientations, TRANSPOSED)[:, None]
    return (
        np.where(transposed, boxes[:, [1, 0, 3, 2]], boxes),
        request.flips & (orientations == 1),
    )


def _turn_resized(images: Tensor, index: Index, request: Request) -> None:
    """Orient, in place, the resized squares of stored boxes, N x C x H x W; flip the oriented."""
    if index.orientations is None:
        return
    orientations = index.orientations[request.samples]
    for row in np.flatnonzero(orientations != 1).tolist():
        orientation, image = int(orientations[row]), images[row]
        if orientation in TRANSPOSED:
            image = image.transpose(1, 2)
        axes = [1] if orientation in UPSIDE else []
        axes += [2] if (orientation in MIRRORED) != bool(request.flips[row]) else []
        images[row] = image.flip(axes)  # a copy
