"""The machines of a simulation: learners, servers, and the links between them."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Annotated, Literal, assert_never

import numpy as np
import numpy.typing as npt
from pydantic import Field

from largebatch.data.order import WORDS_PER_BLOCK, Stream, random_words
from largebatch.optional import require_scipy
from largebatch.recipe.section import NonNegative, Positive, Section

FloatArray = npt.NDArray[np.float64]

_BLOCKS = 16  # number of blocks drawn at a time, which is 64 mini-batches


class Constant(Section):
    """The same time for every mini-batch."""

    kind: Literal["constant"]
    seconds: Positive


class Lognormal(Section):
    """Lognormal distribution, as is common for times on shared machines."""

    kind: Literal["lognormal"]
    median: Positive
    sigma: Positive
    """Standard deviation of the natural logarithm."""


class Recorded(Section):
    """Measured times, each with the same probability."""

    kind: Literal["recorded"]
    seconds: Annotated[tuple[Positive, ...], Field(min_length=1)]


class Stragglers(Section):
    """Times in which any mini-batch of any learner may take several times as long."""

    kind: Literal["stragglers"]
    usual: Annotated[Constant | Lognormal | Recorded, Field(discriminator="kind")]
    probability: Annotated[float, Field(gt=0, lt=1)]
    factor: Annotated[float, Field(gt=1, le=1e6)]


ComputeTime = Annotated[Constant | Lognormal | Recorded | Stragglers, Field(discriminator="kind")]


def quantiles(times: ComputeTime, uniform: FloatArray) -> FloatArray:
    """Return the seconds for numbers drawn uniformly between 0 and 1."""
    match times:
        case Constant(seconds=seconds):
            return np.full_like(uniform, seconds)
        case Lognormal(median=median, sigma=sigma):
            normal: FloatArray = require_scipy("scipy.special").ndtri(uniform)
            return median * np.exp(sigma * normal)
        case Recorded(seconds=record):
            places = (uniform * len(record)).astype(np.int64)
            return np.asarray(record, dtype=np.float64)[places]
        case Stragglers(usual=usual, probability=probability, factor=factor):
            slow = uniform < probability
            rest = (uniform - probability) / (1 - probability)
            found = quantiles(usual, np.where(slow, uniform / probability, rest))
            return np.where(slow, factor * found, found)
        case _:
            assert_never(times)


def expectation(times: ComputeTime) -> float:
    """Return the mean in seconds."""
    match times:
        case Constant(seconds=seconds):
            return seconds
        case Lognormal(median=median, sigma=sigma):
            return median * math.exp(sigma**2 / 2)
        case Recorded(seconds=record):
            return float(np.mean(record))
        case Stragglers(usual=usual, probability=probability, factor=factor):
            return expectation(usual) * (1 + probability * (factor - 1))
        case _:
            assert_never(times)


def compute_times(
    times: ComputeTime, *, seed: int, learner: int, factor: float = 1.0
) -> Iterator[float]:
    """Yield the seconds of each mini-batch of a learner that is slower by `factor`."""
    for block in count(step=_BLOCKS):
        words = random_words(
            seed, Stream.COMPUTE_TIME, block=block, num_blocks=_BLOCKS, part=learner
        )
        # 52 bits, and half a bit that keeps the ends out, where a quantile may be infinite.
        bits = (words.reshape(_BLOCKS * WORDS_PER_BLOCK) >> np.uint64(12)).astype(np.float64)
        uniform: FloatArray = (bits + 0.5) * 2.0**-52
        yield from (factor * quantiles(times, uniform)).tolist()


class Link(Section):
    """The network link of a host, the same in both directions."""

    bandwidth: Positive | None = None
    """Bytes per second in each direction; null: no limit."""

    latency: NonNegative = 0.0
    """Seconds that this link adds to every message."""


class Serving(Section):
    """Time of a server, which does one of these after the other."""

    pull: NonNegative = 0.0
    """Seconds to copy a byte of the weights for a learner."""

    gradient: NonNegative = 0.0
    """Seconds to add a byte of one gradient to the mean of an update."""

    update: NonNegative = 0.0
    """Seconds to update a byte of the weights."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Learners, the servers that hold the weights, and the times of computation and links."""

    learners: int
    compute: ComputeTime
    """Seconds for the gradient of one mini-batch."""

    slow: Mapping[int, float] = field(default_factory=dict)
    """Factors on the time of all mini-batches of some learners, counted from 0."""

    link: Link = field(default_factory=Link)
    """Link of every learner."""

    server_link: Link | None = None
    """Link of every server on a host of its own; None: the same as of a learner."""

    serving: Serving | None = None
    """None: servers take no time."""

    model_bytes: float = 0.0
    """Bytes of the weights, or of a gradient, over all servers."""

    shares: Sequence[float] = ()
    """Bytes on each server; empty: equal parts of model_bytes."""

    sharing: Literal["queue", "fair"] = "queue"
    """How messages share a link: one after the other, or all at the same time at fair rates, as TCP
    connections do. Fair rates take longer to simulate."""
