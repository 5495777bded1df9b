"""Every record of a run, typed once: what trackers follow, `log.jsonl` holds and reports read.

`log.jsonl` has one JSON object a line, in the order in which things happened. A resumed run
appends; its `start` record says from which step on earlier ones are superseded. A number that is
not finite, such as the loss of a step that overflowed in fp16, is null there, for JSON has no NaN;
it is read as NaN. A field that older runs did not write has a default, so their folders still draw.
"""

import fcntl
import logging
import math
import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Annotated, Literal, Protocol

from pydantic import BeforeValidator, Field, TypeAdapter
from pydantic_core import to_json

from largebatch.errors import CheckpointError
from largebatch.recipe.plan import Plan
from largebatch.storage import write_whole

RECIPE, LOG, SUMMARY, CHECKPOINTS = "recipe.yaml", "log.jsonl", "summary.json", "checkpoints"
REPORT, OVERVIEW = "report.html", "report.png"
"""What the files of a run folder are called."""

StageName = Literal["train", "clean", "ema", "affine", "statistics"]
"""The stages of a run, in their order."""

Status = Literal["finished", "interrupted", "stopped", "failed"]
"""interrupted: saved where it ends; stopped: at once, by a second request."""

Measured = Annotated[float, BeforeValidator(lambda value: math.nan if value is None else value)]
"""A number that may not be finite: null in JSON, which is read as NaN."""


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
    seconds: float = math.nan


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
    text: str


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
    """After it, also where it was rolled back."""

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
    """Accuracy and loss after the last stage that was kept."""

    weights_sha256: str | None = None
    """As in Start."""

    stages: tuple[StageResult, ...]
    status: Status

    def write(self, path: Path) -> None:
        """Write the summary as JSON."""
        write_json(path, self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """The run, or this part of it, ended."""

    event: Literal["finish"] = "finish"
    time: datetime
    summary: Summary


Event = Start | Step | Evaluation | Decision | Note | Drift | Finish
EVENTS: TypeAdapter[Event] = TypeAdapter(Annotated[Event, Field(discriminator="event")])
"""Reads and writes them."""


def now() -> datetime:
    """Return the time of an event, to the second."""
    return datetime.now(UTC).replace(microsecond=0)


class Tracker(Protocol):
    """Follows a run, on worker 0 only, from its start to its finish."""

    def record(self, event: Event) -> None:
        """Take one event. A finish is the last."""


_LOG = logging.getLogger(__name__)

_PIECE = 2**16
"""Bytes that are searched at a time for the last end of a line."""


class JsonLines:
    """A Tracker that appends each record at once, so that a killed run leaves all it did.

    The file is locked while it is open: a run folder has one owner. The system takes the lock from
    a process that ends, however it ends; NFS keeps it on the server.

    Raises CheckpointError where another process has the file, or where a new run finds records.
    """

    def __init__(self, path: Path, *, resume: bool) -> None:
        self._path = path
        with ExitStack() as opened:
            self._file = opened.enter_context(path.open("ab", buffering=0))
            _lock(self._file)
            if not resume and os.fstat(self._file.fileno()).st_size:
                raise CheckpointError(
                    f"{path.parent}: another run began here; choose another --out"
                )
            _drop_unfinished_line(path)
            opened.pop_all()  # it stays open until `close`

    def record(self, event: Event) -> None:
        """Write one line. Raises CheckpointError where it cannot be written whole."""
        line = EVENTS.dump_json(event) + b"\n"
        before = os.fstat(self._file.fileno())
        if before.st_nlink == 0:
            raise CheckpointError(f"{self._path}: was removed while the run wrote to it")
        try:
            whole, reason = self._file.write(line) == len(line), "no space left on the device"
        except OSError as error:
            whole, reason = False, str(error.strerror)
        if not whole:
            os.ftruncate(self._file.fileno(), before.st_size)
            raise CheckpointError(f"{self._path}: cannot be written: {reason}")

    def close(self) -> None:
        """Let another process own the file."""
        self._file.close()


def record(trackers: list[Tracker], event: Event) -> None:
    """Hand an event to every tracker; one that fails is taken out of the list, with a note.

    A run does not end because who follows it does. Its own record is no such follower: without
    log.jsonl there is no report. At a finish that record comes last, to hold such notes too.
    """
    last = isinstance(event, Finish)
    for tracker in sorted(trackers, key=lambda each: last and isinstance(each, JsonLines)):
        if tracker not in trackers:  # a note before this was too much for it
            continue
        try:
            tracker.record(event)
        except Exception as error:
            if isinstance(tracker, JsonLines):
                raise
            trackers.remove(tracker)
            reason = str(error).strip().split("\n")[0] or type(error).__name__
            text = f"{type(tracker).__name__} failed and follows the run no more: {reason}"
            record(trackers, _note_at(event, text))


def _note_at(event: Event, text: str) -> Note:
    """Return a note for the stage and the step of an event."""
    match event:
        case Start():
            return Note(stage="train", step=event.resume_step, text=text)
        case Finish():
            stages = event.summary.stages
            last = stages[-1].name if stages else "train"
            return Note(stage=last, step=event.summary.steps, text=text)
        case _:
            return Note(stage=event.stage, step=event.step, text=text)


def write_json(path: Path, content: Summary | Mapping[str, object]) -> None:
    """Write JSON for a person; a number that is not finite becomes null."""
    write_whole(path, to_json(content, indent=2, inf_nan_mode="null") + b"\n")


def _lock(file: IO[bytes]) -> None:
    """Lock a file for this process; log a warning where the file system has no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise CheckpointError(
            f"{Path(file.name).parent}: another run is writing to this folder; wait for its end or "
            "choose another --out"
        ) from None
    except OSError as error:
        _LOG.warning(
            "%s: cannot be locked (%s); see that no other run writes to its folder",
            file.name,
            error.strerror,
        )


def _drop_unfinished_line(path: Path) -> None:
    """Cut off what a run that was killed while writing left behind its last whole line.

    No other byte is touched, so a kill here loses nothing.
    """
    with path.open("rb") as file:
        size = end = file.seek(0, os.SEEK_END)
        found = -1
        while end and found < 0:
            start = max(0, end - _PIECE)
            file.seek(start)
            found = file.read(end - start).rfind(b"\n")
            end = start + found + 1
    if end < size:
        os.truncate(path, end)
