"""NVIDIA DALI as the decoder: on the GPU if the worker has one, otherwise on the CPU.

DALI only decodes and resizes: bytes, boxes and flips are its inputs. Its readers, shards, seeds,
shuffling and last-batch policies are not used.
"""

from collections import deque
from collections.abc import Generator, Iterable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils import dlpack

from largebatch.data.decoders.orientation import as_stored, turn_resized
from largebatch.data.decoders.prefetch import Transfer
from largebatch.data.decoders.reader import Reader, Reading, open_reader, read_ahead
from largebatch.data.decoders.torchvision import encoded_images, to_pillow
from largebatch.data.index.index import Index
from largebatch.data.types import Batch, Batches, Decode, Request, Resources, View
from largebatch.optional import require_dali

AHEAD = 2  # number of batches finished or in progress when one is requested

_Numbers = npt.NDArray[np.int32]
_Inputs = tuple[Any, _Numbers, _Numbers, _Numbers]
"""Encoded images, as DALI tensors or a list of arrays; corners, shapes and flips of boxes."""

_UnderWay = tuple[Reading, _Inputs]


def open_decoder(index: Index, view: View, resources: Resources) -> AbstractContextManager[Decode]:
    """Return a context with a decoder; raise MissingPackageError immediately.

    A box is cropped, resized, then mirrored if requested. DALI's pipeline is built once, for any
    number of passes, and its threads and memory are released at the end of the block.
    """
    dali, device = require_dali(), resources.device
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return _open(_Graph(dali=dali, index=index, view=view, device=device), resources)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Graph:
    dali: ModuleType
    index: Index
    view: View
    device: torch.device

    def build(self, source: "_Source", resources: Resources) -> Any:  # noqa: ANN401 -- DALI is optional
        pipeline = self.dali.Pipeline(
            batch_size=resources.batch_size,
            num_threads=resources.threads,
            device_id=self.device.index if self.device.type == "cuda" else None,
            prefetch_queue_depth=AHEAD,
        )
        with pipeline:
            pipeline.set_outputs(self._images(source))
        return pipeline

    def _images(self, source: "_Source") -> Any:  # noqa: ANN401 -- DALI is optional
        fn, types, view = self.dali.fn, self.dali.types, self.view
        on_gpu = self.device.type == "cuda"
        encoded, corners, shapes, flips = fn.external_source(
            source=source.next,
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
            adjust_orientation=False,  # done by turn_resized
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


class _Source:
    """The inputs of the current pass.

    They are dropped after it, else index and buffers live until Python collects DALI's graphs,
    which are cyclic.
    """

    def __init__(self) -> None:
        self.inputs: Iterator[_Inputs] = iter(())

    def next(self) -> _Inputs:
        return next(self.inputs)


@contextmanager
def _open(graph: _Graph, resources: Resources) -> Iterator[Decode]:
    source = _Source()
    with open_reader(graph.index, resources.reads) as reader:
        pipeline = graph.build(source, resources)
        yield partial(_run, graph, pipeline, source, reader)


def _run(
    graph: _Graph,
    pipeline: Any,  # noqa: ANN401 -- DALI is optional
    source: _Source,
    reader: Reader,
    requests: Iterable[Request],
) -> Batches:
    """Yield the outputs as torch tensors, without a copy."""
    index, device = graph.index, graph.device
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
    transfer, under_way = Transfer(device), deque[_UnderWay]()
    with closing(_inputs(graph, read_ahead(requests, reader), under_way)) as inputs:
        source.inputs = inputs
        try:
            while True:
                try:
                    (images,) = pipeline.run(stream)
                except StopIteration:
                    pipeline.reset()  # for the next pass
                    return
                except RuntimeError:
                    # DALI does not report which image it was. Pillow raises an error with its path.
                    for reading, _ in under_way:
                        for encoded in encoded_images(reading):
                            to_pillow(encoded)
                    raise
                reading, _ = under_way.popleft()
                reader.release(reading)
                samples = reading.request.samples
                pixels = dlpack.from_dlpack(images.as_tensor())
                if graph.view.channels_last:
                    pixels = pixels.permute(0, 3, 1, 2)
                turn_resized(pixels, index, reading.request)
                yield Batch(pixels, *transfer.send(torch.from_numpy(index.labels[samples])))
        finally:
            source.inputs = iter(())


def _inputs(
    graph: _Graph, readings: Iterable[Reading], under_way: deque[_UnderWay]
) -> Generator[_Inputs, None, None]:
    """Yield the pipeline's inputs for each request: images, corners, shapes and flips.

    DALI reads them in place, so `under_way` holds them until their batch is finished. They are
    passed as DALI's list type: DALI reads a Python list several times to convert it.
    """
    tensors = graph.dali.tensors
    for reading in readings:
        boxes, flips = as_stored(graph.index, reading.request)
        inputs = (
            tensors.TensorListCPU([tensors.TensorCPU(image, "") for image in reading.contents]),
            np.ascontiguousarray(boxes[:, :2], dtype=np.int32),
            np.ascontiguousarray(boxes[:, 2:], dtype=np.int32),
            flips.astype(np.int32),
        )
        under_way.append((reading, inputs))
        yield inputs
