"""Write the records of a study on hosts, or of staleness, as one file of results.

    largebatch study servers jaeger --data ... --out runs/jaeger
    python benchmarks/studies_on_hosts.py servers jaeger runs/jaeger

The study measures; this reads its records, which on hosts have the commit and the load of the
machine before each start, and writes the rows with their intervals. Of a study of staleness with
several seeds it also writes what each cell has less hardsync of the same recipe, times, mu and
lambda: these differences hold together, with 95 %, by the noise of all cells of which no run fails
(contrasts.py); a cell of which one fails has none.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from contrasts import contrast, no_run_fails, noise_of, none_fails
from measuring import spread, write

from largebatch.lab.studies.hosts.starts import Start, starts_of
from largebatch.lab.studies.metrics import Interval
from largebatch.lab.studies.scaling import rows as scaling_rows
from largebatch.lab.studies.scaling import study as scaling
from largebatch.lab.studies.servers import rows as servers_rows
from largebatch.lab.studies.servers import study as servers
from largebatch.lab.studies.servers.simulated import findings, sweeps
from largebatch.lab.studies.staleness import run as staleness_runs
from largebatch.lab.studies.staleness import study as staleness


def main() -> None:
    """Read the records, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kind", choices=["servers", "scaling", "staleness"])
    parser.add_argument("study", help="a file, or the name of an installed study")
    parser.add_argument("records", type=Path, help="the folder of its records")
    parser.add_argument("--name", help="name of the result, as sources.py has it (KIND)")
    args = parser.parse_args()
    command = f"largebatch study {args.kind} {args.study}"
    name = args.name or args.kind
    if args.kind == "staleness":
        print(write(name, command, _staleness(args.study, args.records)))
        return
    read = _servers if args.kind == "servers" else _scaling
    starts, rows, found = read(args.study, args.records)
    records = [json.loads(start.path.read_bytes()) for start in starts if start.path.exists()]
    result = {
        "study": args.study,
        "starts": len(records),
        "starts that the study has": len(starts),
        "commits": sorted({record["commit"] for record in records}),
        "load before a start": spread([record["load_before"] for record in records]),
        "rows": rows,
        "found": found,
    }
    print(write(name, command, result))


def _staleness(name: str, out: Path) -> dict[str, Any]:
    study = staleness.load_study(name)
    cells = staleness.cells_of(study, Path(name).parent)
    runs = staleness_runs.runs_of(cells, seeds=study.seeds, out=out)
    rows = staleness_runs.rows_of(runs)
    return {
        "study": name,
        "runs": sum(len(row.found) for row in rows),
        "runs that the study has": len(runs),
        "rows": [
            {
                "cell": row.cell.name,
                "top1": row.by_seed,
                "diverged": row.diverged,
                "seconds": row.seconds,
                "tau": row.tau,
                "late": row.late / sum(row.counts),
            }
            for row in rows
        ],
        "points above hardsync": above_hardsync(
            [row for row in rows if len(row.found) == study.seeds]
        ),
    }


def above_hardsync(rows: Sequence[staleness_runs.Row]) -> dict[str, dict[str, float]]:
    """Return the points of top-1 of each cell above hardsync; none for fewer than two seeds."""
    waits = {_place(row): row.by_seed for row in rows if not row.cell.sigma}
    good = none_fails(row.by_seed for row in rows)
    pairs = {
        row.cell.name: (row.by_seed, waits[_place(row)])
        for row in rows
        if row.cell.sigma and _place(row) in waits and no_run_fails(row.by_seed, waits[_place(row)])
    }
    if not pairs or len(good[0]) < 2:
        return {}
    noise = noise_of(good)
    return {
        name: contrast([(1.0, late), (-1.0, waiting)], noise, together=len(pairs))
        .scaled(100)
        ._asdict()
        for name, (late, waiting) in pairs.items()
    }


def _place(row: staleness_runs.Row) -> tuple[str, str, int, int]:
    cell = row.cell
    return cell.configuration, cell.times, cell.mu, cell.learners


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
