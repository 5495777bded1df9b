"""Measure again what is stale on this machine, then write the table: `make bench`.

    python benchmarks/renew.py [--all] [--list]

A benchmark is measured if it has no result on a machine like this one, or if the code that its
newest result measured has changed since (sources.py). One that fails does not stop the others; the
command fails at the end. Stale results of studies, which take hours, are listed with their command.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from measuring import RESULTS, newest
from sources import MEASURED, is_stale

ROOT = Path(__file__).parents[1]

COMMANDS = {
    "lars": "lars.py --rounds 40 --threads 2",
    "loop": "loop.py --rounds 40 --steps 1",
    "reduction": "reduction.py --rounds 12",
    "norm": "norm.py --rounds 6 --spans 32",
    "input_host": "input_host.py",
    "checkpoint": "checkpoint.py --rounds 8 --model resnet50 --batch 6 --pixels 128",
    "polish": "polish.py --rounds 9",
    "polish_error": "polish_error.py",
    "noise_cost": "noise.py --rounds 10 --batch 8 --pixels 128",
    "simulator": "simulator.py --rounds 1 --learners 10000 --updates 1000000",
    "index": "index.py --rounds 3",
    "decoder_pixels": "decoder_pixels.py",
    "input_pipeline": "input_pipeline.py --rounds 9",
}
"""The benchmarks that take minutes, each with its script of this folder."""

ENVIRONMENT = {"checkpoint": {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}}

NEED_DATA = {"decoder_pixels", "index", "input_pipeline"}
"""Benchmarks of real images, from the folder LARGEBATCH_DATA."""


def main() -> None:
    """Run the benchmarks and write the table; exit with 1 if one failed."""
    parser = argparse.ArgumentParser(description="measure again what is stale on this machine")
    parser.add_argument("--all", action="store_true", help="measure all, stale or not")
    parser.add_argument("--list", action="store_true", help="print the stale benchmarks and stop")
    args = parser.parse_args()
    stale = stale_benchmarks()
    for name, command in stale.items():
        if name not in COMMANDS:
            print(f"stale, not measured by this command: {name}: {command}")
    chosen = [name for name in COMMANDS if args.all or name in stale]
    if args.list:
        print("\n".join(chosen) or "no benchmark is stale")
        return
    failed = [name for name in chosen if not measure(name)]
    subprocess.run([sys.executable, "benchmarks/table.py"], cwd=ROOT, check=True)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def stale_benchmarks() -> dict[str, str]:
    """Return the benchmarks to measure again on this machine, each with its command."""
    found = {}
    for name in MEASURED:
        path = newest(name, RESULTS)
        result = json.loads(path.read_text(encoding="utf-8")) if path else None
        if result is None and name in COMMANDS:
            found[name] = COMMANDS[name]
        elif result is not None and is_stale(name, result):
            about = result if "command" in result else next(iter(result.values()))
            found[name] = about["command"]
    return found


def measure(name: str) -> bool:
    """Run one benchmark; return False if it failed."""
    if name in NEED_DATA and not os.environ.get("LARGEBATCH_DATA"):
        print(f"{name}: skipped, LARGEBATCH_DATA names no folder of data sets")
        return True
    print(f"\n--- {name}: {COMMANDS[name]}", flush=True)
    script, *options = COMMANDS[name].split()
    environment = os.environ | ENVIRONMENT.get(name, {})
    command = [sys.executable, f"benchmarks/{script}", *options]
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode == 0


if __name__ == "__main__":
    main()
