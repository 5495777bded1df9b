"""The records of a run, each with one type for trackers, `log.jsonl` and reports.

`log.jsonl` has one JSON object per line, in the order of events. A resumed run appends; its `start`
record names the step from which earlier records are superseded. A number that is not finite is
written as null, because JSON has no NaN, and is read as NaN.
"""

import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Literal, Protocol, get_type_hints

from pydantic import BeforeValidator, ConfigDict, Field, PlainSerializer, TypeAdapter
from pydantic_core import to_json

from largebatch.errors import printable
from largebatch.formatting import Tabular, duration, four_decimals, percent, plural
from largebatch.recipe.arithmetic.plan import Plan
from largebatch.storage import write_whole

RECIPE, LOG, SUMMARY, CHECKPOINTS = "recipe.yaml", "log.jsonl", "summary.json", "checkpoints"
REPORT, OVERVIEW, TRACE = "report.html", "report.png", "trace.json"
"""Names of the files of a run folder."""

StageName = str
"""Name of a stage: one of `training.stages.STAGES`, or the kind of a stage of another package."""

StopCause = Literal["time limit", "SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP"]
"""What requests a run to stop: --time-limit, Ctrl-C, a scheduler's signals, a closed terminal."""

Status = Literal["finished", "paused", "interrupted", "stopped", "failed"]
"""paused: saved at --max-steps, or when memory ran out; interrupted: saved after a signal
or near a time limit; stopped: at once, by a second signal. In older folders, interrupted also
stands for paused."""

Measured = Annotated[float, BeforeValidator(lambda value: math.nan if value is None else value)]
"""A number that may not be finite: null in JSON is read as NaN."""

Printable = Annotated[str, PlainSerializer(printable, return_type=str)]
"""A text with file names, whose bytes are escaped in JSON if they are not UTF-8."""


def _is_none(value: object) -> bool:
    return value is None


BalancedTop1 = Annotated[float | None, Field(exclude_if=_is_none)]
"""Mean of the accuracies of the classes, in runs with loss.class_weights; None in others, whose log
has no such key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """The start of a run, or of a resumed part of it."""

    event: Literal["start"] = "start"
    time: datetime
    resume_step: int
    """Number of the next step; earlier records of it and of later steps are superseded."""

    recipe: str
    plan: Plan
    layers: tuple[str, ...] = ()
    """Names of the parameters that LARS adapts, in order, with monitor: trust_ratios."""

    weights_sha256: str | None = None
    """SHA-256 of the file with the initial weights; null if they were drawn from the seed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _StageEvent:
    event: str
    stage: StageName
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEvent(_StageEvent):
    """One optimizer update."""

    event: Literal["step"] = "step"
    epoch: float = math.nan
    """Number of passes over the training data after this update."""

    loss: Measured
    mixed: Annotated[bool, Field(exclude_if=operator.not_)] = False
    """True if that is the loss of mixed images (data.mix), which no model brings to 0; the log has
    no such key for other updates."""

    lr: float
    loss_scale: float = 1.0
    skipped: bool = False
    """True if gradients were not finite and no weight was changed."""

    step_seconds: float = math.nan
    images_per_second: float
    data_seconds: Measured = math.nan
    reduction_seconds: Measured = math.nan
    """Seconds of the step in which worker 0 waited for images and for summed gradients; on a GPU
    only those in which the GPU waited."""

    device_square: Measured = math.nan
    global_square: Measured = math.nan
    """Squared lengths of the mean gradient over a device batch (mean over the first ones of all
    workers) and over the global batch, with monitor: noise_scale."""

    noise_scale: Measured = math.nan
    """Noise scale in samples, from the squares of the last NOISE_UPDATES updates of this part."""

    gradient_norm: Measured = math.nan
    trust_ratios: tuple[Measured, ...] = ()
    """Trust ratios of the layers of the start event, in five digits, with monitor: trust_ratios.
    Empty if the update was skipped or not made by LARS; NaN for a layer without a gradient."""

    measured: Annotated[dict[str, Measured], Field(exclude_if=operator.not_)] = field(
        default_factory=dict
    )
    """Numbers of the monitors of other packages, as `MONITOR.NAME`; without any, the log has no
    such key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class System(_StageEvent):
    """Resources used since the previous record until update `step`, by worker; monitor: system."""

    event: Literal["system"] = "system"
    cpu_percent: tuple[Measured, ...]
    """Percent of one core used by the worker's process; four busy threads are 400."""

    memory_bytes: tuple[Measured, ...]
    gpu_percent: tuple[Measured, ...]
    gpu_memory_bytes: tuple[Measured, ...]
    """Use and memory of the worker's GPU by NVML, over all processes; NaN without GPU or NVML."""

    seconds: tuple[Measured, ...] = ()
    """Seconds of this record: since the previous one, or since the start of this part."""

    peak_memory_bytes: tuple[Measured, ...] = ()
    read_bytes: tuple[Measured, ...] = ()
    """Bytes that the worker's process has read from disks since the previous record, without those
    of the system's cache; NaN if the system does not count them."""


SYSTEM = tuple(
    field.name for field in fields(System) if field.name not in {"event", "stage", "step"}
)
"""Names of the fields measured on each worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationEvent(_StageEvent):
    """An evaluation on the validation data after `step` updates; accuracies are fractions of 1."""

    event: Literal["evaluation"] = "evaluation"
    epoch: float
    top1: float
    top5: float
    loss: Measured
    samples: int
    balanced_top1: BalancedTop1 = None
    average_confidence: Measured = math.nan
    confidence_deviation: Measured = math.nan
    class_confidence_deviation: Measured = math.nan
    """Confidence of the correct images, as in training.Metrics; NaN in older logs."""

    seconds: float = math.nan


METRICS = ("top1", "top5", "loss")
"""Names of the numbers of an evaluation that trackers plot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneralizationGap(_StageEvent):
    """The training images, evaluated like validation images, with monitor: generalization_gap."""

    event: Literal["generalization_gap"] = "generalization_gap"
    samples: int
    top1: float
    loss: Measured
    gap: Measured
    """Validation loss minus training loss, both without label smoothing."""

    seconds: Measured = math.nan


@dataclass(frozen=True, slots=True, kw_only=True)
class Mistakes(_StageEvent):
    """The validation images that are classified wrongly at the end of a stage, over all workers."""

    event: Literal["mistakes"] = "mistakes"
    classes: tuple[Printable, ...]
    sizes: tuple[int, ...]
    samples: tuple[int, ...]
    """Rows of the wrong images in the index of validation images, in ascending order."""

    labels: tuple[int, ...]
    predicted: tuple[int, ...]
    """Labels of the wrong images, and the classes with the highest score."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision(_StageEvent):
    """The decision to keep a stage: top-1 on held-out training images before and after it."""

    event: Literal["decision"] = "decision"
    samples: int
    before: float
    after: float
    kept: bool


NoteKind = Literal["remark", "stage", "update skipped", "tracker"]
"""remark: repeated at each start of a run; stage: why a stage differs from the recipe; tracker: one
was disabled after an error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Note(_StageEvent):
    """A remark on a run."""

    event: Literal["note"] = "note"
    kind: NoteKind = "remark"
    text: Printable


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerDrift:
    """Difference of one BatchNorm layer's polished statistics from its running ones."""

    name: str
    channels: int
    mean_shift: Measured
    """Root mean square over the channels of (polished mean - running mean) / running std."""

    log_variance_ratio: Measured
    """Root mean square over the channels of ln(polished variance / running variance)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DriftEvent(_StageEvent):
    """Changes by the statistics pass, layer by layer from the input on."""

    event: Literal["drift"] = "drift"
    stage: StageName = "statistics"
    step: int = 0
    samples: int

    layers: tuple[LayerDrift, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """The result of an evaluation; accuracies are fractions of 1."""

    top1: float
    top5: float
    loss: Measured
    balanced_top1: BalancedTop1 = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StageResult(Accuracy):
    """The result of a stage, with the accuracy after it, even if it was rolled back."""

    name: StageName
    steps: int
    """Number of updates made, which may be fewer than planned if the stage diverged."""

    seconds: float
    before: Accuracy | None = None
    """Accuracy after the last stage that was kept; null for the first stage."""

    held_out: float | None = None
    """Top-1 on the held-out training images; null without them."""

    kept: bool = True
    note: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary(Tabular):
    """Content of summary.json. Accuracies are fractions of 1, times are seconds on worker 0.

    Prints as a table with a row for each stage.
    """

    recipe: str
    commit: str | None
    """Commit of the source tree, with `+` if it had changes; null outside a git checkout."""

    versions: dict[str, str]
    backend: str
    workers: int
    global_batch: int
    device_batch: int
    accumulation: int
    """Batch sizes and micro-batches at the start of the run, before any batch schedule."""

    steps: int
    """Number of optimizer updates made, including skipped ones."""

    skipped_steps: int
    """Number of updates skipped because gradients were not finite."""

    samples: int
    seconds: float
    """Seconds of the whole run, over all its parts."""

    images_per_second: float | None
    """Training samples per second of training, without evaluation."""

    peak_memory_bytes: int | None
    """Peak memory of worker 0: of the GPU if there is one, else of the process."""

    top1: float | None
    top5: float | None
    loss: Measured | None
    """Metrics after the last stage that was kept."""

    balanced_top1: BalancedTop1 = None

    weights_sha256: str | None = None
    kernels: Printable | None = None
    """Which kernels and graphs were used, and what their trials showed; null on a CPU."""

    stages: tuple[StageResult, ...]
    status: Status
    diverged: Printable | None = None
    """Reason of the failure, if a loss or gradient was not finite."""

    reason: Printable | None = None
    """Why the run ended before its last update; null if it did not, and in older folders."""

    is_requeued: bool = False
    """True if a scheduler stopped the run, and the command that it starts again resumes it."""

    folder: Annotated[Path | None, Field(exclude=True)] = field(default=None, compare=False)
    """Run folder, of the Summary that `run` returns; not in the file."""

    def _caption(self) -> str:
        updates = plural(self.steps, "update")
        text = f"{self.recipe}: {self.status} after {updates} in {duration(self.seconds)}"
        if self.reason:
            text += f" ({self.reason})"
        if self.folder is None:
            return text
        page = self.folder / REPORT
        return f"{text}; {printable(str(page if page.is_file() else self.folder))}"

    def _rows(self) -> list[list[str]]:
        stages = self.stages
        columns = {
            "stage": [stage.name for stage in stages],
            "updates": [f"{stage.steps:,}" for stage in stages],
            "seconds": [f"{stage.seconds:.1f}" for stage in stages],
            "top-1 %": [percent(stage.top1) for stage in stages],
            "mean of classes %": [percent(stage.balanced_top1 or 0.0) for stage in stages],
            "top-5 %": [percent(stage.top5) for stage in stages],
            "loss": [four_decimals(stage.loss) for stage in stages],
            "kept": ["yes" if stage.kept else "no" for stage in stages],
        }
        if all(stage.balanced_top1 is None for stage in stages):
            del columns["mean of classes %"]
        if stages and all(stage.top5 == 1 for stage in stages):
            del columns["top-5 %"]  # so it is with five classes or fewer, and shows nothing
        return [list(columns), *(list(row) for row in zip(*columns.values(), strict=True))]


Summary.__init__.__annotations__ |= get_type_hints(Summary)  # without pydantic's types


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """The end of the run, or of this part of it."""

    event: Literal["finish"] = "finish"
    time: datetime
    summary: Summary


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspect:
    """A worker whose numbers differ from those of others."""

    worker: int
    host: Printable
    device: str
    """Model of its device, such as NVIDIA H200; cpu, with its model, without a GPU."""

    unit: str | None = None
    """Unique identifier (UUID) of the GPU; null if there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WrongCard(_StageEvent):
    """Gradients that two workers computed differently, with execution.replay_every."""

    event: Literal["wrong_card"] = "wrong_card"
    suspects: tuple[Suspect, ...]
    is_certain: bool
    """True if a third worker, or a repetition, shows that these are wrong; false if some of these
    are wrong."""

    place: str
    """First operation whose result differs."""

    last_equal: int | None
    """Update of the last replay in which all workers were equal; null before the first one."""

    text: Printable


Event = (
    Start
    | StepEvent
    | System
    | EvaluationEvent
    | GeneralizationGap
    | Mistakes
    | Decision
    | Note
    | DriftEvent
    | WrongCard
    | Finish
)
EVENTS: TypeAdapter[Event] = TypeAdapter(
    Annotated[Event, Field(discriminator="event")], config=ConfigDict(defer_build=True)
)
"""Adapter that reads and writes events."""


def now() -> datetime:
    """Return the current time, to the second."""
    return datetime.now(UTC).replace(microsecond=0)


class Tracker(Protocol):
    """Receives the events of a run, on worker 0 only."""

    def record(self, event: Event) -> None:
        """Record one event. Finish is the last one."""


def write_json(path: Path, content: Summary | Mapping[str, object]) -> None:
    """Write indented JSON; a number that is not finite becomes null."""
    write_whole(path, to_json(content, indent=2, inf_nan_mode="null", exclude={"folder"}) + b"\n")
