"""Every record of a run, typed once: what trackers follow, `log.jsonl` holds and reports read.

`log.jsonl` has one JSON object a line, in the order in which things happened. A resumed run
appends; its `start` record says from which step on earlier ones are superseded. A number that is
not finite, such as the loss of a step that overflowed in fp16, is null there, for JSON has no NaN;
it is read as NaN. A field that older runs did not write has a default, so their folders still draw.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Literal, Protocol

from pydantic import BeforeValidator, ConfigDict, Field, PlainSerializer, TypeAdapter
from pydantic_core import to_json

from largebatch.errors import printable
from largebatch.recipe.arithmetic.plan import Plan
from largebatch.storage import write_whole

RECIPE, LOG, SUMMARY, CHECKPOINTS = "recipe.yaml", "log.jsonl", "summary.json", "checkpoints"
REPORT, OVERVIEW, TRACE = "report.html", "report.png", "trace.json"
"""Names of the files of a run folder."""

StageName = Literal["train", "clean", "ema", "swa", "swap", "affine", "statistics"]
"""The stages of a run, in their order."""

Status = Literal["finished", "paused", "interrupted", "stopped", "failed"]
"""paused: saved at --max-steps; interrupted: saved where it ends, after a signal or near a time
limit; stopped: at once, by a second signal. Older folders have interrupted for paused, too."""

Measured = Annotated[float, BeforeValidator(lambda value: math.nan if value is None else value)]
"""A number that may not be finite: null in JSON, which is read as NaN."""

Printable = Annotated[str, PlainSerializer(printable, return_type=str)]
"""A text with names of files in it, whose bytes may be no UTF-8, as JSON is: those are escaped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """The run began, or went on."""

    event: Literal["start"] = "start"
    time: datetime
    resume_step: int
    """The first step to come; records of it and of later ones are superseded."""

    recipe: str
    """Its name."""

    plan: Plan
    unusable_images: int = 0
    """Images that `data index --drop-bad` left out."""

    layers: tuple[str, ...] = ()
    """With monitor: trust_ratios, the names of the parameters that LARS adapts, in their order."""

    weights_sha256: str | None = None
    """Of the file that training began with; null: the weights were drawn from the seed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One optimizer update."""

    event: Literal["step"] = "step"
    stage: StageName
    step: int
    epoch: float = math.nan
    """Passes over the training data after it."""

    loss: Measured
    """Mean over the global batch."""

    lr: float
    loss_scale: float = 1.0
    skipped: bool = False
    """The gradients overflowed in fp16, so no weight was changed."""

    step_seconds: float = math.nan
    images_per_second: float
    data_seconds: Measured = math.nan
    reduction_seconds: Measured = math.nan
    """Of the seconds of the step, what worker 0 waited for images and for the sums of gradients; on
    a GPU only what the GPU waited."""

    device_square: Measured = math.nan
    global_square: Measured = math.nan
    """With monitor: noise_scale, the squared lengths of the mean gradients over a device batch,
    which is the mean over the workers' first ones, and over the global batch."""

    noise_scale: Measured = math.nan
    """By the squares of this part of the run's last updates (NOISE_UPDATES), in samples."""

    gradient_norm: Measured = math.nan
    """With monitor: gradient_norm, the length of the gradient over the global batch."""

    trust_ratios: tuple[Measured, ...] = ()
    """With monitor: trust_ratios, those of the layers that the start names, in five digits. None in
    an update that was skipped or that LARS did not make; NaN of a layer without a gradient."""


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """With monitor: system, what every worker used since the record before, by worker."""

    event: Literal["system"] = "system"
    stage: StageName
    step: int
    """The update that had just been made."""

    cpu_percent: tuple[Measured, ...]
    """Of one core by the worker's process, so that four busy threads are 400."""

    memory_bytes: tuple[Measured, ...]
    """Resident memory of the process."""

    read_bytes_per_second: tuple[Measured, ...]
    written_bytes_per_second: tuple[Measured, ...]
    """From and to disks by the process; NaN where the system does not count them."""

    received_bytes_per_second: tuple[Measured, ...]
    sent_bytes_per_second: tuple[Measured, ...]
    """Over all networks of its machine but loopback; NaN where the system does not count them."""

    gpu_percent: tuple[Measured, ...]
    gpu_memory_bytes: tuple[Measured, ...]
    """Of the worker's GPU by NVML, over all processes; NaN without one, or without NVML."""

    seconds: tuple[Measured, ...] = ()
    """That this record is of: since the one before, or since this part of the run began."""

    peak_memory_bytes: tuple[Measured, ...] = ()
    """The most resident memory that the process has had so far."""


SYSTEM = tuple(each.name for each in fields(System) if each.name not in {"event", "stage", "step"})
"""What is measured of each worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The validation data after so many updates; accuracies are parts of 1."""

    event: Literal["evaluation"] = "evaluation"
    stage: StageName
    step: int
    epoch: float
    top1: float
    top5: float
    loss: Measured
    samples: int
    average_confidence: Measured = math.nan
    confidence_deviation: Measured = math.nan
    class_confidence_deviation: Measured = math.nan
    classes_never_correct: int | None = None
    perplexity: float | None = None
    """Recorded for text; see `Metric.is_recorded`."""

    seconds: float = math.nan


METRICS = (
    *("top1", "top5", "loss", "average_confidence", "confidence_deviation"),
    *("class_confidence_deviation", "perplexity"),
)
"""The numbers of an evaluation that trackers plot; one that is None is left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneralizationGap:
    """With monitor: generalization_gap, all images trained on, shown as validation images are."""

    event: Literal["generalization_gap"] = "generalization_gap"
    stage: StageName
    step: int
    samples: int
    top1: float
    loss: Measured
    """Mean cross-entropy on them, without label smoothing."""

    gap: Measured
    """Validation loss minus this loss."""

    seconds: Measured = math.nan
    """That this took, which are in those of the stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mistakes:
    """Which validation images are classified wrongly at the end of a stage, over all workers."""

    event: Literal["mistakes"] = "mistakes"
    stage: StageName
    step: int
    classes: tuple[Printable, ...]
    """Names, by label."""

    sizes: tuple[int, ...]
    """How many validation images each class has."""

    samples: tuple[int, ...]
    """The wrong ones as rows of the index of validation images, rising."""

    labels: tuple[int, ...]
    predicted: tuple[int, ...]
    """Their classes, and those that got the highest score."""

    worst: tuple[int, ...]
    """A few of `samples`: those of the largest loss, the largest first."""

    losses: tuple[Measured, ...]
    """Those of the worst."""

    confidences: tuple[Measured, ...] = ()
    """By class, the mean confidence of its correct images, if there are any; not in older logs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Whether a stage was kept: top-1 on training images held out, before it and after it."""

    event: Literal["decision"] = "decision"
    stage: StageName
    step: int
    samples: int
    before: float
    after: float
    kept: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """A remark on a stage."""

    event: Literal["note"] = "note"
    stage: StageName
    step: int
    text: Printable


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerDrift:
    """How far one BatchNorm layer's polished statistics lie from its running ones."""

    name: str
    channels: int
    mean_shift: Measured
    """Root mean square over the channels of (polished mean - running mean) / running std."""

    log_variance_ratio: Measured
    """Root mean square over the channels of ln(polished variance / running variance)."""

    shift_quantiles: tuple[Measured, ...] = ()
    ratio_quantiles: tuple[Measured, ...] = ()
    """Quantiles over the channels of these two, each with its sign."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """What the statistics pass changed, layer by layer from the input on."""

    event: Literal["drift"] = "drift"
    stage: StageName = "statistics"
    step: int = 0
    samples: int
    passes: int = 1
    settling: Measured = 0.0
    settled: bool = True
    """As in polish.Drift."""

    quantiles: tuple[float, ...] = ()
    """Which ones those of the layers are."""

    layers: tuple[LayerDrift, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One kind of operation in a profile, without the operations that it called."""

    name: str
    """PyTorch's."""

    calls: int
    host_seconds: float
    """Seconds of the processor in all calls."""

    device_seconds: float
    """Seconds of the kernels that it launched; 0 where the processor computes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """What updates of worker 0 took."""

    event: Literal["profile"] = "profile"
    stage: StageName
    step: int
    """Number of the last update, counted from 1."""

    first: int
    """Number of the first one."""

    seconds: float
    """Seconds from the start of the first to the end of the last."""

    host_seconds: float
    device_seconds: float
    """Sums over all operations; Python and waiting are the rest of the host's."""

    operations: tuple[Operation, ...]
    """The operations that took longest on the host or the device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """What an evaluation found; accuracies are parts of 1."""

    top1: float
    top5: float
    loss: Measured


@dataclass(frozen=True, slots=True, kw_only=True)
class StageResult:
    """A stage that has ended."""

    name: StageName
    steps: int
    """Updates made in it, which may be fewer than planned if it diverged."""

    seconds: float
    top1: float
    top5: float
    loss: Measured
    perplexity: float | None = None
    """After it, also where it was rolled back; the perplexity is recorded for text."""

    before: Accuracy | None = None
    """After the last stage that was kept; null for the first."""

    held_out: float | None = None
    """Top-1 on the training images held out; null where there are none."""

    kept: bool = True
    note: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """One run in numbers: summary.json. Accuracies are parts of 1, times seconds, on worker 0."""

    recipe: str
    commit: str | None
    """Of the source tree that ran, with `+` where it had changes; null outside a git checkout."""

    versions: dict[str, str]
    backend: str
    workers: int
    global_batch: int
    device_batch: int
    accumulation: int
    """Those with which a run begins, where the recipe has a batch schedule."""

    steps: int
    """Optimizer updates made, skipped ones included."""

    skipped_steps: int
    """Those whose gradients overflowed in fp16; nothing changed in them."""

    samples: int
    """Training samples they took, over all workers."""

    seconds: float
    """The whole run, over all its parts."""

    images_per_second: float | None
    """Training samples over the time spent training, evaluation left out."""

    peak_memory_bytes: int | None
    """Worker 0's: of the GPU's memory where there is one, else of the process."""

    top1: float | None
    top5: float | None
    loss: Measured | None
    perplexity: float | None = None
    """After the last stage that was kept; the perplexity is recorded for text."""

    weights_sha256: str | None = None
    """As in Start."""

    extra: dict[str, dict[str, object]] = field(default_factory=dict)
    """Values of extensions, by the name of the extension."""

    remarks: tuple[str, ...] = ()
    """What extensions add to the last line of the run."""

    stages: tuple[StageResult, ...]
    status: Status
    diverged: Printable | None = None
    """Why it failed, where that was a loss or a gradient that is no number."""

    def write(self, path: Path) -> None:
        """Write the summary as JSON."""
        write_json(path, self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """The run, or this part of it, ended."""

    event: Literal["finish"] = "finish"
    time: datetime
    summary: Summary


Event = (
    Start
    | Step
    | System
    | Evaluation
    | GeneralizationGap
    | Mistakes
    | Decision
    | Note
    | Drift
    | Profile
    | Finish
)
EVENTS: TypeAdapter[Event] = TypeAdapter(
    Annotated[Event, Field(discriminator="event")], config=ConfigDict(defer_build=True)
)
"""Reads and writes them."""


def now() -> datetime:
    """Return the time of an event, to the second."""
    return datetime.now(UTC).replace(microsecond=0)


class Tracker(Protocol):
    """Follows a run, on worker 0 only, from its start to its finish."""

    def record(self, event: Event) -> None:
        """Take one event. A finish is the last."""


def write_json(path: Path, content: Summary | Mapping[str, object]) -> None:
    """Write JSON for a person; a number that is not finite becomes null."""
    write_whole(path, to_json(content, indent=2, inf_nan_mode="null") + b"\n")
