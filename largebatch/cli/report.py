"""The commands `report` (of runs), `report diagnose` and `report mlperf`. They print."""

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from largebatch.cli.printing import print_json, wrapped
from largebatch.errors import LargebatchError, printable
from largebatch.formatting import MISSING, percent, table
from largebatch.rules import Finding
from largebatch.runs.options import AsJson, Count, RunPlace

if TYPE_CHECKING:
    from largebatch.report.record import Record

FAILED = 1  # exit code of a failed check

_WORDS = {True: "passed", False: "FAILED", None: "unchecked"}

Columns = Annotated[Sequence[str], Parameter(metavar="NAME=COLUMN", negative="")]

app = App(name="report", help="Draw the report of a run, or compare runs; diagnose and check them.")


@app.default
def report(run: RunPlace, /, *runs: RunPlace, out: Path | None = None) -> None:
    """Draw the report of a run, or compare several runs in one page.

    Args:
        run: A run folder, or its address.
        runs: Further ones, to compare all of them.
        out: Folder of the report (the run folder, which an address has in the cache), or page of
            the comparison (compare.html).
    """
    from largebatch.report import write_comparison, write_report
    from largebatch.runs.mirror import local_run

    folders = [local_run(place) for place in (run, *runs)]
    if len(folders) == 1:
        print(printable(str(write_report(folders[0], out))))
        return
    page, comparison = write_comparison(folders, out or Path())
    for reason in comparison.left_out:
        print(f"largebatch: left out: {printable(reason)}", file=sys.stderr)
    print(printable(str(page)))


@app.command
def diagnose(
    run: RunPlace,
    other: RunPlace | None = None,
    /,
    *,
    classes: Count | None = None,
    columns: Columns = (),
    json: AsJson = False,
) -> None:
    """Find the likely causes of what went wrong in a run, or in a run with a larger batch.

    Args:
        run: A run folder or its address, the log of another program (CSV, JSON lines,
            trainer_state.json), or a folder of dumps of a run that hung (RUN/hangs/TIME).
        other: A run of the same data in smaller batches, with which it is compared.
        classes: Number of classes, which the logs of other programs lack.
        columns: Columns of such a log, of loss, val_loss, top1 (COLUMN:percent or
            COLUMN:fraction), lr, step, epoch, grad_norm; asked for where the log does not show it.
    """
    from largebatch.report.diagnosis import find_causes, require_comparable
    from largebatch.report.hangs import has_dumps, newest_dumps
    from largebatch.report.logs import read_record
    from largebatch.report.verdict import verdict
    from largebatch.runs.mirror import local_run

    run = local_run(run)
    other = None if other is None else local_run(other)
    if has_dumps(run):
        if other is not None or classes is not None or columns:
            raise LargebatchError(
                f"{run}: has dumps of a run that hung, for which no other run and no option is "
                "read; give only this folder"
            )
        _print_hang(run, json=json)
        return
    judged = read_record(run, classes=classes, columns=columns)
    small = None
    if other is not None:
        small = read_record(other, classes=classes, columns=columns)
        require_comparable(judged, small)
    records = [judged] if small is None else [small, judged]
    ended = verdict(judged.run).words if judged.run and not judged.run.finished else None
    causes = find_causes(judged, small)
    values = [_values(record) for record in records]
    if json:
        runs = [{"name": it.name} | of_run for it, of_run in zip(records, values, strict=True)]
        listed = [{"kind": it.check, "figure": it.text, "remedy": it.remedy} for it in causes]
        named = {"run": judged.name, "runs": runs, "unfinished": ended, "causes": listed}
        notes = {"read": list(judged.notes), "not_checked": list(judged.unchecked)}
        print_json(named | notes)
        return
    rows = [["", *(record.name for record in records)]]
    rows += [
        [name.replace("_1", "-1").replace("_", " "), *(_formatted(name, it[name]) for it in values)]
        for name in values[0]
    ]
    print(printable(table(rows, right=range(1, len(rows[0])))))
    for record in records:
        if record.notes:
            print(wrapped(f"{record.name} was read as: {'; '.join(record.notes)}"))
    if ended:
        print(wrapped(ended))
    _print_causes(judged, causes, dumps=newest_dumps(run))


def _print_causes(judged: "Record", causes: Sequence[Finding], *, dumps: Path | None) -> None:
    if dumps is not None:
        print(wrapped(f"this run hung: largebatch report diagnose {quote(str(dumps))}"))
    if causes:
        print(printable(f"likely causes in {judged.name}, the most likely first:"))
    elif dumps is None:
        print(wrapped(f"{judged.name}: no cause found"))
    for number, cause in enumerate(causes, start=1):
        print(wrapped(f"{number}. {cause.check}: {cause.text}"))
        print(wrapped(f"  to change it: {cause.remedy}"))
    if judged.unchecked:
        print(wrapped(f"not checked, for lack of a record: {', '.join(judged.unchecked)}"))


def _print_hang(dumps: Path, *, json: bool) -> None:
    from largebatch.report.hangs import explain_hang

    findings = explain_hang(dumps)
    if json:
        listed = [{"kind": it.check, "figure": it.text, "remedy": it.remedy} for it in findings]
        print_json({"dumps": dumps, "causes": listed})
        return
    for number, finding in enumerate(findings, start=1):
        print(wrapped(f"{number}. {finding.check}: {finding.text}"))
        print(wrapped(f"  to change it: {finding.remedy}"))


def _values(record: "Record") -> dict[str, float | None]:
    """Return settings and results; None or NaN where they are not known."""
    val_loss, top1 = (
        next((value for value in reversed(column.tolist()) if not math.isnan(value)), math.nan)
        for column in (record.val_loss, record.top1)
    )
    return {
        "global_batch": record.batch,
        "updates": record.updates,
        "epochs": record.epochs,
        "peak_learning_rate": record.peak,
        "warm_up_updates": record.warmup,
        "final_training_loss": record.end,
        "final_validation_loss": val_loss,
        "top_1": top1,
    }


def _formatted(name: str, value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return MISSING
    if name == "top_1":
        return f"{percent(value)} %"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


@app.command
def mlperf(run: Path, /, *runs: Path) -> int:
    """Run MLPerf's checkers on the logs of runs.

    Args:
        run: A run folder, or one of result_*.txt.
        runs: Further ones.
    """
    from largebatch.lab.mlperf.referee import check

    verdicts = check([run, *runs])
    rows: list[tuple[str, str, str]] = []
    for name, verdict in verdicts.items():
        first, *others = verdict.lines or [""]
        rows += [(name, _WORDS[verdict.passed], first), *(("", "", line) for line in others)]
    print(printable(table(rows, right=(0,))))
    return FAILED if False in {verdict.passed for verdict in verdicts.values()} else 0
