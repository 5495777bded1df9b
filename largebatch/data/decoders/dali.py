"""NVIDIA DALI as the decoder: on the GPU if the worker has one, otherwise on the CPU.

DALI only decodes and resizes: bytes, boxes and flips are its inputs. The index and all boxes are of
the displayed image: the stored one transposed for TRANSPOSED (EXIF 2.32, tag 274), then flipped
vertically for UPSIDE and horizontally for MIRRORED. DALI decodes only a box: the stored box is cut
out, and the resized square is oriented. The few images of `Index.by_pillow` reach DALI as pixels
that Pillow has decoded, upright.

A run of DALI costs the same for few images as for many, and its threads wait for each other at its
end. So one run decodes several device batches where these are small, as MLPerf's entries do.
"""

import io
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
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
from largebatch.data.index.headers import TRANSPOSED
from largebatch.data.index.index import Index
from largebatch.data.types import (
    Batch,
    BoolArray,
    Bytes,
    Decode,
    DecodedBatches,
    IntArray,
    Request,
    Resources,
    View,
)
from largebatch.optional import require_dali

UPSIDE = (3, 4, 7, 8)  # orientations that are flipped vertically
MIRRORED = (2, 3, 6, 7)  # orientations that are flipped horizontally
AHEAD = 2  # number of runs of DALI finished or in progress when a batch is requested

RUN = 256
"""Images of one run of DALI, at most, unless a device batch has more."""

HARDWARE_SHARE = 0.99
"""Part of the images that a GPU's JPEG decoder takes; that of MLPerf's entries on H100 and H200."""

QUANTILE = 0.99
"""Part of the images for whose longer side the hardware decoder keeps memory, RUN times; it
allocates more for the others."""

LONGEST = 1200
"""Largest such side in pixels: 1.1 GB for RUN images."""

PADDINGS = 2**24, 2**26
"""Smallest and largest number of bytes that DALI keeps on the device for each thread."""

_Numbers = npt.NDArray[np.int32]
_Inputs = tuple[Any, _Numbers, _Numbers, _Numbers]
"""Encoded images, as DALI tensors or a list of arrays; corners, shapes and flips of boxes."""

_UnderWay = tuple[Reading, _Inputs]


def require_decoder() -> Callable[[Index, View, Resources], AbstractContextManager[Decode]]:
    """Return what opens the decoder; raise MissingPackageError without its library."""
    require_dali()
    return open_decoder


@contextmanager
def open_decoder(index: Index, view: View, resources: Resources) -> Iterator[Decode]:
    """Yield a decoder; raise MissingPackageError without DALI.

    A box is cropped, resized, then mirrored if requested. DALI's pipeline is built once, for any
    number of passes, and its threads and memory are released at the end of the block.

    The batches of one run are views of one tensor, whose memory is free when all are.
    """
    dali = require_dali()
    device = resources.device
    on_gpu = device.type == "cuda"
    if on_gpu and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    # The inputs of the current pass; dropped after it, as DALI's cyclic graphs live longer.
    source = SimpleNamespace(inputs=iter(()))
    most = max(RUN, resources.batch_size)
    pipeline = dali.Pipeline(
        batch_size=most,
        num_threads=resources.threads,
        device_id=device.index if on_gpu else None,
        prefetch_queue_depth=AHEAD,
    )
    with pipeline:
        hints = _gpu_hints(index) if on_gpu else {}
        pipeline.set_outputs(_graph(dali, source, view, hints, on_gpu=on_gpu))
    transfer = Transfer(device)

    def decode(requests: Iterable[Request]) -> DecodedBatches:
        # DALI makes this stream wait for its output, so that nothing waits on the host.
        stream = torch.cuda.current_stream(device) if on_gpu else None
        under_way = deque[_UnderWay]()
        joined = deque[list[Request]]()  # of each run that DALI has begun
        readings = read_ahead(_join(requests, most, joined), reader)
        with closing(_inputs(dali, index, readings, under_way)) as inputs:
            source.inputs = inputs
            try:
                while True:
                    try:
                        (images,) = pipeline.run(stream)
                    except StopIteration:
                        pipeline.reset()  # for the next pass
                        return
                    # DALI's message has no path; decoding the inputs again finds the damaged one.
                    except RuntimeError:
                        _name_culprit(index, under_way)
                        raise
                    reading, _ = under_way.popleft()
                    # A GPU's inputs were copied, and on a CPU the run has ended.
                    reader.release(reading)
                    pixels = dlpack.from_dlpack(images.as_tensor()).to(view.dtype)
                    if view.channels_last:
                        pixels = pixels.permute(0, 3, 1, 2)
                    _turn_resized(pixels, index, reading.request)
                    labels = torch.from_numpy(index.labels[reading.request.samples])
                    (sent,) = transfer.send(labels)
                    in_this_run = joined.popleft()
                    sizes = [len(request.samples) for request in in_this_run]
                    batches = map(Batch, pixels.split(sizes), sent.split(sizes))
                    yield from zip(in_this_run, batches, strict=True)
            finally:
                source.inputs = iter(())

    with open_reader(index, resources.reads) as reader:
        yield decode


def _gpu_hints(index: Index) -> dict[str, float]:
    """Return options with which DALI, on a GPU, allocates little memory after its start."""
    # Either side, because EXIF orientation may exchange them.
    sides = np.maximum(index.heights, index.widths)
    side = min(LONGEST, int(np.quantile(sides, QUANTILE)))
    smallest, largest = PADDINGS
    padding = min(largest, max(smallest, 3 * int((index.heights * index.widths).max())))
    return {
        "hw_decoder_load": HARDWARE_SHARE,
        "preallocate_width_hint": side,
        "preallocate_height_hint": side,
        "device_memory_padding": padding,
        "host_memory_padding": padding // 2,  # DALI's own are 16 and 8 MiB
    }


def _graph(
    dali: ModuleType, source: SimpleNamespace, view: View, hints: dict[str, float], *, on_gpu: bool
) -> Any:  # noqa: ANN401 -- DALI is optional
    fn = dali.fn
    types = dali.types
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
        **hints,
    )
    bicubic = view.interpolation == "bicubic"
    # It has no bfloat16. Bytes are whole after resizing, and a run of them takes less memory.
    output_types = {torch.float16: types.FLOAT16, torch.uint8: types.UINT8}
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
        dtype=output_types.get(view.dtype, types.FLOAT),
        output_layout="HWC" if view.channels_last else "CHW",
    )


def _join(
    requests: Iterable[Request], most: int, joined: deque[list[Request]]
) -> Iterator[Request]:
    """Yield requests joined to at most `most` images; append the parts of each to `joined`."""
    several: list[Request] = []

    def join() -> Request:
        joined.append(several)
        return Request(
            samples=np.concatenate([request.samples for request in several]),
            boxes=np.concatenate([request.boxes for request in several]),
            flips=np.concatenate([request.flips for request in several]),
            start=several[0].start,
        )

    for request in requests:
        num_images = sum(len(other.samples) for other in (*several, request))
        if several and num_images > most:
            yield join()
            several = []
        several.append(request)
    if several:
        yield join()


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
        # DALI has no HEIC, and inverts inks by another rule (see headers.Size).
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
    """Return an encoded image; one that is left to Pillow as its pixels in a PPM, upright."""
    if index.by_pillow is None or not index.by_pillow[sample]:
        return content
    ppm = io.BytesIO()
    to_pillow(index, sample, content).save(ppm, format="ppm")
    return np.frombuffer(ppm.getvalue(), np.uint8)


def _orientations(index: Index, samples: IntArray) -> Bytes | None:
    """Return the orientations of what DALI decodes; None if all of it is upright."""
    if index.orientations is None:
        return None
    orientations = index.orientations[samples]
    if index.by_pillow is not None:
        orientations = np.where(index.by_pillow[samples], 1, orientations)
    return None if (orientations == 1).all() else orientations


def _name_culprit(index: Index, under_way: Iterable[_UnderWay]) -> None:
    """Raise DataError with the path of an image that Pillow cannot decode: DALI names none."""
    for reading, _ in under_way:
        samples = reading.request.samples.tolist()
        for sample, content in zip(samples, reading.contents, strict=True):
            to_pillow(index, sample, content)


def _as_stored(index: Index, request: Request) -> tuple[IntArray, BoolArray]:
    """Return boxes in stored pixels, and flips: False where `_turn_resized` also flips."""
    orientations = _orientations(index, request.samples)
    if orientations is None:
        return request.boxes, request.flips
    top, left, height, width = request.boxes.T
    far_top = index.heights[request.samples] - top - height
    far_left = index.widths[request.samples] - left - width
    top = np.where(np.isin(orientations, UPSIDE), far_top, top)
    left = np.where(np.isin(orientations, MIRRORED), far_left, left)
    # In the stored image rows and columns are exchanged where the displayed one is transposed.
    boxes = np.stack([top, left, height, width], axis=-1)
    transposed = np.isin(orientations, TRANSPOSED)[:, None]
    return (
        np.where(transposed, boxes[:, [1, 0, 3, 2]], boxes),
        request.flips & (orientations == 1),
    )


def _turn_resized(images: Tensor, index: Index, request: Request) -> None:
    """Orient, in place, the resized squares of stored boxes, N x C x H x W; flip the oriented."""
    orientations = _orientations(index, request.samples)
    if orientations is None:
        return
    for row in np.flatnonzero(orientations != 1).tolist():
        orientation = int(orientations[row])
        image = images[row]
        if orientation in TRANSPOSED:
            image = image.transpose(1, 2)
        axes = [1] if orientation in UPSIDE else []
        axes += [2] if (orientation in MIRRORED) != bool(request.flips[row]) else []
        images[row] = image.flip(axes)  # a copy
