"""Run the audit on scripts with planted faults and on correct ones, and write what it finds.

    python -m benchmarks.studies.audit.audit_faults            runs them and writes the results
    python -m benchmarks.studies.audit.audit_faults --tables   prints the newest ones

The scripts are in tests/audit, and run on two Gloo workers. The expected figures follow from the
scripts. The tables also have the published scripts that were audited at commit cb5c1c09, and whose
changes are listed in audit_published_cpu2_2026-11-26.json.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

sys.path.append(str(Path(__file__).parents[3] / "tests" / "support"))

from planted_audit import findings_of, load

from benchmarks.speed.measuring import RESULTS, newest, write
from largebatch.audit import Findings
from largebatch.audit.findings import Check

Rows = dict[str, dict[str, Any]]


def main() -> None:
    """Run all scripts and write the results, or print the tables of the newest ones."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tables", action="store_true", help="print the newest results")
    if parser.parse_args().tables:
        print("\n".join(tables()))
        return
    result = {folder: rows_of(folder) for folder in ("faults", "correct")}
    print(write("audit_faults", result))


def rows_of(folder: str) -> Rows:
    """Return what the audit finds in each script of a folder."""
    return {name: _row(load(folder, name), it) for name, it in findings_of(folder).items()}


def _row(script: ModuleType, findings: Findings | str) -> dict[str, Any]:
    """Return the expected finding of a script with its figure, and all false alarms."""
    assert isinstance(findings, Findings), findings
    check: Check | None = getattr(script, "EXPECTED", None)
    level = getattr(script, "LEVEL", "fault")
    hits = [it for it in findings.named(check) if it.level == level] if check else []
    caused = {check, *getattr(script, "ALSO", ())}
    return {
        "check": check,
        "level": level if check else None,
        "figure": hits[0].figure if hits else None,
        "false alarms": [it.check for it in findings.faults if it.check not in caused],
        "unknown": [it.check for it in findings if it.level == "unknown"],
    }


def newest_result(name: str) -> dict[str, Any]:
    """Return the newest results of a name."""
    path = newest(name, RESULTS, machine="*")
    assert path is not None, f"{name}: the results are in the repository"
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def tables() -> Iterator[str]:
    """Yield the lines of the tables: planted faults, correct scripts, published scripts."""
    result = newest_result("audit_faults")
    rows: Rows = result["faults"]
    found = sum(row["figure"] is not None for row in rows.values())
    alarms = sum(bool(row["false alarms"]) for row in rows.values())
    yield f"{found} of {len(rows)} planted faults are found; {alarms} of these have another fault."
    yield ""
    yield "| planted fault, and a report of it | check | level | expected | measured |"
    yield "|---|---|---|---|---|"
    checks = get_args(Check)
    for name in sorted(rows, key=lambda name: checks.index(rows[name]["check"])):
        row, script = rows[name], load("faults", name)
        fault = f"[{_summary(script)}]({script.ISSUE})"
        if not script.ISSUE.startswith("https://"):
            fault = f"{_summary(script)}: {script.ISSUE}"
        figure = "not found" if row["figure"] is None else f"{row['figure']:.4g}"
        yield f"| {fault} | {row['check']} | {row['level']} | {script.FIGURE:.4g} | {figure} |"
    yield from ("", "| correct script | false alarms |", "|---|---|")
    for name, row in result["correct"].items():
        yield f"| {_summary(load('correct', name))} | {', '.join(row['false alarms']) or '0'} |"
    yield from ("", "| published script | faults | notes | changes |", "|---|---|---|---|")
    for name, row in newest_result("audit_published")["scripts"].items():
        place = f"https://github.com/{row['repository']}/blob/{row['commit']}/{row['path']}"
        cells = [f"[{name}]({place})"]
        for level in ("fault", "note"):
            named = [it["check"] for it in row["findings"] if it["level"] == level]
            cells.append(", ".join(named) or "none")
        yield f"| {' | '.join([*cells, row['changes']])} |"


def _summary(script: ModuleType) -> str:
    assert script.__doc__
    return " ".join(script.__doc__.split("\n\n")[0].split()).rstrip(".")


if __name__ == "__main__":
    main()
