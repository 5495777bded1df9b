"""The content of a run folder, every number with its type.

Stages and their accuracies come from the log, which a killed run has too; the summary adds what
only the end of a run knows. A resumed run appends to its log, and its `start` record says from
which step on earlier records are superseded: every step is read once, however often it was resumed.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import TypeAdapter, ValidationError

from largebatch.errors import CheckpointError, RecipeError
from largebatch.formatting import MISSING, plural
from largebatch.recipe.arithmetic.plan import Plan
from largebatch.recipe.loading import parse_recipe
from largebatch.recipe.recipe import Recipe
from largebatch.tracking.events import (
    EVENTS,
    LOG,
    RECIPE,
    SUMMARY,
    Decision,
    DriftEvent,
    EvaluationEvent,
    Event,
    Finish,
    GeneralizationGap,
    Mistakes,
    Note,
    StageName,
    StageResult,
    Start,
    StepEvent,
    Summary,
    System,
    WrongCard,
)

FloatArray = npt.NDArray[np.float64]
_E = TypeVar("_E")

INPUT_BOUND = 0.1  # of the time spent waiting for images, from which a run is called input bound
SCHEDULE = frozenset({"train", "clean"})  # the stages whose updates are those of the schedule


@dataclass(frozen=True, slots=True)
class EvaluatedStage:
    """A stage as far as it was evaluated."""

    name: StageName
    before: "EvaluatedStage | None"
    """The stage it continued from."""

    after: EvaluationEvent
    result: StageResult | None
    """None where the stage, or the run, did not end by itself."""

    decision: Decision | None
    """None where there was no decision: it was kept."""

    mistakes: Mistakes | None
    """At the end; None in older logs."""

    @property
    def kept(self) -> bool:
        """True if the model kept its changes."""
        return self.decision is None or self.decision.kept


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run folder."""

    path: Path
    folder: str  # its name
    starts: tuple[Start, ...]
    steps: tuple[StepEvent, ...]
    evaluations: tuple[EvaluationEvent, ...]
    drift: DriftEvent | None
    decisions: tuple[Decision, ...] = ()
    mistakes: tuple[Mistakes, ...] = ()
    gaps: tuple[GeneralizationGap, ...] = ()
    """By stage, where they were monitored."""

    notes: tuple[Note, ...] = ()
    system: tuple[System, ...] = ()
    summary: Summary | None
    recipe: str | None
    """The text of recipe.yaml."""

    @cached_property
    def parsed(self) -> Recipe | None:
        """The recipe; None if there is none, or it is one of another version."""
        try:
            return None if self.recipe is None else parse_recipe(self.recipe)
        except RecipeError:
            return None

    @property
    def classes(self) -> int | None:
        """Number of classes, of the recipe or else of the mistakes; None if neither is known."""
        if self.parsed is not None:
            return self.parsed.data.classes
        return len(self.mistakes[-1].classes) if self.mistakes else None

    @property
    def name(self) -> str:
        """The recipe's name."""
        return self.starts[-1].recipe

    @property
    def plan(self) -> Plan:
        """How the last part of the run was divided."""
        return self.starts[-1].plan

    @property
    def workers(self) -> str:
        """The workers of each part of the run, such as `2, then 4 workers`."""
        parts = [start.plan.workers for start in self.starts]
        changes = [number for number, _ in groupby(parts)]
        return "".join(f"{number:,}, then " for number in changes[:-1]) + plural(
            changes[-1], "worker"
        )

    @property
    def num_steps(self) -> int:
        """Updates made, as far as the record goes."""
        if self.summary is not None:
            return self.summary.steps
        logged = [step.step + 1 for step in self.steps[-1:]]
        return max(logged + [evaluation.step for evaluation in self.evaluations], default=0)

    @property
    def finished(self) -> bool:
        """True if the run made all its updates and stages."""
        return self.summary is not None and self.summary.status == "finished"

    @property
    def diverged(self) -> bool:
        """True if training ended because a loss or gradient was not finite."""
        return self.summary is not None and self.summary.diverged is not None

    @cached_property
    def by_stage(self) -> dict[StageName, list[StepEvent]]:
        """The updates of each stage, in order."""
        steps: dict[StageName, list[StepEvent]] = {}
        for step in self.steps:
            steps.setdefault(step.stage, []).append(step)
        return steps

    @cached_property
    def stages(self) -> tuple[EvaluatedStage, ...]:
        """Each stage with the last evaluation in it."""
        results = {stage.name: stage for stage in self.summary.stages} if self.summary else {}
        last = {evaluation.stage: evaluation for evaluation in self.evaluations}
        decisions = {decision.stage: decision for decision in self.decisions}
        mistakes = {event.stage: event for event in self.mistakes}
        stages: list[EvaluatedStage] = []
        before = None
        for name, after in last.items():
            ends = results.get(name), decisions.get(name), mistakes.get(name)
            stages.append(EvaluatedStage(name, before, after, *ends))
            # A stage that was rolled back left the model as it was, so the next one continues
            # from the one before it.
            before = stages[-1] if stages[-1].kept else before
        return tuple(stages)

    @cached_property
    def measured(self) -> list[str]:
        """The names of the numbers that monitors of other packages recorded."""
        return list(dict.fromkeys(name for step in self.steps for name in step.measured))

    @cached_property
    def stage_names(self) -> list[StageName]:
        """The names of the stages that made updates or were evaluated, in order."""
        return list(dict.fromkeys([*self.by_stage, *(stage.name for stage in self.stages)]))

    @property
    def end_of_schedule(self) -> EvaluatedStage | None:
        """The last stage that was kept of those that the schedule has; else the first.

        Clean epochs belong to the schedule, which would train them anyway, if on augmented images.
        """
        of_schedule = [stage for stage in self.stages if stage.kept and stage.name in SCHEDULE]
        return of_schedule[-1] if of_schedule else next(iter(self.stages), None)

    @property
    def polishing(self) -> tuple[EvaluatedStage, ...]:
        """The stages that come after the schedule, those that were discarded too."""
        return tuple(stage for stage in self.stages[1:] if stage.name not in SCHEDULE)

    @property
    def last_stage(self) -> EvaluatedStage | None:
        """The stage that left the model as it is; None if none was evaluated."""
        kept_stages = [stage for stage in self.stages if stage.kept]
        return kept_stages[-1] if kept_stages else None

    @property
    def result(self) -> EvaluationEvent | None:
        """The last evaluation of the model as it was left; None if there was none."""
        return self.last_stage.after if self.last_stage else None

    @property
    def final_mistakes(self) -> Mistakes | None:
        """The mistakes at that evaluation; None in older logs."""
        return self.last_stage.mistakes if self.last_stage else None

    @property
    def kept_evaluations(self) -> list[EvaluationEvent]:
        """The evaluations of the stages that were kept."""
        discarded = {stage.name for stage in self.stages if not stage.kept}
        return [evaluation for evaluation in self.evaluations if evaluation.stage not in discarded]

    @property
    def last_gap(self) -> GeneralizationGap | None:
        """The generalization gap after the stage that left the model as it is, if monitored."""
        name = self.last_stage.name if self.last_stage else None
        return next((gap for gap in self.gaps if gap.stage == name), None)

    @property
    def timed(self) -> tuple[StepEvent, ...]:
        """The updates of which it is known what they waited for."""
        return tuple(step for step in self.steps if math.isfinite(step.data_seconds))


@dataclass(frozen=True, slots=True)
class Change:
    """How many more validation images are right, and how many that would be by chance."""

    samples: int
    images: int
    """Negative: fewer."""

    noise: float
    """Two standard errors, in images."""

    fixed: int | None = None
    broken: int | None = None
    """Images that were wrong and are right, and the reverse, where that is known."""

    @property
    def beyond_noise(self) -> bool:
        """True if the change is larger than chance explains."""
        return abs(self.images) > self.noise


def change_from(before: EvaluatedStage, after: EvaluatedStage) -> Change:
    """Return what changed from the end of one stage to that of another on the same images.

    Where both were recorded image by image, chance is that of McNemar's test: each image that
    changed could as well have changed the other way. Else it is that of two independent samples,
    which is larger.
    """
    samples = after.after.samples
    ends = (before.after.top1, after.after.top1)
    images = round((ends[1] - ends[0]) * samples)
    if before.mistakes is None or after.mistakes is None:
        # A count of right images is binomial; the variances of two independent counts add up.
        variance = sum(top1 * (1 - top1) for top1 in ends) * samples
        return Change(samples, images, 2 * math.sqrt(variance))
    then = set(before.mistakes.samples)
    now = set(after.mistakes.samples)
    fixed, broken = len(then - now), len(now - then)
    return Change(samples, images, 2 * math.sqrt(fixed + broken), fixed, broken)


def values_of(events: Iterable[object], name: str) -> FloatArray:
    """Return the numbers of events in one of their fields."""
    return np.array([*map(attrgetter(name), events)], dtype=np.float64)


def median(values: FloatArray) -> float:
    """Return the median of the finite values; NaN if there is none."""
    finite = values[np.isfinite(values)]
    return float(np.median(finite)) if finite.size else math.nan


def images_per_second(run: Run) -> float | None:
    """Return the summary's rate, else the median step's; None if nothing was timed."""
    if run.summary is not None and run.summary.images_per_second is not None:
        return run.summary.images_per_second
    rate = median(values_of(run.steps, "images_per_second"))
    return None if math.isnan(rate) else rate


def short_commit(commit: str | None) -> str:
    """Return the first digits of a commit, and the mark of changed files."""
    return MISSING if commit is None else commit[:12] + "+" * commit.endswith("+")


def shares(run: Run) -> tuple[float, float]:
    """Return the shares of time waited for images and for sums of gradients; the run is timed.

    The first update, which warms up, does not count.
    """
    # Without it: kernels are compiled and buffers allocated in the first update.
    steps = run.timed[1:] or run.timed
    whole = sum(step.step_seconds for step in steps)
    data, reduction = (values_of(steps, name) for name in ("data_seconds", "reduction_seconds"))
    return float(data.sum()) / whole, float(reduction.sum()) / whole


def read_run(folder: Path) -> Run:
    """Read a run folder. Raises CheckpointError naming the file, and the line in a log."""
    log = _read_log(folder / LOG)

    def all_of(kind: type[_E]) -> tuple[_E, ...]:
        return tuple(event for event in log if isinstance(event, kind))

    # A resumed run appends to its log, with a start record of its own.
    starts = all_of(Start)
    recipe = folder / RECIPE
    if not starts:
        raise CheckpointError(
            f"{folder / LOG}: holds no start record; expected it in the first line"
        )
    return Run(
        path=folder,
        folder=folder.resolve().name,
        starts=starts,
        steps=tuple(sorted(all_of(StepEvent), key=attrgetter("step"))),
        evaluations=all_of(EvaluationEvent),
        drift=next(iter(all_of(DriftEvent)), None),
        decisions=all_of(Decision),
        mistakes=all_of(Mistakes),
        gaps=all_of(GeneralizationGap),
        notes=all_of(Note),
        system=tuple(sorted(all_of(System), key=attrgetter("step"))),
        summary=_read_summary(folder / SUMMARY),
        recipe=recipe.read_text(encoding="utf-8", errors="replace") if recipe.exists() else None,
    )


_REMADE = {"remark", "stage", "update skipped"}  # kinds of notes that a resumed run makes again


def _read_log(path: Path) -> list[Event]:
    """Return the valid events: those that no later event replaces or supersedes."""
    if not path.exists():
        below = f"; runs are in {path.parent}/*" if [*path.parent.glob(f"*/{path.name}")] else ""
        raise CheckpointError(
            f"{path}: not found; expected the folder of a run (--out of `largebatch train`){below}"
        )
    log: dict[tuple[object, ...], Event] = {}
    for number, event in enumerate(_events(path)):
        if isinstance(event, Start):
            step = event.resume_step
            log = {key: other for key, other in log.items() if not _is_superseded(other, step)}
        log[type(event), *_key(event, number)] = event
    return list(log.values())


def _key(event: Event, number: int) -> tuple[object, ...]:
    """Return the key of an event of its kind; the later of two with equal keys wins."""
    match event:
        case StepEvent() | System():
            return (event.step,)
        case EvaluationEvent():
            return event.stage, event.step
        case Decision() | Mistakes() | GeneralizationGap():
            return (event.stage,)
        case Note(kind="remark"):
            return event.stage, event.text
        case DriftEvent():
            return ()
        case _:
            return (number,)


def _is_superseded(event: Event, resume_step: int) -> bool:
    """Return True if a run that is resumed after this many updates makes an event again."""
    match event:
        case Start() | Finish() | WrongCard():
            return False
        case Note() if event.kind not in _REMADE:
            return False
        case StepEvent() | System():
            return event.step >= resume_step
        case _:
            return event.step > resume_step


def _events(path: Path) -> Iterator[Event]:
    """Yield the events of a log; those of a kind that is not known are passed over.

    A last line without its end is what a killed run was writing, and is passed over too.
    """
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), start=1):
        try:
            yield EVENTS.validate_json(line)
        except ValidationError as error:
            if error.errors()[0]["type"] == "union_tag_invalid":
                continue
            if not line.endswith(b"\n"):
                return
            raise CheckpointError(
                f"{path}:{number}: not a record of a run ({first_problem(error)}); delete the "
                "line to go without it"
            ) from None


def _read_summary(path: Path) -> Summary | None:
    if not path.exists():
        return None
    try:
        return TypeAdapter(Summary).validate_json(path.read_bytes())
    except ValidationError as error:
        raise CheckpointError(
            f"{path}: not the summary of a run ({first_problem(error)}); delete it to go without it"
        ) from None


def first_problem(error: ValidationError) -> str:
    """Describe the first error of a record."""
    first = error.errors()[0]
    if first["type"] == "union_tag_not_found":
        return "'event' is missing"
    where = ".".join(map(str, first["loc"]))
    return f"{where}: {first['msg']}" if where else first["msg"]
