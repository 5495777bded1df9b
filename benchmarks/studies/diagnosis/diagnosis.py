"""Judge recorded runs with known causes, and healthy ones, as `largebatch report diagnose` does.

    python -m benchmarks.studies.diagnosis.diagnosis [--record [NAME ...]]

`--record` trains the runs of cases.py, or those named, and keeps their logs in
tests/report/recorded_runs; the others stay as they are. Writes how many faults are found first, and
how many healthy runs have a cause that harms, or only a remark on time, for the runs with which
thresholds were set and for those held out.
"""

import argparse
import io
import tarfile
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.speed.measuring import write
from benchmarks.studies.diagnosis.cases import AT_FIRST_SIGHT, CASES, Case, write_images
from largebatch import run
from largebatch.errors import DivergedError
from largebatch.recipe.loading import parse_recipe
from largebatch.report.diagnosis import find_causes
from largebatch.report.logs import read_record
from largebatch.tracking.events import LOG, RECIPE, SUMMARY

ARCHIVE = Path(__file__).parents[3] / "tests" / "report" / "recorded_runs" / "runs.tar.xz"
FILES = (LOG, RECIPE, SUMMARY)


def main() -> None:
    """Record runs if asked to, judge all of them and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--record", nargs="*", metavar="NAME", help="train these runs, or all")
    args = parser.parse_args()
    with TemporaryDirectory() as work:
        folder = Path(work)
        if ARCHIVE.exists():
            unpack(folder)
        if args.record is not None:
            named = [case for case in CASES if not args.record or case.name in args.record]
            record(named, folder)
            pack(folder)
        rows = [judge(case, folder) for case in CASES]
    for row in rows:
        print(f"{row['run']:14} {row['cause'] or 'healthy':28} {row['found']}")
    print(write("diagnosis", summary(rows)))


def record(cases: Iterable[Case], folder: Path) -> None:
    """Train runs into folders of their names."""
    with TemporaryDirectory() as work:
        for case in cases:
            out, data = Path(work, "runs", case.name), Path(work, case.data)
            if not case.is_slow and not data.exists():
                write_images(case.data, data)
            train(case, out, data)
            (folder / case.name).mkdir(exist_ok=True)
            for name in FILES:
                (folder / case.name / name).write_bytes((out / name).read_bytes())


def train(case: Case, out: Path, data: Path) -> None:
    """Train one run, which may diverge."""
    module = "benchmarks.studies.diagnosis.cases"
    cached = () if case.is_slow else ("execution.cache=memory",)
    recipe = parse_recipe(case.recipe(), [*case.changes, *cached])
    source: dict[str, Any] = (
        {"dataset": f"{module}:{case.data}"} if case.is_slow else {"data": data}
    )
    try:
        run(recipe, imports=[module], out=out, report=False, **source)
    except DivergedError as error:
        print(error)


def pack(folder: Path) -> None:
    """Write all run folders to the archive, the same bytes for the same runs."""
    ARCHIVE.parent.mkdir(exist_ok=True)
    with tarfile.open(ARCHIVE, "w:xz", preset=9) as archive:
        for path in sorted(folder.glob("*/*")):
            content = path.read_bytes()
            entry = tarfile.TarInfo(path.relative_to(folder).as_posix())
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))


def unpack(folder: Path) -> None:
    """Write the recorded run folders below a folder."""
    with tarfile.open(ARCHIVE) as archive:
        # Python before 3.11.4 has no filters; the archive is our own.
        archive.extraction_filter = getattr(tarfile, "data_filter", lambda member, _: member)
        archive.extractall(folder)


def judge(case: Case, folder: Path) -> dict[str, Any]:
    """Return what a diagnosis finds in a run."""
    small = read_record(folder / case.small) if case.small else None
    causes = find_causes(read_record(folder / case.name), small)
    return {
        "run": case.name,
        "held out": case.held_out,
        "cause": case.cause,
        "found": [cause.check for cause in causes],
        "harmful": [cause.check for cause in causes if cause.level == "fault"],
        "figure": causes[0].figure if causes else None,
    }


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Count faults that are found first, and healthy runs that have a cause."""
    result: dict[str, Any] = {}
    for name, held_out in (("thresholds set with these", False), ("held out", True)):
        part = [row for row in rows if row["held out"] == held_out]
        faults = [row for row in part if row["cause"]]
        healthy = [row for row in part if not row["cause"]]
        result[name] = {
            "faults": len(faults),
            "found first": sum(row["found"][:1] == [row["cause"]] for row in faults),
            "found at all": sum(row["cause"] in row["found"] for row in faults),
            "healthy": len(healthy),
            "false alarms": sum(bool(row["harmful"]) for row in healthy),
            "with a remark on time": sum(row["found"] != row["harmful"] for row in healthy),
        }
    found = result["held out"]["found first"]
    result["held out, at first sight"] = {
        "faults": found + len(AT_FIRST_SIGHT),
        "found first": found,
        "missed, and what was found": AT_FIRST_SIGHT,
    }
    return result | {"runs": rows}


if __name__ == "__main__":
    main()
