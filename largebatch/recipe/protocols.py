"""Protocols: who waits for whom between gradients and updates.

Without a section, all workers wait for each other in every update (the synchronous core). With one,
learners compute gradients of mini-batches and push them to parameter servers, which update the
weights that the learners pull (Rudra, arXiv:1509.04210; staleness-aware SGD, arXiv:1511.05950).

`batch.global_batch` keeps its meaning, the samples of one update; a learner's mini-batch (mu) is
its part of it, global_batch over the gradients that an update takes. How many learners there are
decides what asynchronous training computes, so it is a part of the recipe.
"""

from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import Field, model_validator

from largebatch.recipe.sections import Batch, Duration, Momentum, Positive, Section, Updates

if TYPE_CHECKING:
    from largebatch.recipe.recipe import Recipe

MAX_LEARNERS = 65_536


class Centralised(Section):
    """Servers that train nothing."""

    centralised: Annotated[int, Field(ge=1, le=MAX_LEARNERS)]
    """How many. Each holds whole tensors of the model, about as many bytes as the others. With
    softsync and asynchronous, a learner that is lost does not end the run."""


class _Protocol(Section):
    """What all protocols have."""

    learners: Annotated[int, Field(ge=1, le=MAX_LEARNERS)]
    """Workers that compute gradients (lambda)."""

    servers: Literal["decentralised"] | Centralised = "decentralised"
    """Where the weights are. `decentralised`: a server beside every learner, in its process, with a
    part of the weights; --workers is the number of learners. `{centralised: S}`: in S processes of
    their own, which --workers counts too: it is learners + S."""

    @property
    def dedicated(self) -> int:
        """Workers that are servers and nothing else."""
        return self.servers.centralised if isinstance(self.servers, Centralised) else 0

    @property
    def num_servers(self) -> int:
        """Parts that the weights are divided into."""
        return self.dedicated or self.learners

    @property
    def workers(self) -> int:
        """Processes in all."""
        return self.learners + self.dedicated

    @property
    def gradients(self) -> int:
        """Gradients that an update takes; here one of every learner."""
        return self.learners

    @property
    def optional_learners(self) -> range:
        """Learners that the run goes on without when they fail; here none."""
        return range(0)


class _Free(_Protocol):
    """Protocols in which no learner waits for another."""

    @property
    def optional_learners(self) -> range:
        """All but learner 0, which keeps the record, if no server fails with a learner."""
        return range(1, self.learners) if self.dedicated else range(0)


class Hardsync(_Protocol):
    """Every update takes one gradient of each learner, and all of them wait for it."""

    kind: Literal["hardsync"]

    modulation: Literal["none", "sqrt"] = "none"
    """`sqrt`: the rate is that of `schedule` times sqrt(global_batch / reference_batch)
    (arXiv:1509.04210)."""

    reference_batch: Batch | None = None
    """With modulation: sqrt, the batch for which schedule.peak_lr was found."""

    @model_validator(mode="after")
    def _sqrt_has_a_reference(self) -> Self:
        if (self.modulation == "sqrt") != (self.reference_batch is not None):
            raise ValueError("modulation: sqrt and reference_batch belong together")
        return self


class Softsync(_Free):
    """An update takes any floor(learners / n) gradients, and no learner waits.

    This is n-softsync. A gradient is then about n updates late (its staleness).
    """

    kind: Literal["softsync"]

    n: Annotated[int, Field(ge=1, le=MAX_LEARNERS)]
    """From 1, as many gradients as learners, to the number of learners: asynchronous."""

    modulation: Literal["none", "n", "staleness"]
    """The rate of `schedule` as it is (`none`), over n (`n`, arXiv:1509.04210), or for each
    gradient over its own staleness (`staleness`, arXiv:1511.05950)."""

    @property
    def gradients(self) -> int:
        """Gradients that an update takes."""
        return self.learners // self.n

    @model_validator(mode="after")
    def _an_update_takes_a_gradient(self) -> Self:
        if self.n > self.learners:
            raise ValueError(
                f"n ({self.n}) must be at most learners ({self.learners}): an update would take "
                f"floor({self.learners} / {self.n}) = 0 gradients"
            )
        return self


class Asynchronous(_Free):
    """Every gradient is an update: softsync with n = learners.

    At a fixed rate this is Downpour SGD (Dean et al. 2012).
    """

    kind: Literal["asynchronous"]

    modulation: Literal["none", "n", "staleness"]
    """As of softsync, with n = learners."""

    @property
    def gradients(self) -> int:
        """Gradients that an update takes."""
        return 1


class Outer(Section):
    """The optimizer of the servers, whose gradient is the mean of what local steps changed."""

    lr: Positive = 1.0
    momentum: Momentum = 0.0
    nesterov: bool = False
    """The defaults average weights (post-local SGD). DiLoCo: lr 0.7, momentum 0.9, nesterov."""

    @model_validator(mode="after")
    def _nesterov_has_momentum(self) -> Self:
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov needs a momentum above 0")
        return self


class LocalSteps(_Protocol):
    """Learners make updates of their own, and at intervals average what these changed.

    Post-local SGD (arXiv:1808.07217); with an outer optimizer, DiLoCo (arXiv:2311.08105). A step is
    one local update of every learner, so global_batch is learners times a mini-batch here too.
    """

    kind: Literal["local_steps"]

    steps: Updates
    """Local updates between two averages (H). An evaluation, and a checkpoint on the way, come at
    the first average after their time; the last average of a stage may come after fewer."""

    begin: Duration | None = None
    """Until here all updates are those of hardsync, for post-local SGD; null: from the start."""

    outer: Outer = Outer()


Protocol = Annotated[Hardsync | Softsync | Asynchronous | LocalSteps, Field(discriminator="kind")]


def mini_batch(recipe: "Recipe") -> int:
    """Return the samples of one gradient (mu)."""
    assert recipe.protocol is not None
    return recipe.batch.global_batch // recipe.protocol.gradients


def describe_protocol(recipe: "Recipe") -> str:
    """Return in words what an update is made of, and where the weights are."""
    protocol = recipe.protocol
    assert protocol is not None
    where = f"{protocol.dedicated} servers" if protocol.dedicated else "a server beside each"
    return (
        f"{protocol.kind}: {recipe.batch.global_batch:,} samples an update = {protocol.gradients} "
        f"gradients x {mini_batch(recipe):,}; {protocol.learners} learners, {where}: "
        f"{protocol.workers} workers"
    )


def require_fit(recipe: "Recipe") -> None:
    """Raise ValueError where other sections and the protocol cannot be had together."""
    protocol = recipe.protocol
    assert protocol is not None
    for setting, given in _without_meaning(recipe).items():
        if given:
            raise ValueError(f"{setting} has no meaning with protocol: leave one of the two out")
    batch, size = recipe.batch, mini_batch(recipe)
    if batch.global_batch % protocol.gradients:
        raise ValueError(
            f"batch.global_batch ({batch.global_batch}) must be a multiple of the "
            f"{protocol.gradients} gradients that an update of protocol.kind: {protocol.kind} takes"
        )
    if size % (batch.bn_span or 1):
        raise ValueError(
            f"batch.bn_span ({batch.bn_span}) must divide the {size} samples of a learner's "
            "mini-batch (batch.global_batch over the gradients of an update): with protocol each "
            "learner normalises by itself"
        )
    if recipe.execution.device_batch not in {None, size}:
        raise ValueError(
            f"execution.device_batch ({recipe.execution.device_batch}) must be a learner's "
            f"mini-batch with protocol, which is {size}; leave it out"
        )


def _without_meaning(recipe: "Recipe") -> dict[str, bool]:
    """Return the settings that only the synchronous core has, and whether each is given."""
    polish, monitored = recipe.polish, set(recipe.monitor) - {"generalization_gap"}
    return {
        f"optimizer.kind: {recipe.optimizer.kind}": recipe.optimizer.kind not in {"lars", "sgd"},
        "batch.schedule": bool(recipe.batch.schedule),
        f"reduction.kind: {recipe.reduction.kind}": recipe.reduction.kind != "sum",
        f"reduction.dtype: {recipe.reduction.dtype}": recipe.reduction.dtype != "fp32",
        "precision: fp16": recipe.precision == "fp16",
        f"nonfinite.action: {recipe.nonfinite.action}": recipe.nonfinite.action != "stop",
        f"monitor: {min(monitored, default='')}": bool(monitored),
        "execution.decoder: dali": recipe.execution.decoder == "dali",
        "polish.ema": polish is not None and polish.ema is not None,
        "polish.swa": polish is not None and polish.swa is not None,
        "polish.swap": polish is not None and polish.swap is not None,
    }
