"""Distributions of the seconds in which a learner computes the gradient of one mini-batch.

A distribution maps numbers between 0 and 1 to seconds. The numbers are counter-based
(largebatch.data.order): the k-th mini-batch of a learner takes the same time whatever the other
learners do, so that protocols are compared on the same draws.

>>> from itertools import islice
>>> times = compute_times(Exponential(kind="exponential", mean=2.0), seed=1, learner=0)
>>> [round(seconds, 3) for seconds in islice(times, 3)]
[3.39, 1.287, 1.486]
"""

from abc import abstractmethod
from collections.abc import Iterator
from itertools import count
from typing import Annotated, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field

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
