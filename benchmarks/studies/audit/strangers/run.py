"""Audit the loops of this folder, each after a public thread, and write what the audit says.

    python -m benchmarks.studies.audit.strangers.run [--held-back] [SCRIPT ...]

Each loop runs as `largebatch audit --workers 2 SCRIPT`, unchanged. A cause is named if one of its
checks is a fault. It is partly named if such a check is a note, if only another check is a fault,
or if the audit ends with the line at which a worker waits for others. A correct loop must have no
fault.
"""

import argparse
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.speed.measuring import write
from benchmarks.studies.audit.strangers.threads import THREADS, Thread

FOLDER = Path(__file__).parent
LIMIT = 900
"""Seconds after which an audit is stopped."""

ROW = re.compile(r"^(fault|note|unknown|fine) +(.*)$")


def audited(thread: Thread) -> dict[str, Any]:
    """Audit a loop; return the exit code, faults, notes and unknown rows, and the last line."""
    script = FOLDER / f"{thread.script}.py"
    horovod = ["--backend", "horovod"] if thread.horovod else []
    command = [sys.executable, "-m", "largebatch", "audit", "--workers", "2", *horovod, str(script)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)
    except subprocess.TimeoutExpired:
        return {"exit_code": None, "rows": [], "last": f"no answer in {LIMIT} s"}
    lines = [line for line in done.stderr.splitlines() if line.startswith("largebatch: ")]
    last = lines[-1].replace(str(script), f"{thread.script}.py") if lines else ""
    return {"exit_code": done.returncode, "rows": rows(done.stdout), "last": last}


def rows(table: str) -> list[dict[str, str]]:
    """Return the rows of a printed table of findings that are not fine."""
    result: list[dict[str, str]] = []
    width = 0
    for line in table.splitlines():
        match = ROW.match(line)
        if match:
            level, rest = match.groups()
            check, _, text = rest.partition("  ")
            width = len(line) - len(text.lstrip())
            result.append({"level": level, "check": check, "text": text.strip()})
        elif result and line.startswith(" " * width):
            result[-1]["text"] += " " + line.strip()
    return [row for row in result if row["level"] != "fine"]


def named(thread: Thread, result: dict[str, Any]) -> str:
    """Judge an audit: yes, partly or no."""
    faults = {row["check"] for row in result["rows"] if row["level"] == "fault"}
    if thread.correct:
        return "no" if faults else "yes"
    if faults & set(thread.checks):
        return "yes"
    notes = {row["check"] for row in result["rows"] if row["level"] == "note"}
    if faults or notes & set(thread.checks) or "waits for others" in result["last"]:
        return "partly"
    return "no"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("scripts", nargs="*", help="beginnings of names; all by default")
    parser.add_argument("--held-back", action="store_true", help="loops that were held back")
    arguments = parser.parse_args()
    threads = [thread for thread in THREADS if thread.held_back == arguments.held_back]
    if arguments.scripts:
        beginnings = tuple(arguments.scripts)
        threads = [thread for thread in threads if thread.script.startswith(beginnings)]
    table: dict[str, Any] = {}
    for thread in threads:
        result = audited(thread)
        table[thread.script] = {
            "address": thread.address,
            "cause": thread.cause,
            "named": named(thread, result),
            **result,
        }
        print(thread.script, table[thread.script]["named"], result["exit_code"], result["last"])
        for row in result["rows"]:
            print("   ", row["level"], "|", row["check"], "|", row["text"][:300])
    if not arguments.scripts:
        name = "audit_strangers_held" if arguments.held_back else "audit_strangers"
        print(write(name, {"loops": table}))


if __name__ == "__main__":
    main()
