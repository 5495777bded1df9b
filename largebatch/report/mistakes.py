"""Whether a change of the accuracy of a model is more than chance."""

import math
from dataclasses import dataclass

from largebatch.report.run import Stage


@dataclass(frozen=True, slots=True)
class Change:
    """How many more validation images are right, and how many that would be by chance."""

    samples: int
    images: int
    """Fewer, if negative."""

    noise: float
    """Two standard errors, in images."""

    fixed: int | None = None
    broken: int | None = None
    """Images that were wrong and are right, and the reverse, where that is known."""

    @property
    def beyond_noise(self) -> bool:
        """True if the change is larger than chance explains."""
        return abs(self.images) > self.noise


def change_from(before: Stage, after: Stage) -> Change:
    """Return what changed from the end of one stage to that of another on the same images.

    Where both were recorded image by image, chance is that of McNemar's test: each image that
    changed could as well have changed the other way. Else it is that of two independent samples,
    which is larger.
    """
    samples, ends = after.after.samples, (before.after.top1, after.after.top1)
    images = round((ends[1] - ends[0]) * samples)
    if before.mistakes is None or after.mistakes is None:
        variance = sum(top1 * (1 - top1) for top1 in ends) * samples
        return Change(samples, images, 2 * math.sqrt(variance))
    then, now = set(before.mistakes.samples), set(after.mistakes.samples)
    fixed, broken = len(then - now), len(now - then)
    return Change(samples, images, 2 * math.sqrt(fixed + broken), fixed, broken)
