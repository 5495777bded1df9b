"""Distributions of how long a learner computes the gradient of one mini-batch, in seconds.

A distribution is a function from a number between 0 and 1 to seconds, and the numbers are
counter-based (largebatch.data.order): the k-th mini-batch of a learner takes the same time whatever
the other learners do, so that two protocols are compared on the same draws.

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
from scipy.special import ndtri

from largebatch.data.order import WORDS_PER_BLOCK, Stream, random_words
from largebatch.recipe.sections import NonNegative, Positive, Section

FloatArray = npt.NDArray[np.float64]

_BLOCKS = 16
"""Drawn at a time: 64 mini-batches."""


class Distribution(Section):
    """Base of the distributions."""

    @abstractmethod
    def at(self, uniform: FloatArray) -> FloatArray:
        """Return the seconds that belong to numbers drawn evenly between 0 and 1."""

    @property
    @abstractmethod
    def expectation(self) -> float:
        """The mean, in seconds."""


class Constant(Distribution):
    """Every mini-batch takes as long."""

    kind: Literal["constant"]
    seconds: Positive

    def at(self, uniform: FloatArray) -> FloatArray:
        """Return the same number for all."""
        return np.full_like(uniform, self.seconds)

    @property
    def expectation(self) -> float:
        """The mean, in seconds."""
        return self.seconds


class Exponential(Distribution):
    """Exponential above a least time, which is 0 unless it is given (arXiv:1803.01113)."""

    kind: Literal["exponential"]
    mean: Positive
    """Of what comes on top of the least time."""

    least: NonNegative = 0.0
    """A shifted exponential distribution begins here."""

    def at(self, uniform: FloatArray) -> FloatArray:
        """Return the quantiles."""
        return self.least - self.mean * np.log1p(-uniform)

    @property
    def expectation(self) -> float:
        """The mean, in seconds."""
        return self.least + self.mean


class Lognormal(Distribution):
    """The logarithm is normal, as times on shared machines often are."""

    kind: Literal["lognormal"]
    median: Positive
    sigma: Positive
    """Standard deviation of the natural logarithm."""

    def at(self, uniform: FloatArray) -> FloatArray:
        """Return the quantiles."""
        found: FloatArray = self.median * np.exp(self.sigma * ndtri(uniform))
        return found

    @property
    def expectation(self) -> float:
        """The mean, in seconds."""
        return float(self.median * np.exp(self.sigma**2 / 2))


class Recorded(Distribution):
    """One of the times that were measured, each as likely as any other."""

    kind: Literal["recorded"]
    seconds: Annotated[tuple[Positive, ...], Field(min_length=1)]

    def at(self, uniform: FloatArray) -> FloatArray:
        """Return a time of the record for each."""
        places = (uniform * len(self.seconds)).astype(np.int64)
        found: FloatArray = np.asarray(self.seconds, dtype=np.float64)[places]
        return found

    @property
    def expectation(self) -> float:
        """The mean, in seconds."""
        return float(np.mean(self.seconds))


class Stragglers(Distribution):
    """Any mini-batch of any learner may take several times as long."""

    kind: Literal["stragglers"]
    usual: Annotated[Constant | Exponential | Lognormal | Recorded, Field(discriminator="kind")]
    probability: Annotated[float, Field(gt=0, lt=1)]
    factor: Annotated[float, Field(gt=1, le=1e6)]

    def at(self, uniform: FloatArray) -> FloatArray:
        """Return the usual times, and where the number is small a multiple of them."""
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
    """Yield the seconds of each mini-batch of a learner, which is `factor` times as slow."""
    for block in count(step=_BLOCKS):
        words = random_words(
            seed, Stream.COMPUTE_TIME, block=block, num_blocks=_BLOCKS, part=learner
        )
        # 52 bits, and half a bit that keeps the ends out, where a quantile may be infinite.
        bits = (words.reshape(_BLOCKS * WORDS_PER_BLOCK) >> np.uint64(12)).astype(np.float64)
        uniform: FloatArray = (bits + 0.5) * 2.0**-52
        yield from (factor * distribution.at(uniform)).tolist()
