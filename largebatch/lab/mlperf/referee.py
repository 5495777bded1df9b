"""Run MLPerf's own checkers on the logs of runs, and describe their results in sentences.

Nothing is checked here: compliance_checker, rcp_checker and package_checker's seed checker of the
package mlperf-logging are called as by the package's commands.

Reference convergence points (RCPs) are epochs to the target that MLPerf's reference
implementation took at some batches; a submission of the closed division must not converge faster
than they allow, which the package tests by Student's t-test.
"""

import logging
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any, Literal

from largebatch.errors import LargebatchError, clip, shorten
from largebatch.formatting import plural
from largebatch.lab.mlperf.logger import MLPERF_LOG, UNNAMED
from largebatch.lab.mlperf.rules import BENCHMARK, ROUND, TARGET, USAGE
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
    return Log(
        path=path,
        batch=batch if isinstance(batch, int) else None,
        division=str(values.get("submission_division", [{"value": "unnamed"}])[0]["value"]),
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


def _remarks(values: Mapping[str, Any]) -> Iterator[str]:
    if not any(entry["value"] for entry in values.get("cache_clear", [])):
        yield "cache_clear is false: the rules ask for an empty page cache (MLPERF_CACHE_CLEARED=1)"
    for key in ("submission_org", "submission_platform"):
        if any(str(entry["value"]).startswith(UNNAMED) for entry in values.get(key, [])):
            yield f"{key} has no name: MLPERF_{key.upper()} gives it"


@contextmanager
def captured_log() -> Iterator[list[logging.LogRecord]]:
    """Collect the checkers' messages, which go to the root logger, instead of printing them."""
    root, captured = logging.getLogger(), BufferingHandler(capacity=2**31)
    handlers, level = root.handlers, root.level
    root.handlers = [captured]
    root.setLevel(logging.INFO)
    try:
        yield captured.buffer
    finally:
        root.handlers = handlers
        root.setLevel(level)


RUNS = 5
"""Number of runs of a ResNet submission; the fastest and the slowest do not count."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of one checker."""

    name: Literal["compliance", "seeds", "convergence"]
    passed: bool | None
    """True or False by the check; None if unchecked."""

    sentence: str
    reasons: tuple[str, ...] = ()
    """Failures of the checker, each with its log."""


@dataclass(frozen=True, slots=True)
class Reference:
    """Reference at one batch, measured or interpolated, and our runs."""

    batch: int
    """Global batch: ours, or the smallest reference point if ours is smaller than all."""

    mean: float
    std: float
    least: float
    """Least mean of epochs that is accepted."""

    ours: float
    """Our mean epochs, without the fastest and the slowest run."""


@dataclass(frozen=True, slots=True)
class Findings:
    """Results of all checkers for some runs."""

    logs: tuple[Log, ...]
    verdicts: tuple[Verdict, ...]
    reference: Reference | None

    @property
    def passed(self) -> bool:
        """True if no checker failed."""
        return all(verdict.passed is not False for verdict in self.verdicts)


def check(folders: Sequence[Path]) -> Findings:
    """Run MLPerf's checkers on the logs in run folders, or in folders of result_*.txt.

    Raises LogError for logs that cannot be checked, MissingPackageError without mlperf-logging.
    """
    logs = tuple(read_log(path) for folder in folders for path in find_logs(folder))
    if len({log.division for log in logs}) > 1:
        divisions = [f"{log.path}: {log.division}" for log in logs]
        raise LogError(f"logs of one submission are of one division, found {shorten(divisions)}")
    convergence, reference = _check_convergence(logs)
    return Findings(logs, (_check_compliance(logs), _check_seeds(logs), convergence), reference)


def _check_compliance(logs: Sequence[Log]) -> Verdict:
    """Check every log against the rules of its division.

    As in package_checker, one of five may break them, for example a run below the target: the
    slowest does not count.
    """
    reasons, broken = [], 0
    for log in logs:
        found = _broken_rules(log.path)
        broken += bool(found)
        reasons += [f"{log.path}: {reason}" for reason in found]
    rules = f"MLPerf Training {ROUND}, ResNet, {logs[0].division} division"
    if broken:
        accepted = broken == 1 and len(logs) == RUNS
        verb = "breaks" if broken == 1 else "break"
        text = f"{broken} of {plural(len(logs), 'run')} {verb} the rules of {rules}"
        if accepted:
            text += ", which is accepted of one in five"
        return Verdict("compliance", passed=accepted, sentence=text, reasons=tuple(reasons))
    keep = plural(len(logs), "log keeps", "logs keep")
    return Verdict("compliance", passed=True, sentence=f"{keep} the rules of {rules}")


def _broken_rules(path: Path) -> list[str]:
    package = require_mlperf("compliance_checker.mlp_compliance", PURPOSE)
    checker = package.make_checker(USAGE, ROUND, quiet=True, werror=False)
    package.enqueued_configs.clear()  # of a check that ended by an exception
    with captured_log():
        try:
            passed = checker.check_file(path, f"{USAGE}_{ROUND}/common.yaml")
        except Exception as error:  # rules are evaluated on whatever the log holds
            passed = False
            checker.put_message(f"the checker stopped: {type(error).__name__}: {error}")
    if passed:
        return []
    messages = [*checker.overwritable.values(), *checker.not_overwritable]
    return [_explain(message) for message in messages]


def _explain(message: str) -> str:
    """Return the line of a log, the failed test and the key of the compliance checker's message."""
    said = [line.strip() for line in message.splitlines() if "current context" not in line]
    return clip(" ".join(said), 300)


def _check_seeds(logs: Sequence[Log]) -> Verdict:
    package = require_mlperf("package_checker.seed_checker", PURPOSE)
    with captured_log() as captured, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a log of several seeds is allowed
        passed = package.SeedChecker(ROUND).check_seeds([log.path for log in logs])
    if passed:
        return Verdict("seeds", passed=True, sentence=f"{plural(len(logs), 'run')}, no seed twice")
    errors = [record.args for record in captured if record.levelno == logging.ERROR]
    reasons = tuple(str(args[0]) for args in errors if isinstance(args, tuple) and args)
    lines = tuple(line for reason in reasons for line in reason.splitlines())
    text = "every run needs a logged seed of its own"
    if logs[0].division == "open":
        return Verdict("seeds", None, f"not required in the open division: {text}", lines)
    return Verdict("seeds", passed=False, sentence=text, reasons=lines)


def _check_convergence(logs: Sequence[Log]) -> tuple[Verdict, Reference | None]:
    if len({log.batch for log in logs}) > 1:
        batches = [f"{log.path}: {log.batch or 0:,}" for log in logs]
        raise LogError(f"logs of one submission are of one global batch, found {shorten(batches)}")
    if len(logs) != RUNS:
        return Verdict("convergence", None, f"needs {RUNS} runs, {len(logs)} given"), None
    checker = require_mlperf("rcp_checker.rcp_checker", PURPOSE)
    with tempfile.TemporaryDirectory() as folder, captured_log() as captured:
        for number, log in enumerate(logs):
            (Path(folder) / f"result_{number}.txt").symlink_to(log.path.absolute())
        try:
            passed, found, factor = checker.check_directory(
                folder, USAGE, ROUND, False, False, rcp_pass="pruned_rcps"  # noqa: FBT003, S106
            )  # fmt: skip
        except (KeyError, TypeError, ValueError) as error:  # it reads whatever the log holds
            text = f"a log lacks what the test reads: {type(error).__name__}: {error}"
            return Verdict("convergence", None, text), None
    reference = _reference(captured)
    text = found
    if found == "Insufficient convergence":
        text = f"more than one run did not reach {TARGET:.1%}"
    if reference is not None:
        text = _describe(reference, logs, factor=float(factor) if passed else 1.0)
    if logs[0].division == "open":
        return Verdict("convergence", None, f"not required in the open division; {text}"), reference
    return Verdict("convergence", passed=bool(passed), sentence=text), reference


def _reference(captured: Sequence[logging.LogRecord]) -> Reference | None:
    records = [message.args for message in captured if str(message.msg).startswith(" RCP Record")]
    means = [
        message.args
        for message in captured
        if str(message.msg).startswith(" Submission mean epochs:")
    ]
    if not records or not means:
        return None
    record: Any = records[0]
    ours: Any = means[0]
    return Reference(
        batch=record["BS"],
        mean=float(record["RCP Mean"]),
        std=float(record["RCP Stdev"]),
        least=float(record["RCP Mean"] / record["Max Speedup"]),
        ours=float(ours[0]),
    )


def _describe(reference: Reference, logs: Sequence[Log], *, factor: float) -> str:
    at = ""
    if reference.batch != logs[0].batch:
        at = f" at its smallest batch, {reference.batch:,}"
    times = f"; faster, so times are multiplied by {factor:.4f}" if factor > 1 else ""
    return (
        f"{plural(len(logs), 'run')} at batch {logs[0].batch or 0:,}: {reference.ours:.2f} epochs "
        f"to {TARGET:.1%}; reference{at}: {reference.mean:.2f} (std "
        f"{reference.std:.2f}), at least {reference.least:.2f} accepted{times}"
    )
