"""The shapes modules meet through: a backend, a batch, a request for one, a tracker.

Implementations neither inherit from these nor import each other; mypy compares the shapes where
`run` puts the objects together.
"""

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from largebatch.pictures import Interpolation
from largebatch.section import Triple

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


class Batch(NamedTuple):
    """One device batch, on the worker's device."""

    images: Tensor
    """float32, N x C x H x W, normalised."""

    labels: Tensor
    """int64, N."""


Batches = Generator[Batch, None, None]
"""What a decoder gives; closing it releases threads, files and device memory."""


@dataclass(frozen=True, slots=True)
class Request:
    """One device batch that a decoder is asked for: which pictures, and which part of each.

    A decoder applies these numbers and decides nothing itself, so two decoders, or one decoder on
    any number of workers, show the model the same pixels.
    """

    samples: IntArray
    """N rows of the index."""

    boxes: IntArray
    """N x 4: top, left, height, width of the part to resize, in source pixels."""

    flips: BoolArray
    """N: mirror left to right after resizing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """How the part of a picture that a request names becomes what the model sees."""

    image_size: int
    """Side of the square it is resized to."""

    mean: Triple
    std: Triple
    """Of red, green and blue on the scale 0 .. 1."""

    interpolation: Interpolation
    antialias: bool
    """Whether the filter is widened where the part is made smaller."""


class Work(Protocol):
    """A collective operation under way."""

    def wait(self) -> None:
        """Block until the tensors handed in hold the result; raise PeerLostError if they cannot."""


class Group(Protocol):
    """Some workers that compute together. Every call is made by all of its workers alike."""

    @property
    def rank(self) -> int:
        """This worker, 0 .. world_size - 1."""

    @property
    def world_size(self) -> int:
        """How many workers the group has."""

    def all_reduce(self, tensor: Tensor) -> Work:
        """Start to replace `tensor`, in place, by its elementwise sum over the group."""

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Return world_size x tensor.shape: every worker's tensor (all of one shape), by rank."""

    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        """Sum a world_size x ... tensor over the group and return this worker's row of it."""


class Backend(Group, Protocol):
    """What training asks of a communication library: the group of all workers, and more."""

    @property
    def name(self) -> str:
        """The word for it on the command line: serial, torch or horovod."""

    @property
    def local_rank(self) -> int:
        """This worker among those on the same machine."""

    @property
    def local_size(self) -> int:
        """How many workers are on this machine."""

    @property
    def device(self) -> torch.device:
        """Where this worker's tensors live."""

    def broadcast(self, tensor: Tensor) -> None:
        """Replace `tensor`, in place, by worker 0's."""

    def split(self, parts: Sequence[Sequence[int]]) -> Group:
        """Divide the workers into groups, given by their ranks, and return this worker's.

        Every worker is in exactly one part, in rising order; a worker's rank in its group is its
        place there. A group belongs to the thread that uses it; another thread asks for its own.
        """

    def barrier(self) -> None:
        """Wait until every worker is here."""

    def close(self) -> None:
        """Leave the group. Safe to call twice."""


class Tracker(Protocol):
    """Follows a run. `run` calls it on worker 0 only, with plain values, never tensors."""

    def start(self, config: Mapping[str, object], *, resume_step: int) -> None:
        """Begin: the resolved recipe with the plan under `plan`, and the first step to come."""

    def record(self, record: Mapping[str, object]) -> None:
        """Take one record; its `event` says which kind it is."""

    def finish(self, summary: Mapping[str, object]) -> None:
        """End: the contents of `summary.json`, whatever the status."""
