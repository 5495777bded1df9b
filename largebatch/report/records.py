"""What a run folder says, every number with its type.

Stages and their accuracies come from the log, which a killed run has too; the summary adds what
only the end of a run knows.
"""

import math
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Annotated, Literal

import numpy as np
import numpy.typing as npt
from pydantic import BeforeValidator

FloatArray = npt.NDArray[np.float64]
StageName = Literal["train", "clean", "ema", "affine", "statistics"]
Measured = Annotated[float, BeforeValidator(lambda value: math.nan if value is None else value)]
"""A number that may have come out as none: the log then holds null, which is read as NaN."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The part of a plan that a report shows."""

    workers: int
    global_batch: int
    device_batch: int
    accumulation: int
    steps: int
    steps_per_epoch: float
    affine_steps: int = 0

    @property
    def updates(self) -> int:
        """Those of the schedule, and those after it."""
        return self.steps + self.affine_steps


@dataclass(frozen=True, slots=True)
class Start:
    """The run began, or went on."""

    time: datetime
    resume_step: int
    recipe: str
    plan: Plan


@dataclass(frozen=True, slots=True)
class Step:
    """One optimizer update."""

    stage: StageName
    step: int
    loss: Measured
    lr: float
    images_per_second: float
    skipped: bool = False
    """The gradients overflowed in fp16, so no weight was changed."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The validation data after so many updates; accuracies are parts of 1."""

    stage: StageName
    step: int
    epoch: float
    top1: float
    top5: float
    loss: Measured
    samples: int


@dataclass(frozen=True, slots=True)
class Decision:
    """Whether a stage was kept: top-1 on training pictures held out, before it and after it."""

    stage: StageName
    step: int
    samples: int
    before: float
    after: float
    kept: bool


@dataclass(frozen=True, slots=True)
class Note:
    """What else there is to say of a stage."""

    stage: StageName
    step: int
    text: str


@dataclass(frozen=True, slots=True)
class Layer:
    """How far one BatchNorm layer's polished statistics lie from its running ones."""

    name: str
    mean_shift: Measured
    log_variance_ratio: Measured
    shift_quantiles: tuple[Measured, ...] = ()
    ratio_quantiles: tuple[Measured, ...] = ()
    """Over its channels, and with their signs; old logs have none."""


@dataclass(frozen=True, slots=True)
class Drift:
    """What the statistics stage changed, layer by layer from the input on."""

    samples: int
    layers: tuple[Layer, ...]
    step: int = 0
    quantiles: tuple[float, ...] = ()
    """Which ones those of the layers are."""


@dataclass(frozen=True, slots=True)
class StageCost:
    """What a stage took."""

    name: str
    steps: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Summary:
    """The part of summary.json that the log does not hold."""

    status: str
    commit: str | None
    versions: dict[str, str]
    backend: str
    steps: int
    skipped_steps: int
    seconds: float
    images_per_second: float | None
    peak_memory_bytes: int | None
    stages: tuple[StageCost, ...]


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage as far as it was evaluated."""

    name: StageName
    before: Evaluation | None
    after: Evaluation
    cost: StageCost | None
    """None where the stage, or the run, did not end by itself."""

    decision: Decision | None = None
    """None where nobody judged it: it was kept."""

    @property
    def kept(self) -> bool:
        """Whether what it did to the model stayed."""
        return self.decision is None or self.decision.kept


@dataclass(frozen=True)
class Trace:
    """The updates of one stage as columns."""

    stage: StageName
    step: FloatArray
    loss: FloatArray
    lr: FloatArray
    images_per_second: FloatArray


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run folder."""

    folder: str
    starts: tuple[Start, ...]
    steps: tuple[Step, ...]
    evaluations: tuple[Evaluation, ...]
    drift: Drift | None
    decisions: tuple[Decision, ...] = ()
    notes: tuple[Note, ...] = ()
    summary: Summary | None
    recipe: str | None
    """The text of recipe.yaml."""

    @property
    def name(self) -> str:
        """The recipe's name."""
        return self.starts[-1].recipe

    @property
    def plan(self) -> Plan:
        """How the last part of the run was divided."""
        return self.starts[-1].plan

    @property
    def num_steps(self) -> int:
        """Updates made, as far as anything tells."""
        if self.summary is not None:
            return self.summary.steps
        logged = [step.step + 1 for step in self.steps[-1:]]
        return max(logged + [evaluation.step for evaluation in self.evaluations], default=0)

    @cached_property
    def traces(self) -> tuple[Trace, ...]:
        """The updates by stage, in order."""
        names = dict.fromkeys(step.stage for step in self.steps)
        return tuple(_trace(name, [s for s in self.steps if s.stage == name]) for name in names)

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """Each stage with the last evaluation in it and in the one it went on from."""
        costs = {cost.name: cost for cost in self.summary.stages} if self.summary else {}
        last = {evaluation.stage: evaluation for evaluation in self.evaluations}
        decisions = {decision.stage: decision for decision in self.decisions}
        stages: list[Stage] = []
        before = None
        for name, after in last.items():
            stages.append(Stage(name, before, after, costs.get(name), decisions.get(name)))
            if stages[-1].kept:
                before = after
        return tuple(stages)

    @property
    def drift_kept(self) -> bool:
        """Whether the statistics that were measured are those of the model."""
        judged = {decision.stage: decision.kept for decision in self.decisions}
        return judged.get("statistics", True)

    @property
    def result(self) -> Evaluation | None:
        """The last evaluation of the model as it was left; None if there was none."""
        kept = [stage.after for stage in self.stages if stage.kept]
        return kept[-1] if kept else None


def _trace(stage: StageName, steps: list[Step]) -> Trace:
    columns = np.array(
        [(s.step, s.loss, s.lr, s.images_per_second) for s in steps], dtype=np.float64
    )
    return Trace(stage, *columns.T)
