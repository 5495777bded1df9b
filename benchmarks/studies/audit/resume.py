"""Audit scripts that resume wrongly and rightly, and write what is named.

    python -m benchmarks.studies.audit.resume [NAME...]

The scripts are those of tests/support/resumed_loops.py. For each the results have the findings that
are not fine, whether the fault was named by the check that must name it, and what else was called a
fault. benchmarks/results/audit_resume_cpu2_2026-11-30.json has what was named at first sight,
before the rules were changed for a script.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.speed.measuring import write

SUPPORT = Path(__file__).parents[3] / "tests" / "support"


def audit_one(name: str) -> dict[str, Any]:
    """Return what an audit finds in a script."""
    from resumed_loops import CORRECT, FAULTS, HELD
    from resumed_runs import findings_of

    script = (CORRECT | FAULTS | HELD)[name]
    with tempfile.TemporaryDirectory() as folder:
        findings = findings_of(script, Path(folder))
    faults = [it.check for it in findings.faults]
    return {
        "report": script.report,
        "held_back": name in HELD,
        "check": script.check,
        "named": script.check in faults if script.check else not faults,
        "others": [it for it in faults if it != script.check],
        "findings": [
            {"level": it.level, "check": it.check, "figure": it.figure, "text": it.text}
            for it in findings
            if it.level != "fine"
        ],
    }


def main() -> None:
    """Audit the scripts and write the results."""
    sys.path.append(str(SUPPORT))
    from resumed_loops import CORRECT, FAULTS, HELD

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="scripts (all that need no other library)")
    libraries = {"accelerate", "lightning", "transformers"}
    names = parser.parse_args().names or sorted({*CORRECT, *FAULTS, *HELD} - libraries)
    results = {}
    for name in names:
        results[name] = audit_one(name)
        print(name, "named" if results[name]["named"] else "NOT NAMED", results[name]["others"])
    faulty = [it for it in results.values() if it["check"]]
    correct = [it for it in results.values() if not it["check"]]
    named = sum(it["named"] for it in faulty)
    silent = sum(it["named"] for it in correct)
    print(f"named: {named} of {len(faulty)}; no fault in {silent} of {len(correct)} correct ones")
    print(f"results: {write('audit_resume', {'scripts': results})}")


if __name__ == "__main__":
    main()
