"""The section `protocol`: which workers wait for which between gradients and updates.

Without the section, all workers wait for each other in every update (the synchronous core). With
it, learners compute gradients of mini-batches and push them to parameter servers, which update the
weights that the learners pull (Rudra, arXiv:1509.04210; staleness-aware SGD, arXiv:1511.05950).

`batch.global_batch` keeps its meaning, the samples of one update; a learner's mini-batch (mu) is
its part of it. The number of learners decides what asynchronous training computes, so it is a part
of the recipe.
"""

import math
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from largebatch.errors import PlanError
from largebatch.formatting import plural
from largebatch.recipe.section import Batch, Choice, Section

MAX_LEARNERS = 65_536


class Centralised(Section):
    """Servers that train nothing."""

    centralised: Annotated[int, Field(ge=1, le=MAX_LEARNERS)]
    """Number of servers. Each holds whole tensors, about as many bytes as the others."""


class _Workers(Section):
    learners: Annotated[int, Field(ge=1, le=MAX_LEARNERS)]
    """Workers that compute gradients (lambda)."""

    servers: Literal["decentralised"] | Centralised = "decentralised"
    """Where the weights are. `decentralised`: a server beside every learner, in its process, with a
    part of the weights; --workers is the number of learners. `{centralised: S}`: in S processes of
    their own, which --workers counts too: it is learners + S."""


class Protocol(Choice, _Workers):
    """Base of the protocols; a builder takes the recipe, the state of the run and the backend.

    It returns `largebatch.training.session.Updates`.
    """

    group: ClassVar = "protocols"

    waits: ClassVar[bool] = False
    """True if a learner waits after a push for the update with its gradient. An update then has one
    gradient of every learner."""

    @property
    def divides_by_staleness(self) -> bool:
        """True if the learning rate of each gradient is divided by its staleness."""
        return False

    def rate_factor(self, mini_batch: int) -> float:  # noqa: ARG002 -- for subclasses
        """Return the factor of the learning rate; `mini_batch` is in samples (mu)."""
        return 1.0

    def mini_batch(self, global_batch: int) -> int:
        """Return the samples of one gradient (mu)."""
        return global_batch // self.gradients

    @property
    def dedicated(self) -> int:
        """Number of workers that are servers only."""
        return self.servers.centralised if isinstance(self.servers, Centralised) else 0

    @property
    def num_servers(self) -> int:
        """Number of parts that the weights are divided into."""
        return self.dedicated or self.learners

    @property
    def workers(self) -> int:
        """Number of processes in all."""
        return self.learners + self.dedicated

    @property
    def gradients(self) -> int:
        """Number of gradients per update; here one of every learner."""
        return self.learners

    def require_workers(self, workers: int) -> None:
        """Raise PlanError unless the protocol is for this number of workers."""
        if workers != self.workers:
            servers = f" + {plural(self.dedicated, 'server')}" if self.dedicated else ""
            raise PlanError(
                f"protocol has {self.learners} learners{servers}: start {self.workers} workers, or "
                f"change protocol.learners; got {workers}"
            )


class Hardsync(Protocol):
    """Every update takes one gradient of each learner, and all learners wait for it."""

    builder: ClassVar = "largebatch.lab.protocols.stage:open_updates"
    waits: ClassVar = True

    kind: Literal["hardsync"]

    modulation: Literal["none", "sqrt"] = "none"
    """`sqrt`: the learning rate is that of `schedule` times sqrt(global_batch / reference_batch)
    (arXiv:1509.04210)."""

    reference_batch: Batch | None = None
    """With modulation: sqrt, the batch that schedule.peak_lr was tuned for."""

    def rate_factor(self, mini_batch: int) -> float:
        """Return the square root of the batch over the reference batch, if that is given."""
        if self.reference_batch is None:
            return 1.0
        return math.sqrt(self.learners * mini_batch / self.reference_batch)

    @model_validator(mode="after")
    def _sqrt_has_a_reference(self) -> Self:
        if (self.modulation == "sqrt") != (self.reference_batch is not None):
            raise ValueError("modulation: sqrt and reference_batch belong together")
        return self


class Softsync(Protocol):
    """An update takes any floor(learners / n) gradients, and no learner waits.

    This is n-softsync. A gradient is then about n updates late (its staleness).
    """

    builder: ClassVar = "largebatch.lab.protocols.stage:open_updates"

    kind: Literal["softsync"]

    n: Annotated[int, Field(ge=1, le=MAX_LEARNERS)]
    """From 1, where an update takes as many gradients as there are learners, to the number of
    learners, where it takes one, as asynchronous does."""

    modulation: Literal["none", "n", "staleness"]
    """The learning rate of `schedule` as it is (`none`), divided by n (`n`, arXiv:1509.04210), or
    for each gradient divided by its staleness (`staleness`, arXiv:1511.05950)."""

    @property
    def gradients(self) -> int:
        """Number of gradients per update."""
        return self.learners // self.n

    @property
    def divides_by_staleness(self) -> bool:
        """True with modulation: staleness."""
        return self.modulation == "staleness"

    def rate_factor(self, mini_batch: int) -> float:  # noqa: ARG002 -- the base's signature
        """Return 1/n with modulation: n."""
        return 1 / self.n if self.modulation == "n" else 1.0

    @model_validator(mode="after")
    def _an_update_takes_a_gradient(self) -> Self:
        if self.n > self.learners:
            raise ValueError(
                f"n ({self.n}) must be at most learners ({self.learners}): an update would take "
                f"floor({self.learners} / {self.n}) = 0 gradients"
            )
        return self


class Asynchronous(Protocol):
    """Every gradient is an update: softsync with n = learners.

    At a fixed learning rate this is Downpour SGD (Dean et al. 2012).
    """

    builder: ClassVar = "largebatch.lab.protocols.stage:open_updates"

    kind: Literal["asynchronous"]

    modulation: Literal["none", "n", "staleness"]
    """The same as with softsync, with n = learners."""

    @property
    def n(self) -> int:
        """The n of softsync that is the same."""
        return self.learners

    @property
    def divides_by_staleness(self) -> bool:
        """True with modulation: staleness."""
        return self.modulation == "staleness"

    def rate_factor(self, mini_batch: int) -> float:  # noqa: ARG002 -- the base's signature
        """Return 1/n with modulation: n."""
        return 1 / self.n if self.modulation == "n" else 1.0

    @property
    def gradients(self) -> int:
        """Number of gradients per update."""
        return 1
