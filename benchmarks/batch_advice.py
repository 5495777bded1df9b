"""Whether the interval of `largebatch batch` holds the critical batch that runs have measured.

    python benchmarks/batch_advice.py [--minutes 1] [--seeds 5] [--work DIR]

Needs LARGEBATCH_DATA. LeNet-5 on CIFAR-10 and on 12,000 images of Fashion-MNIST, the recipes whose
critical batch `python benchmarks/noise.py --critical` has measured with runs at several batches.
For every seed `largebatch batch` measures for a few minutes; a case holds if the measured value
lies in the interval that it prints. What is done is kept in DIR and not done again.
"""

import argparse
import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

from measuring import RESULTS, newest, write
from noise import CRITICAL, RECIPES
from polishing_data import prepare

from largebatch import load_recipe
from largebatch.lab.measure.batch import Question, advise
from largebatch.runs.options import Options

IMAGES = {"cifar10": {"train": 50_000}, "fashion_mnist": {"train": 12_000, "test": 1_000}}
GOAL = 0.8


def main() -> None:
    """Run every case, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--work", type=Path, default=Path("build") / "batch_advice")
    args = parser.parse_args()
    cases = [
        carry_out(name, seed, work=args.work, minutes=args.minutes)
        for seed in range(1, args.seeds + 1)
        for name in CRITICAL
    ]
    for case in cases:
        case["holds"] = case["low"] <= case["measured"] <= case["high"]
    holding = sum(case["holds"] for case in cases)
    command = f"python benchmarks/batch_advice.py --minutes {args.minutes:g} --seeds {args.seeds}"
    result = {"hold": holding, "of": len(cases), "goal": GOAL, "cases": cases}
    print(f"{holding} of {len(cases)} intervals hold the measured critical batch")
    print(write("batch_advice", command, result))


def carry_out(name: str, seed: int, *, work: Path, minutes: float) -> dict[str, Any]:
    """Return the critical batch that one run of the command finds, and the measured one."""
    result, recipe, _ = CRITICAL[name]
    folder = work / f"{name}-{seed}"
    kept = work / f"{name}-{seed}.json"
    if not kept.exists():
        shutil.rmtree(folder, ignore_errors=True)
        question = Question(
            recipe=load_recipe(RECIPES / recipe, [f"seed={100 + seed}"]),
            options=Options(out=folder, data=prepare(work / "data", name, **IMAGES[name])),
            minutes=minutes,
        )
        advice = advise(question)
        value, low, high = advice.critical
        found = {
            "data": name, "seed": question.recipe.seed, "critical": value, "low": low, "high": high,
            "noise": asdict(advice.noise), "chosen": advice.chosen.batch, "rate": advice.rate,
            "edges": {batch: test.upper and asdict(test.upper) for batch, test in advice.edges},
            "remarks": list(advice.remarks),
        }  # fmt: skip
        kept.write_text(json.dumps(found), encoding="utf-8")
        print(f"{name}, seed {seed}: {value:.1f} ({low:.1f} to {high:.1f})", flush=True)
    there = newest(result, RESULTS)
    if there is None:
        raise SystemExit(f"no {result}_*.json: first run benchmarks/noise.py --critical")
    measured = json.loads(there.read_text(encoding="utf-8"))["measured"]
    return {**json.loads(kept.read_text(encoding="utf-8")), "measured": measured}


if __name__ == "__main__":
    main()
