"""Run MLPerf's own checkers on the logs of runs, and describe their results in sentences.

Nothing is checked here: compliance_checker, rcp_checker, package_checker's seed checker and
system_desc_checker of the package mlperf-logging are called as by the package's commands.

Reference convergence points (RCPs) are epochs to the target that MLPerf's reference
implementation took at some batches; a submission of the closed division must not converge faster
than they allow. The package tests this by Student's t-test and has no bootstrap; the interval of
our own mean is scipy's.
"""

import json
import logging
import re
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from largebatch.errors import LargebatchError, clip, shorten
from largebatch.formatting import plural
from largebatch.lab.mlperf.logger import MLPERF_LOG, UNNAMED
from largebatch.lab.mlperf.rules import BENCHMARK, ROUND, TARGET, USAGE
from largebatch.optional import require_mlperf, require_scipy
from largebatch.report.style import COLOURS, INK, MUTED, name_axes, name_line, write_chart

if TYPE_CHECKING:
    from largebatch.report.style import Axes, Figure

PURPOSE = "referee"
MARK = "FILL IN"
"""Prefix of a field that is unknown here."""

_OURS = COLOURS["train"]
_BOUND: dict[str, Any] = {"color": INK, "lw": 1.2, "ls": (0, (4, 3))}


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


RUNS = 5
"""Number of runs of a ResNet submission; the fastest and the slowest do not count."""

_DRAWS = 9_999
"""Number of bootstrap samples."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of one checker."""

    name: Literal["compliance", "seeds", "convergence", "system"]
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

    interval: tuple[float, float] | None
    """95 % bootstrap interval of our mean; None if a run did not reach the target."""


@dataclass(frozen=True, slots=True)
class Point:
    """Epochs to the target of the reference's runs at one batch."""

    batch: int
    epochs: tuple[float, ...]
    mean: float
    least: float
    counts: bool
    """True if it bounds submissions; other points converge slower than their neighbours suggest."""


@dataclass(frozen=True, slots=True)
class Findings:
    """Results of all checkers for some runs."""

    logs: tuple[Log, ...]
    verdicts: tuple[Verdict, ...]
    reference: Reference | None
    points: tuple[Point, ...]

    @property
    def passed(self) -> bool:
        """True if no checker failed."""
        return all(verdict.passed is not False for verdict in self.verdicts)


def check(folders: Sequence[Path], *, system: Path | None = None) -> Findings:
    """Run MLPerf's checkers on the logs in run folders, or in folders of result_*.txt.

    `system` is a system description. Raises LogError for logs that cannot be checked,
    MissingPackageError without mlperf-logging.
    """
    logs = tuple(read_log(path) for folder in folders for path in find_logs(folder))
    if len({log.division for log in logs}) > 1:
        divisions = [f"{log.path}: {log.division}" for log in logs]
        raise LogError(f"logs of one submission are of one division, found {shorten(divisions)}")
    convergence, reference = _check_convergence(logs)
    verdicts = (_check_compliance(logs), _check_seeds(logs), convergence, _check_system(system))
    return Findings(logs, verdicts, reference, _points())


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
    r"""Summarize the compliance checker's message in one sentence.

    >>> _explain("CHECK for 'lars_epsilon' failed in line 3:\n"
    ...     ':::MLLOG {"key": "lars_epsilon", "value": 1e-9, "metadata": {}}\n'
    ...     "failed test:  v['value'] == 0.0 \ncurrent context[s]={}")
    'lars_epsilon is 1e-09; the rule is: lars_epsilon == 0.0'
    >>> _explain("Failed checks for eval_accuracy :  v['value'] >= 0.759 ")
    'no eval_accuracy keeps the rule: eval_accuracy >= 0.759'
    """
    lines = message.splitlines()
    checked = re.match(r"CHECK for '(\w+)' failed", message)
    missed = re.match(r"Failed checks for (\w+) :(.*)", message)
    if missed:
        key, rule = missed.groups()
        return f"no {key} keeps the rule: {_rule(rule, key)}"
    if not checked:
        said = [line for line in lines if not line.startswith("current context")]
        return clip(" ".join(said[:2]), 300)
    key = checked[1]
    line = json.loads(lines[1].partition(" ")[2])
    rule = _rule(lines[2].removeprefix("failed test:"), key)
    value = line["metadata"] if "metadata" in rule else line["value"]
    return f"{key} is {clip(repr(value), 200)}; the rule is: {rule}"


def _rule(test: str, key: str) -> str:
    return test.replace("v['value']", key).strip()


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
    if not all(log.complete for log in logs):
        return Verdict("convergence", None, "a log lacks what the test reads"), None
    if len({log.batch for log in logs}) > 1:
        batches = [f"{log.path}: {log.batch:,}" for log in logs]
        raise LogError(f"logs of one submission are of one global batch, found {shorten(batches)}")
    if len(logs) != RUNS:
        return Verdict("convergence", None, f"needs {RUNS} runs, {len(logs)} given"), None
    checker = require_mlperf("rcp_checker.rcp_checker", PURPOSE)
    with tempfile.TemporaryDirectory() as folder, captured_log() as captured:
        for number, log in enumerate(logs):
            (Path(folder) / f"result_{number}.txt").symlink_to(log.path.absolute())
        passed, found, factor = checker.check_directory(
            folder, USAGE, ROUND, False, False, rcp_pass="pruned_rcps"  # noqa: FBT003, S106
        )  # fmt: skip
    reference = _reference(captured, logs)
    text = found
    if found == "Insufficient convergence":
        text = f"more than one run did not reach {TARGET:.1%}"
    if reference is not None:
        text = _describe(reference, logs, factor=float(factor) if passed else 1.0)
    if logs[0].division == "open":
        return Verdict("convergence", None, f"not required in the open division; {text}"), reference
    return Verdict("convergence", passed=bool(passed), sentence=text), reference


def _reference(captured: Sequence[logging.LogRecord], logs: Sequence[Log]) -> Reference | None:
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
        interval=_interval([log.epochs for log in logs]),
    )


def _interval(epochs: Sequence[float | None]) -> tuple[float, float] | None:
    """Return the 95 % percentile interval of the mean without extremes, from a fixed seed."""
    known = [epoch for epoch in epochs if epoch is not None]
    if len(known) < len(epochs):
        return None
    import numpy as np

    bootstrap = require_scipy("scipy.stats").bootstrap

    def olympic(drawn: Any, axis: int) -> Any:  # noqa: ANN401 -- arrays of any shape
        return np.sort(drawn, axis=axis).take(range(1, len(known) - 1), axis).mean(axis)

    result = bootstrap(
        (known,), olympic, n_resamples=_DRAWS, method="percentile", rng=np.random.default_rng(1)
    ).confidence_interval
    return float(result.low), float(result.high)


def _describe(reference: Reference, logs: Sequence[Log], *, factor: float) -> str:
    interval, at = "", ""
    if reference.interval is not None:
        low, high = reference.interval
        interval = f" (95 % by bootstrap: {low:.2f} to {high:.2f})"
    if reference.batch != logs[0].batch:
        at = f" at its smallest batch, {reference.batch:,}"
    times = f"; faster, so times are multiplied by {factor:.4f}" if factor > 1 else ""
    return (
        f"{plural(len(logs), 'run')} at batch {logs[0].batch or 0:,}: {reference.ours:.2f} epochs"
        f"{interval} to {TARGET:.1%}; reference{at}: {reference.mean:.2f} (std "
        f"{reference.std:.2f}), at least {reference.least:.2f} accepted{times}"
    )


def _points() -> tuple[Point, ...]:
    package = require_mlperf("rcp_checker.rcp_checker", PURPOSE)
    checker = package.RCP_Checker(USAGE, ROUND, BENCHMARK, False)  # noqa: FBT003
    return tuple(
        Point(
            batch=record["BS"],
            epochs=tuple(map(float, record["Epochs to converge"])),
            mean=float(record["RCP Mean"]),
            least=float(record["Min Epochs"]),
            counts=name in checker.pruned_rcp_data,
        )
        for name, record in checker.rcp_data.items()
    )


def _check_system(path: Path | None) -> Verdict:
    if path is None:
        text = "no description of the system is given (--describe drafts one)"
        return Verdict("system", None, text)
    try:
        faults = problems(path)
    except TypeError as error:  # the checker joins some of the values
        faults, sentence = [str(error)], "every field of a system description is a text"
    else:
        sentence = f"{path} does not fit MLPerf's rules"
    if not faults:
        return Verdict("system", passed=True, sentence=f"{path} has every required field")
    reasons = tuple(f"{path}: {reason}" for reason in faults)
    return Verdict("system", passed=False, sentence=sentence, reasons=reasons)


def problems(path: Path) -> list[str]:
    """Return the package's failures for a description, and its leftover marks.

    Raises LogError if it is no JSON object, and TypeError, as the checker does, for a value that
    is not text.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError(f"expected an object, found {clip(json.dumps(content), 80)}")  # noqa: TRY004 -- of a file
        reasons = missing_fields(path)
    except (OSError, ValueError) as error:
        raise LogError(f"{path}: is not a system description in JSON: {error}") from None
    left = [field for field, text in content.items() if str(text).startswith(MARK)]
    return [*reasons, *([f"to be filled in: {', '.join(left)}"] if left else [])]


def missing_fields(path: Path) -> list[str]:
    """Return the failures that the checker of system descriptions logs."""
    package = require_mlperf("system_desc_checker.system_desc_checker", PURPOSE)
    with captured_log() as captured:
        if package.check_system_desc(path, USAGE, ROUND)[0]:
            return []
    args: Any = next(record.args for record in captured if record.levelno == logging.ERROR)
    return list(args[1])


def write_convergence(
    path: Path,
    points: Sequence[Point],
    reference: Reference,
    *,
    batch: int,
    epochs: Sequence[float],
) -> None:
    """Draw runs at `batch` and their epochs next to the reference, into a PNG file.

    Raises as write_chart.
    """

    def draw(figure: "Figure") -> None:
        left, right = figure.subplots(1, 2, width_ratios=[3, 2])
        _draw_points(left, points, batch=batch, epochs=epochs)
        _draw_distribution(right, reference, epochs=epochs)

    write_chart(path, draw, size=(960, 360))


def _draw_points(
    axes: "Axes", points: Sequence[Point], *, batch: int, epochs: Sequence[float]
) -> None:
    for point in points:
        axes.plot(
            [point.batch] * len(point.epochs), point.epochs,
            color=MUTED, marker="o", ms=4, lw=0, alpha=0.35,
        )  # fmt: skip
    bounds = [point for point in points if point.counts]
    axes.plot([point.batch for point in bounds], [point.mean for point in bounds], color=MUTED)
    axes.plot([point.batch for point in bounds], [point.least for point in bounds], **_BOUND)
    axes.plot([batch] * len(epochs), epochs, color=_OURS, marker="o", ms=7, lw=0, zorder=3)
    axes.xaxis.set_major_formatter("{x:,g}")
    title = name_axes(axes, y="Epochs to the target", x="Global batch")
    title = name_line(axes, "reference", MUTED, after=title)
    title = name_line(axes, "fewest accepted", INK, after=title)
    name_line(axes, "ours", _OURS, after=title)


def _draw_distribution(axes: "Axes", reference: Reference, *, epochs: Sequence[float]) -> None:
    import numpy as np

    spread = max(reference.std, 0.01)
    low = min([reference.mean - 4 * spread, *epochs])
    high = max([reference.mean + 4 * spread, *epochs])
    grid = np.linspace(low, high, 400)
    density = np.exp(-0.5 * ((grid - reference.mean) / spread) ** 2)
    axes.fill_between(grid, density, color=MUTED, alpha=0.25, lw=0)
    axes.axvline(reference.mean, ymax=0.95, color=MUTED)
    axes.axvline(reference.least, ymax=0.95, **_BOUND)
    heights = [0.1 + 0.08 * sorted(epochs)[:place].count(epoch)
               for place, epoch in enumerate(sorted(epochs))]  # fmt: skip
    axes.plot(sorted(epochs), heights, color=_OURS, marker="o", ms=7, lw=0)
    if reference.interval is not None:
        axes.plot(reference.interval, [0.62, 0.62], color=_OURS, lw=2.5)
    axes.plot([reference.ours], [0.62], color=_OURS, marker="D", ms=8)
    axes.set_ylim(0, 1.08)
    axes.set_yticks([])
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_title(f"At batch {reference.batch:,}: runs, and their mean with 95 % (bootstrap)")
    axes.set_xlabel("Epochs →", loc="right")
