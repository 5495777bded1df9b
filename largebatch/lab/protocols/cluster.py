"""The machines of a simulation: learners, servers, and the links between them."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from largebatch.lab.protocols.compute_times import ComputeTime
from largebatch.recipe.section import NonNegative, Positive, Section

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
