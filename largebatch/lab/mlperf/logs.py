"""Find the logs that MLPerf's checkers read, and read them with the package's parser.

Checkers of mlperf-logging write their results to the root logger; `captured_log` collects them.
"""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from largebatch.errors import LargebatchError, clip
from largebatch.lab.mlperf.logger import MLPERF_LOG, UNNAMED
from largebatch.lab.mlperf.rules import BENCHMARK, ROUND
from largebatch.optional import require_mlperf

PURPOSE = "referee"


class LogError(LargebatchError):
    """A log that cannot be checked: missing, damaged, unfinished, or of another benchmark."""


@dataclass(frozen=True, slots=True)
class Log:
    """Contents of the log of one finished run."""

    path: Path
    batch: int | None
    """Global batch; None if the log has no number."""

    division: str
    epochs: float | None
    """Epochs to the target; None if it was not reached or not logged."""

    complete: bool
    """True if the RCP checker can read it: the batch and every evaluation's epoch are there."""

    remarks: tuple[str, ...]


def find_logs(folder: Path) -> list[Path]:
    """Return the logs in a folder."""
    if not folder.is_dir():
        raise LogError(f"{folder}: expected a run folder or one of result_*.txt")
    own = folder / MLPERF_LOG
    paths = [own] if own.exists() else sorted(folder.glob("result_*.txt"))
    if not paths:
        raise LogError(
            f"{folder}: holds neither {MLPERF_LOG} nor result_*.txt; a run writes its log with "
            "--set tracking=[mlperf]"
        )
    return paths


def read_log(path: Path) -> Log:
    """Read a log with the package's parser; raise LogError if there is nothing to check."""
    values = _values(path)
    _require_finished(path, values)
    batch = values.get("global_batch_size", [{"value": None}])[-1]["value"]
    known = isinstance(batch, int) and batch > 0
    complete = known and _evaluations_have_epochs(values)
    return Log(
        path=path,
        batch=batch if known else None,
        division=str(values.get("submission_division", [{"value": "unnamed"}])[0]["value"]),
        epochs=_epochs(path) if complete else None,
        complete=complete,
        remarks=tuple(_remarks(values)),
    )


def _values(path: Path) -> dict[str, list[Any]]:
    parser = require_mlperf("compliance_checker.mlp_parser", PURPOSE)
    values: dict[str, list[Any]] = {}
    try:
        lines, errors = parser.parse_file(path, ruleset=ROUND)
        for line in lines:
            values.setdefault(line.key, []).append(line.value)
    except (KeyError, TypeError, OSError) as error:
        raise LogError(f"{path}: is damaged: {type(error).__name__}: {error}") from None
    if errors:
        line, reason = errors[0]
        raise LogError(f"{path}: is damaged: {reason}, in a line that begins {clip(line, 80)!r}")
    return values


def read_submission(path: Path) -> dict[str, str]:
    """Return the submission's org, platform, division and status in a log, if they are set.

    The run need not be finished. Raises LogError for a damaged log.
    """
    values = _values(path)
    submission = {
        key: str(values[f"submission_{key}"][0]["value"])
        for key in ("org", "platform", "division", "status")
        if f"submission_{key}" in values
    }
    return {key: text for key, text in submission.items() if not text.startswith(UNNAMED)}


def _require_finished(path: Path, values: Mapping[str, Any]) -> None:
    if not values:
        raise LogError(f"{path}: holds no line of mlperf-logging: is it a log?")
    if "run_stop" not in values:
        raise LogError(
            f"{path}: the run is not finished: its log has no run_stop; `largebatch train` with "
            "--resume continues it"
        )
    benchmark = values.get("submission_benchmark", [{"value": None}])[0]["value"]
    if benchmark != BENCHMARK:
        raise LogError(f"{path}: submission_benchmark is {benchmark!r}, expected {BENCHMARK!r}")


def _evaluations_have_epochs(values: Mapping[str, Any]) -> bool:
    accuracies = [*values.get("eval_accuracy", []), *values.get("eval_error", [])]
    metadata = [entry["metadata"] for entry in accuracies]
    epochs = [entry.get("epoch_num") for entry in metadata if isinstance(entry, dict)]
    stops = [entry["metadata"] for entry in values["run_stop"]]
    return (
        bool(metadata)
        and len(epochs) == len(metadata)
        and all(isinstance(epoch, (int, float)) for epoch in epochs)
        and all(isinstance(stop, dict) and "status" in stop for stop in stops)
    )


def _epochs(path: Path) -> float | None:
    checker = require_mlperf("rcp_checker.rcp_checker", PURPOSE)
    with captured_log():
        failed, epochs, _, _ = checker.read_submission_file(path, ROUND, False)  # noqa: FBT003
    return None if failed else epochs


def _remarks(values: Mapping[str, Any]) -> Iterator[str]:
    if not any(entry["value"] for entry in values.get("cache_clear", [])):
        yield "cache_clear is false: the rules ask for an empty page cache (MLPERF_CACHE_CLEARED=1)"
    for key in ("submission_org", "submission_platform"):
        if any(str(entry["value"]).startswith(UNNAMED) for entry in values.get(key, [])):
            yield f"{key} has no name: MLPERF_{key.upper()} gives it"


@contextmanager
def captured_log() -> Iterator[list[logging.LogRecord]]:
    """Collect the checkers' messages, which go to the root logger, instead of printing them."""
    root, captured = logging.getLogger(), _Records()
    handlers, level = root.handlers, root.level
    root.handlers = [captured]
    root.setLevel(logging.INFO)
    try:
        yield captured.records
    finally:
        root.handlers = handlers
        root.setLevel(level)


class _Records(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)
