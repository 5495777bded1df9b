"""Reads a run folder: every step once, however often the run was resumed.

A resumed run appends to its log; its `start` record says from which step on earlier records are
superseded.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from largebatch.errors import CheckpointError
from largebatch.report.records import Decision, Drift, Evaluation, Note, Run, Start, Step, Summary

Record = Start | Step | Evaluation | Decision | Note | Drift


def read_run(folder: Path) -> Run:
    """Read a run folder. Raises CheckpointError naming the file, and the line in a log."""
    log = _read_log(folder / "log.jsonl")
    if not log.starts:
        raise CheckpointError(
            f"{folder / 'log.jsonl'}: holds no start record, so nothing tells what ran; "
            "expected it in the first line"
        )
    recipe = folder / "recipe.yaml"
    return Run(
        folder=folder.resolve().name,
        starts=tuple(log.starts),
        steps=tuple(step for _, step in sorted(log.steps.items())),
        evaluations=tuple(log.evaluations.values()),
        drift=log.drift,
        decisions=tuple(log.decisions.values()),
        notes=tuple(log.notes.values()),
        summary=_read_summary(folder / "summary.json"),
        recipe=recipe.read_text(encoding="utf-8") if recipe.exists() else None,
    )


@dataclass
class _Log:
    """What holds of a log so far; a start takes back what a resumed run does again."""

    starts: list[Start] = field(default_factory=list)
    steps: dict[int, Step] = field(default_factory=dict)
    evaluations: dict[tuple[str, int], Evaluation] = field(default_factory=dict)
    decisions: dict[str, Decision] = field(default_factory=dict)
    notes: dict[str, Note] = field(default_factory=dict)
    drift: Drift | None = None

    def add(self, record: Record) -> None:
        match record:
            case Start():
                self.starts.append(record)
                self._take_back(record.resume_step)
            case Step():
                self.steps[record.step] = record
            case Evaluation():
                self.evaluations[record.stage, record.step] = record
            case Decision():
                self.decisions[record.stage] = record
            case Note():
                self.notes[record.stage] = record
            case Drift():
                self.drift = record

    def _take_back(self, resume_step: int) -> None:
        """Forget updates from `resume_step` on, and evaluations of more updates than that."""
        self.steps = {key: step for key, step in self.steps.items() if key < resume_step}
        self.evaluations = {
            key: found for key, found in self.evaluations.items() if found.step <= resume_step
        }
        self.decisions = {
            key: found for key, found in self.decisions.items() if found.step <= resume_step
        }
        self.notes = {key: found for key, found in self.notes.items() if found.step <= resume_step}
        if self.drift is not None and self.drift.step > resume_step:
            self.drift = None


_KINDS: dict[str, TypeAdapter[Any]] = {
    "start": TypeAdapter(Start),
    "step": TypeAdapter(Step),
    "evaluation": TypeAdapter(Evaluation),
    "decision": TypeAdapter(Decision),
    "note": TypeAdapter(Note),
    "drift": TypeAdapter(Drift),
}
_SUMMARY = TypeAdapter(Summary)


def _read_log(path: Path) -> _Log:
    if not path.exists():
        raise CheckpointError(
            f"{path}: not found; a report is made from the folder of a run, which holds "
            "recipe.yaml, log.jsonl and checkpoints/ (the --out of `largebatch train`)"
        )
    log = _Log()
    for record in _records(path):
        log.add(record)
    return log


def _records(path: Path) -> Iterator[Record]:
    """Yield the records of the kinds a report shows.

    A last line without its end is what a killed run was writing, and is passed over.
    """
    content = path.read_bytes()
    lines = content.splitlines(keepends=True)
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            kind = _KINDS.get(record["event"])
            if kind is not None:
                yield kind.validate_python(record)
        except (ValueError, KeyError, TypeError) as error:
            if not line.endswith(b"\n"):
                return
            raise CheckpointError(
                f"{path}:{number}: not a record of a run ({_reason(error)}); expected one JSON "
                "object with its event on each line; delete the line to go without it"
            ) from None


def _read_summary(path: Path) -> Summary | None:
    if not path.exists():
        return None
    try:
        return _SUMMARY.validate_python(json.loads(path.read_bytes()))
    except ValueError as error:
        raise CheckpointError(
            f"{path}: not the summary of a run ({_reason(error)}); delete it to see what the log "
            "alone says"
        ) from None


def _reason(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    if isinstance(error, KeyError):
        return f"{error} is missing"
    return str(error)
