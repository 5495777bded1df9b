"""Write the records of a study on hosts as one file of results.

    largebatch study servers jaeger --data ... --out runs/jaeger
    python benchmarks/studies_on_hosts.py servers jaeger runs/jaeger

The study measures; this reads its records, which have the commit and the load of the machine
before each start, and writes the rows with their intervals.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from measuring import spread, write

from largebatch.studies.hosts.starts import Start, starts_of
from largebatch.studies.metrics import Interval
from largebatch.studies.scaling import rows as scaling_rows
from largebatch.studies.scaling import study as scaling
from largebatch.studies.servers import rows as servers_rows
from largebatch.studies.servers import study as servers
from largebatch.studies.servers.simulated import findings, sweeps


def main() -> None:
    """Read the records, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kind", choices=["servers", "scaling"])
    parser.add_argument("study", help="a file, or the name of an installed study")
    parser.add_argument("records", type=Path, help="the folder of its records")
    parser.add_argument("--name", help="name of the result, as sources.py has it (KIND)")
    args = parser.parse_args()
    read = _servers if args.kind == "servers" else _scaling
    starts, rows, found = read(args.study, args.records)
    records = [json.loads(start.path.read_bytes()) for start in starts if start.path.exists()]
    result = {
        "study": args.study,
        "starts": len(records),
        "commits": sorted({record["commit"] for record in records}),
        "load before a start": spread([record["load_before"] for record in records]),
        "rows": rows,
        "found": found,
    }
    command = f"largebatch study {args.kind} {args.study}"
    print(write(args.name or args.kind, command, result))


def _servers(name: str, out: Path) -> tuple[Sequence[Start], list[dict[str, Any]], list[str]]:
    study = servers.load_study(name)
    cells = servers.cells_of(study, Path(name).parent)
    starts = starts_of(cells, repeats=study.repeats, data={}, out=out)
    rows = servers_rows.rows_of(cells, starts)
    swept = sweeps(study, Path(name).parent, rows)
    found = [
        {
            "cell": row.cell.name,
            "model_bytes": row.model_bytes,
            "batches_per_second": as_interval(row.throughput),
            "speed_up": as_interval(row.speed_up),
            "seconds": [start.seconds for start in row.found.values()],
            "late": row.late,
            "links": [
                {"measured": own._asdict(), "formula": by._asdict()}
                for own, by in zip(row.measured, row.expected, strict=True)
            ],
        }
        for row in rows
    ]
    words = [
        *servers_rows.slower(rows, "measured"),
        *servers_rows.findings(rows),
        *findings(swept, rows),
    ]
    return starts, found, words


def _scaling(name: str, out: Path) -> tuple[Sequence[Start], list[dict[str, Any]], list[str]]:
    study = scaling.load_study(name)
    cells = scaling.cells_of(study, Path(name).parent)
    starts = starts_of(cells, repeats=study.repeats, data={}, out=out)
    rows = scaling_rows.rows_of(study, cells, starts)
    found = [
        {
            "cell": row.cell.name,
            "scaling": row.scaling,
            "samples_per_second": as_interval(row.throughput),
            "ideal": row.ideal,
            "speed_up": as_interval(row.speed_up),
            "seconds": as_interval(row.seconds),
            "predicted_seconds": row.predicted,
            "learning_rates": [start.rates for start in row.found.values()][:1],
        }
        for row in rows
    ]
    return starts, found, list(scaling_rows.findings(rows))


def as_interval(found: Interval | None) -> dict[str, float | None] | None:
    """Return a mean and its ends for JSON; one value has no ends."""
    if found is None:
        return None
    ends = (None, None) if found.number < 2 else (found.low, found.high)
    return {"mean": found.mean, "low": ends[0], "high": ends[1], "n": found.number}


if __name__ == "__main__":
    main()
