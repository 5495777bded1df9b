"""The machines of a simulation: learners, servers, and the links between them."""

from abc import abstractmethod
from collections.abc import Iterator
from itertools import count
from typing import Annotated, Literal, Self

import numpy as np
import numpy.typing as npt
from pydantic import Field, model_validator

from largebatch.data.order import WORDS_PER_BLOCK, Stream, random_words
from largebatch.optional import require_scipy
from largebatch.recipe.section import NonNegative, Positive, Section

FloatArray = npt.NDArray[np.float64]

_BLOCKS = 16
"""Number of blocks drawn at a time, which is 64 mini-batches."""


class Distribution(Section):
    """Base class of the distributions."""

    @abstractmethod
    def at(self, uniform: FloatArray) -> FloatArray:
        """Return the seconds for numbers drawn uniformly between 0 and 1."""

    @property
    @abstractmethod
    def expectation(self) -> float:
        """The mean, in seconds."""


class Constant(Distribution):
    """The same time for every mini-batch."""

    kind: Literal["constant"]
    seconds: Positive

    def at(self, uniform: FloatArray) -> FloatArray:
        """Return the same seconds for all."""
        return np.full_like(uniform, self.seconds)

    @property
    def expectation(self) -> float:
        """The mean, in seconds."""
        return self.seconds


class Exponential(Distribution):
    """Shifted exponential distribution (arXiv:1803.01113); the shift is 0 by default."""

    kind: Literal["exponential"]
    mean: Positive
    """Mean seconds above the least time."""

    least: NonNegative = 0.0
    """Least seconds, where the distribution begins."""

    def at(self, uniform: FloatArray) -> FloatArray:
        """Return the quantiles."""
        return self.least - self.mean * np.log1p(-uniform)

    @property
    def expectation(self) -> float:
        """The mean, in seconds."""
        return self.least + self.mean


class Lognormal(Distribution):
    """Lognormal distribution, as is common for times on shared machines."""

    kind: Literal["lognormal"]
    median: Positive
    sigma: Positive
    """Standard deviation of the natural logarithm."""

    def at(self, uniform: FloatArray) -> FloatArray:
        """Return the quantiles."""
        quantiles: FloatArray = require_scipy("scipy.special").ndtri(uniform)
        return self.median * np.exp(self.sigma * quantiles)

    @property
    def expectation(self) -> float:
        """The mean, in seconds."""
        return float(self.median * np.exp(self.sigma**2 / 2))


class Recorded(Distribution):
    """Measured times, each with the same probability."""

    kind: Literal["recorded"]
    seconds: Annotated[tuple[Positive, ...], Field(min_length=1)]

    def at(self, uniform: FloatArray) -> FloatArray:
        """Return one of the measured times for each."""
        places = (uniform * len(self.seconds)).astype(np.int64)
        found: FloatArray = np.asarray(self.seconds, dtype=np.float64)[places]
        return found

    @property
    def expectation(self) -> float:
        """The mean, in seconds."""
        return float(np.mean(self.seconds))


class Stragglers(Distribution):
    """Times in which any mini-batch of any learner may take several times as long."""

    kind: Literal["stragglers"]
    usual: Annotated[Constant | Exponential | Lognormal | Recorded, Field(discriminator="kind")]
    probability: Annotated[float, Field(gt=0, lt=1)]
    factor: Annotated[float, Field(gt=1, le=1e6)]

    def at(self, uniform: FloatArray) -> FloatArray:
        """Return the usual times, multiplied where the number is small."""
        slow = uniform < self.probability
        rest = (uniform - self.probability) / (1 - self.probability)
        seconds = self.usual.at(np.where(slow, uniform / self.probability, rest))
        return np.where(slow, self.factor * seconds, seconds)

    @property
    def expectation(self) -> float:
        """The mean, in seconds."""
        return self.usual.expectation * (1 + self.probability * (self.factor - 1))


ComputeTime = Annotated[
    Constant | Exponential | Lognormal | Recorded | Stragglers, Field(discriminator="kind")
]


def compute_times(
    distribution: Distribution, *, seed: int, learner: int, factor: float = 1.0
) -> Iterator[float]:
    """Yield the seconds of each mini-batch of a learner that is slower by `factor`."""
    for block in count(step=_BLOCKS):
        words = random_words(
            seed, Stream.COMPUTE_TIME, block=block, num_blocks=_BLOCKS, part=learner
        )
        # 52 bits, and half a bit that keeps the ends out, where a quantile may be infinite.
        bits = (words.reshape(_BLOCKS * WORDS_PER_BLOCK) >> np.uint64(12)).astype(np.float64)
        uniform: FloatArray = (bits + 0.5) * 2.0**-52
        yield from (factor * distribution.at(uniform)).tolist()


MAX_LEARNERS = 100_000


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


class Cluster(Section):
    """Learners, the servers that hold the weights, and the times of computation and links."""

    learners: Annotated[int, Field(ge=1, le=MAX_LEARNERS)]
    compute: ComputeTime
    """Seconds for the gradient of one mini-batch."""

    slow: dict[int, Annotated[float, Field(gt=0, le=1e6)]] = Field(default_factory=dict)
    """Factors on the time of all mini-batches of some learners, counted from 0."""

    link: Link = Link()
    """Link of every learner."""

    server_link: Link | None = None
    """Link of every server on a host of its own; null: the same as of a learner."""

    serving: Serving | None = None
    """Seconds of the servers by bytes; null: they take no time."""

    model_bytes: NonNegative = 0.0
    """Bytes of the weights, or of a gradient, over all servers."""

    shares: tuple[NonNegative, ...] = ()
    """Bytes on each server; empty: equal parts of model_bytes."""

    sharing: Literal["queue", "fair"] = "queue"
    """How messages share a link: one after the other, or all at the same time at fair rates, as TCP
    connections do. Fair rates take longer to simulate."""

    @model_validator(mode="after")
    def _slow_ones_are_there(self) -> Self:
        for learner in self.slow:
            if not 0 <= learner < self.learners:
                raise ValueError(
                    f"slow: there is no learner {learner}; they are 0 to {self.learners - 1}"
                )
        return self
