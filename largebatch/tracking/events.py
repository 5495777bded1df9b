"""Every record of a run, `log.jsonl`, which holds them one JSON object a line, and summary.json.

Records stand in the order they happened. A resumed run appends; its `start` record says from which
step on earlier ones are superseded. A number that is not finite, such as the loss of a step that
overflowed in fp16, is written as null: JSON has no NaN.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

from pydantic import BeforeValidator

StageName = Literal["train", "clean", "ema", "affine", "statistics"]
Measured = Annotated[float, BeforeValidator(lambda value: math.nan if value is None else value)]
"""A number that may have come out as none: the log then holds null, which is read as NaN."""

Status = Literal["finished", "interrupted", "stopped", "failed"]


class Tracker(Protocol):
    """Follows a run. `run` calls it on worker 0 only, with plain values, never tensors."""

    def start(self, config: Mapping[str, object], *, resume_step: int) -> None:
        """Begin: the resolved recipe with the plan under `plan`, and the first step to come."""

    def record(self, record: Mapping[str, object]) -> None:
        """Take one record; its `event` says which kind it is."""

    def finish(self, summary: Mapping[str, object]) -> None:
        """End: the contents of `summary.json`, whatever the status."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """One run in numbers. Accuracies are parts of 1, times seconds, on worker 0."""

    recipe: str
    commit: str | None
    """Of the source tree that ran, with `+` where it had changes; null outside a git checkout."""

    versions: dict[str, str]
    backend: str
    workers: int
    global_batch: int
    device_batch: int
    accumulation: int
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

    peak_memory_bytes: int
    """Worker 0's: of the GPU's memory where there is one, else of the process."""

    top1: float | None
    top5: float | None
    loss: float | None
    """Accuracy and loss after the last stage that ended."""

    stages: list[dict[str, Any]]
    status: Status
    """interrupted: saved where it ends; stopped: at once, by a second request."""

    def write(self, path: Path) -> None:
        """Write the summary as JSON."""
        write_json(path, asdict(self))


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write JSON for a person; a number that is not finite becomes null, for JSON has none."""
    text = json.dumps(finite(content), indent=2, allow_nan=False)
    path.write_text(text + "\n", encoding="utf-8")


class JsonLines:
    """A Tracker that writes each record at once, so that a killed run leaves all it did."""

    def __init__(self, path: Path) -> None:
        _drop_unfinished_line(path)
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def start(self, config: Mapping[str, object], *, resume_step: int) -> None:
        """Write the plan, the recipe's name and the time."""
        self.record(
            {
                "event": "start",
                "time": datetime.now(UTC).isoformat(timespec="seconds"),
                "resume_step": resume_step,
                "recipe": config["name"],
                "plan": config["plan"],
            }
        )

    def record(self, record: Mapping[str, object]) -> None:
        """Write one line."""
        self._file.write(json.dumps(finite(record), allow_nan=False) + "\n")

    def finish(self, summary: Mapping[str, object]) -> None:
        """Close the file; the summary has a file of its own."""
        del summary
        self._file.close()


def finite(value: object) -> object:
    """Return the value with None for every float in it that is not finite."""
    match value:
        case float():
            return value if math.isfinite(value) else None
        case Mapping():
            return {key: finite(item) for key, item in value.items()}
        case list() | tuple():
            return [finite(item) for item in value]
        case _:
            return value


def _drop_unfinished_line(path: Path) -> None:
    """Cut off what a run that was killed while writing left behind its last whole line."""
    if path.exists():
        content = path.read_bytes()
        path.write_bytes(content[: content.rfind(b"\n") + 1])
