"""Run MLPerf's own checkers on the logs of runs, and return their lines.

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
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import NamedTuple

from largebatch.errors import CheckpointError, clip
from largebatch.lab.mlperf.logger import MLPERF_LOG
from largebatch.lab.mlperf.rules import BENCHMARK, ROUND, USAGE
from largebatch.optional import require_mlperf

PURPOSE = "referee"

RUNS = 5  # number of runs of a ResNet submission; the fastest and the slowest do not count


class CheckerResult(NamedTuple):
    """Result of one checker."""

    passed: bool | None
    """True or False by the check; None if unchecked."""

    lines: Sequence[str] = ()
    """Lines of the checker."""


def find_logs(folder: Path) -> list[Path]:
    """Return the logs in a folder."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: expected a run folder or one of result_*.txt")
    log = folder / MLPERF_LOG
    paths = [log] if log.exists() else sorted(folder.glob("result_*.txt"))
    if not paths:
        raise CheckpointError(
            f"{folder}: holds neither {MLPERF_LOG} nor result_*.txt; a run writes its log with "
            "--set tracking=[mlperf]"
        )
    return paths


def check(folders: Sequence[Path]) -> dict[str, CheckerResult]:
    """Run MLPerf's checkers on the logs in run folders, or in folders of result_*.txt.

    Raises CheckpointError for logs that cannot be checked: missing, damaged, or of another
    benchmark, MissingPackageError without mlperf-logging.
    """
    logs = [path for folder in folders for path in find_logs(folder)]
    divisions = {_division(path) for path in logs}
    if len(divisions) > 1:
        raise CheckpointError(f"{logs[0].parent}: logs of several divisions; check each by itself")
    results = {
        "compliance": _check_compliance(logs),
        "seeds": _check_seeds(logs),
        "convergence": _check_convergence(logs),
    }
    if divisions == {"open"}:
        for name in ("seeds", "convergence"):
            lines = ("not required in the open division", *results[name].lines)
            results[name] = CheckerResult(None, lines)
    return results


def _division(path: Path) -> object:
    parser = require_mlperf("compliance_checker.mlp_parser", PURPOSE)
    try:
        lines, errors = parser.parse_file(path, ruleset=ROUND)
        values = {line.key: line.value["value"] for line in lines}
    except (KeyError, TypeError, OSError) as error:
        raise CheckpointError(f"{path}: is damaged: {type(error).__name__}: {error}") from None
    if errors:
        line, reason = errors[0]
        raise CheckpointError(
            f"{path}: is damaged: {reason}, in a line that begins {clip(line, 80)!r}"
        )
    if values.get("submission_benchmark") != BENCHMARK:
        raise CheckpointError(
            f"{path}: submission_benchmark is {values.get('submission_benchmark')!r}, expected "
            f"{BENCHMARK!r}"
        )
    return values.get("submission_division")


@contextmanager
def captured_log() -> Iterator[list[logging.LogRecord]]:
    """Collect the checkers' messages, which go to the root logger, instead of printing them."""
    root = logging.getLogger()
    captured = BufferingHandler(capacity=2**31)
    handlers = root.handlers
    level = root.level
    root.handlers = [captured]
    root.setLevel(logging.INFO)
    try:
        yield captured.buffer
    finally:
        root.handlers = handlers
        root.setLevel(level)


def _check_compliance(logs: Sequence[Path]) -> CheckerResult:
    """Check every log against the rules of its division.

    As in package_checker, one of five may break them, for example a run below the target: the
    slowest does not count.
    """
    broken_rules = {path: _broken_rules(path) for path in logs}
    broken = sum(map(bool, broken_rules.values()))
    lines = [f"{path}: {line}" for path, messages in broken_rules.items() for line in messages]
    return CheckerResult(not broken or (broken == 1 and len(logs) == RUNS), lines)


def _broken_rules(path: Path) -> list[str]:
    package = require_mlperf("compliance_checker.mlp_compliance", PURPOSE)
    checker = package.make_checker(USAGE, ROUND, quiet=True, werror=False)
    package.enqueued_configs.clear()  # of a check that ended by an exception
    with captured_log():
        try:
            checker.check_file(path, f"{USAGE}_{ROUND}/common.yaml")
        except Exception as error:  # rules are evaluated on whatever the log holds
            checker.put_message(f"the checker stopped: {type(error).__name__}: {error}")
    messages = [*checker.overwritable.values(), *checker.not_overwritable]
    return [_without_context(message) for message in messages]


def _without_context(message: str) -> str:
    lines = [line.strip() for line in message.splitlines() if "current context" not in line]
    return clip(" ".join(lines), 300)


def _check_seeds(logs: Sequence[Path]) -> CheckerResult:
    package = require_mlperf("package_checker.seed_checker", PURPOSE)
    with captured_log() as captured, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a log of several seeds is allowed
        passed = package.SeedChecker(ROUND).check_seeds(logs)
    errors = [record.getMessage() for record in captured if record.levelno == logging.ERROR]
    return CheckerResult(passed, [line for error in errors for line in error.splitlines()])


def _check_convergence(logs: Sequence[Path]) -> CheckerResult:
    if len(logs) != RUNS:
        return CheckerResult(None, (f"needs {RUNS} runs, {len(logs)} given",))
    checker = require_mlperf("rcp_checker.rcp_checker", PURPOSE)
    with tempfile.TemporaryDirectory() as folder, captured_log() as captured:
        for number, path in enumerate(logs):
            (Path(folder) / f"result_{number}.txt").symlink_to(path.absolute())
        try:
            passed, message, _ = checker.check_directory(
                folder, USAGE, ROUND, False, False, rcp_pass="pruned_rcps"  # noqa: FBT003, S106
            )  # fmt: skip
        except Exception as error:  # it reads whatever the logs hold
            passed = False
            message = f"the checker stopped: {type(error).__name__}: {error}"
    lines = [message, *map(_line, captured)]
    return CheckerResult(
        bool(passed), [line for line in lines if not line.startswith(("---", "Running"))]
    )


def _line(record: logging.LogRecord) -> str:
    if isinstance(record.args, Mapping):  # a point, of which its numbers are enough
        numbers = {k: v for k, v in record.args.items() if isinstance(v, float | int)}
        return ", ".join(f"{name} {value:.6g}" for name, value in numbers.items())
    return record.getMessage().strip()
