"""Measure CPU time, cores, memory and throughput by configuration (GTDLBench).

    python benchmarks/configurations.py

Needs optuna and psutil, and a quiet machine. Carries out `largebatch bench gtdlbench`, one run
after the other, and writes benchmarks/results/configurations_<machine>_<date>.json: what each run
used, means by setting as ratios to the setting `own`, and rank correlations. Started again it
continues.
`--print` prints the table of the newest results.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from defaults import carry_out, usage_of
from measuring import RESULTS, newest, write

from largebatch.lab.studies.metrics import Interval, interval, ratio
from largebatch.lab.studies.settings.correlations import correlations
from largebatch.lab.studies.settings.settings import find

NAME = "configurations"
SUITE = "gtdlbench"
OWN = "own"
COLUMNS = {
    "train_seconds": "training",
    "cpu_seconds": "processor",
    "cores": "cores used",
    "peak_memory_bytes": "memory",
}
"""What is compared with the setting `own`, and its title."""


def main() -> None:
    """Run the study and write the results, or print them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--work", type=Path, default=Path("runs") / NAME, metavar="DIR", help="for the runs")
    add("--print", action="store_true", dest="only_print", help="print the newest results")
    args = parser.parse_args()
    if args.only_print:
        path = newest(NAME, RESULTS)
        if path is None:
            raise SystemExit("there are no results yet: python benchmarks/configurations.py")
        print(*table(json.loads(path.read_text(encoding="utf-8"))), sep="\n")
        return
    cells = carry_out(SUITE, args.work, 1)
    findings = find(cells, ("top1",))
    usage = usage_of(cells)
    result = {
        "usage": usage,
        "times those of own": {
            name: {setting: _against(runs, of[OWN]) for setting, runs in of.items()}
            for name, of in usage.items()
        },
        "rank correlations": {
            name: {
                f"{one}, {other}": found._asdict()
                for (one, other), found in correlations(findings, place).items()
            }
            for place, name in enumerate(findings.recipes)
        },
    }
    print(write(NAME, "python benchmarks/configurations.py", result))


def _against(runs: Sequence[Mapping[str, Any]], own: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the ratios to the setting `own`, by pairs of seeds."""
    found = {}
    for key in COLUMNS:
        both = [{one["seed"]: one[key] for one in each} for each in (runs, own)]
        times = ratio(both[0], both[1]).interval
        found[key] = times and times._asdict()
    return found


def table(result: Mapping[str, Any]) -> Iterator[str]:
    """Yield the rows of the table, in Markdown."""
    titles = [f"{title}, times" for title in COLUMNS.values()]
    yield f"| recipe | setting | top-1, % | images/s | {' | '.join(titles)} |"
    yield "|---" * (len(titles) + 4) + "|"
    for name, settings in result["usage"].items():
        for setting, runs in settings.items():
            top1 = interval(100 * one["top1"] for one in runs)
            speed = interval(one["images_per_second"] for one in runs)
            times = [result["times those of own"][name][setting][key] for key in COLUMNS]
            words = [Interval(**it).with_ends(".2f") if it else "" for it in times]
            yield (
                f"| {name} | {setting} | {top1.mean:.2f} | {speed.mean:,.0f} | "
                f"{' | '.join(words)} |"
            )
    for name, found in result["rank correlations"].items():
        for pair, each in found.items():
            if each["low"] > 0 or each["high"] < 0:
                ends = f"{each['low']:+.2f} to {each['high']:+.2f}, {each['number']} settings"
                yield f"{name}: {pair}: {each['rho']:+.2f} ({ends})"


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("stopped; the same command continues from here")
