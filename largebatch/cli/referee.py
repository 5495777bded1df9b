"""The command `referee`: run MLPerf's checkers on the logs of runs. It prints."""

import argparse
import json
import platform
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from largebatch.cli.arguments import Command
from largebatch.errors import LargebatchError, printable
from largebatch.formatting import aligned

if TYPE_CHECKING:
    from largebatch.lab.mlperf.referee import Findings

FAILED = 1
"""Exit code of a failed check."""

_WORDS = {True: "passed", False: "FAILED", None: "unchecked"}


def add_commands(command: Command) -> None:
    """Add the command `referee`."""
    text = "run MLPerf's checkers on the logs of runs, and draw their epochs beside the reference"
    referee = command("referee", _referee, text)
    referee.add_argument(
        "runs", type=Path, nargs="+", metavar="run", help="a run folder, or one of result_*.txt"
    )
    referee.add_argument("--system", type=Path, metavar="JSON", help="a system description")
    referee.add_argument(
        "--describe",
        action="store_true",
        help="print a system description to fill in; run it on a node of the run",
    )
    referee.add_argument("--json", action="store_true", help="print all of it as JSON")
    referee.add_argument(
        "--out",
        type=Path,
        default=Path("referee.png"),
        metavar="PNG",
        help="the chart (referee.png)",
    )


def _referee(args: argparse.Namespace) -> int:
    """Print the verdicts; return 1 if a check failed.

    The chart comes last: an error in drawing it changes no verdict.
    """
    if args.describe:
        return _describe(args)
    from largebatch.lab.mlperf.referee import check
    from largebatch.report.style import require_png

    require_png(args.out)
    findings = check(args.runs, system=args.system)
    if not args.json:
        _show(findings)
    chart = None
    try:
        chart = _draw(findings, args.out)
    except LargebatchError as error:
        print(f"largebatch: {printable(str(error))}", file=sys.stderr)
    if args.json:
        print(json.dumps(_as_json(findings, chart), indent=2))
    elif chart is not None:
        print(printable(f"drawn: {chart}"))
    return 0 if findings.passed else FAILED


def _describe(args: argparse.Namespace) -> int:
    """Print a draft of the system description of one run."""
    if len(args.runs) > 1 or args.system is not None or args.json:
        raise LargebatchError(
            "--describe prints the system of one run, as JSON: give one run, and neither --system "
            "nor --json"
        )
    from largebatch.lab.mlperf.system_description import MARK, describe

    content = describe(args.runs[0])
    print(json.dumps(content, indent=2))
    marks = sum(text.startswith(MARK) for text in content.values())
    print(
        f"largebatch: {marks} of {len(content)} fields begin with {MARK!r}: they are yours; "
        f"the hardware is this machine's, {printable(platform.node())}",
        file=sys.stderr,
    )
    return 0


def _draw(findings: "Findings", out: Path) -> Path | None:
    """Draw the chart if there is a reference, and return its path."""
    from largebatch.lab.mlperf.page import write_convergence

    batch = findings.logs[0].batch
    if findings.reference is None or batch is None:
        return None
    epochs = [log.epochs for log in findings.logs if log.epochs is not None]
    write_convergence(out, findings.points, findings.reference, batch=batch, epochs=epochs)
    return out


def _show(findings: "Findings") -> None:
    rows: list[tuple[str, str, str]] = []
    for verdict in findings.verdicts:
        rows.append((verdict.name, _WORDS[verdict.passed], verdict.sentence))
        rows += [("", "", reason) for reason in verdict.reasons]
    remarks = dict.fromkeys(remark for log in findings.logs for remark in log.remarks)
    rows += [("remark", "", remark) for remark in remarks]
    print(printable(aligned(rows, right=(0,))))


def _as_json(findings: "Findings", chart: Path | None) -> dict[str, object]:
    return {
        "passed": findings.passed,
        "verdicts": [asdict(verdict) for verdict in findings.verdicts],
        "logs": [asdict(log) | {"path": str(log.path)} for log in findings.logs],
        "reference": asdict(findings.reference) if findings.reference else None,
        "chart": str(chart) if chart else None,
    }
