"""Measure again what is stale on this machine, then write the table: `make bench`.

    python -m benchmarks.speed.renew [--all] [--list]

A benchmark is measured if it has no result on a machine like this one, or if the code that its
newest result measured has changed since (sources.py). One that fails does not stop the others; the
command fails at the end.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from benchmarks.speed.measuring import RESULTS, newest
from benchmarks.speed.sources import is_stale

ROOT = Path(__file__).parents[2]

COMMANDS = {
    "lars": "--rounds 40 --threads 2",
    "loop": "--rounds 40 --steps 1",
    "reduction": "--rounds 12",
    "norm": "--rounds 6 --spans 32",
    "input_host": "",
    "input_augmented": "",
    "checkpoint": "--rounds 8 --model resnet50 --batch 6 --pixels 128",
    "polish": "--rounds 9",
    "polish_error": "",
    "audit_cost": "--rounds 5 --batch 4 --pixels 128",
    "quickstart": "--seeds 5 --workers 2 --starts 5",
    "index": "--rounds 3",
    "input_pipeline": "--rounds 9",
    "decoder_pixels": "",
    "storage": "",
}
"""The benchmarks that take minutes, each a script of this folder with its options."""

ENVIRONMENT = {"checkpoint": {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}}

NEED_DATA = {"index", "input_augmented", "input_pipeline", "decoder_pixels", "storage"}
"""Benchmarks of real images, from the folder LARGEBATCH_DATA."""


def main() -> None:
    """Run the benchmarks and write the table; exit with 1 if one failed."""
    parser = argparse.ArgumentParser(description="measure again what is stale on this machine")
    parser.add_argument("--all", action="store_true", help="measure all, stale or not")
    parser.add_argument("--list", action="store_true", help="print the stale benchmarks and stop")
    args = parser.parse_args()
    chosen = list(COMMANDS) if args.all else stale_benchmarks()
    if args.list:
        print("\n".join(chosen) or "no benchmark is stale")
        return
    failed = [name for name in chosen if not measure(name)]
    subprocess.run([sys.executable, "-m", "benchmarks.speed.table"], cwd=ROOT, check=True)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def stale_benchmarks() -> list[str]:
    """Return the benchmarks to measure again on this machine."""
    found = []
    for name in COMMANDS:
        path = newest(name, RESULTS)
        if path is None or is_stale(name, json.loads(path.read_text(encoding="utf-8"))):
            found.append(name)
    return found


def measure(name: str) -> bool:
    """Run one benchmark; return False if it failed."""
    if name in NEED_DATA and not os.environ.get("LARGEBATCH_DATA"):
        print(f"{name}: skipped, LARGEBATCH_DATA names no folder of data sets")
        return True
    print(f"\n--- {name} {COMMANDS[name]}", flush=True)
    environment = os.environ | ENVIRONMENT.get(name, {})
    command = [sys.executable, "-m", f"benchmarks.speed.{name}", *COMMANDS[name].split()]
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode == 0


if __name__ == "__main__":
    main()
