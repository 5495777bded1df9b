"""Run the quickstart with several seeds: accuracy after each stage, and the gain by polishing.

    python -m benchmarks.speed.quickstart [--seeds 5] [--workers 2]

Writes benchmarks/results/quickstart_<machine>_<date>.json with every run, mean and spread.
"""

import argparse
import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.speed.measuring import spread, write
from largebatch import load_recipe, run

RECIPE = Path(__file__).parents[2] / "recipes" / "quickstart" / "digits_96.yaml"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    runs: list[dict[str, Any]] = []
    for seed in range(1, args.seeds + 1):
        with tempfile.TemporaryDirectory() as folder:
            recipe = load_recipe(RECIPE, [f"seed={seed}"])
            summary = run(recipe, workers=args.workers, out=folder)
        stages = [asdict(stage) for stage in summary.stages]
        runs.append({"seed": seed, "seconds": summary.seconds, "stages": stages})
    top1 = {
        stage["name"]: [one["stages"][number]["top1"] for one in runs]
        for number, stage in enumerate(runs[0]["stages"])
    }
    gains = [last - first for first, last in zip(top1["train"], top1["statistics"], strict=True)]
    result = {
        "n": args.seeds,
        "top1": {name: spread(values) for name, values in top1.items()},
        "top1_gain_of_polishing": spread(gains),
        "seconds": spread([one["seconds"] for one in runs]),
        "runs": runs,
    }
    write("quickstart", result)
    print(json.dumps({key: result[key] for key in ("top1", "top1_gain_of_polishing", "seconds")}))


if __name__ == "__main__":
    main()
