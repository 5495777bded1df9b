"""Train the network of airbench94 with Muon and with Nesterov SGD to the end of 8 epochs.

    python benchmarks/airbench.py [--seeds 3] [--processes 2]

Needs LARGEBATCH_DATA, the folder of CIFAR-10. Writes
benchmarks/results/airbench_<machine>_<date>.json after every run: top-1 on six views of the test
images, as airbench evaluates, and on one; seconds of the updates. Started again it goes on where it
was stopped.
"""

import argparse
import json
import sys
from concurrent.futures import as_completed
from itertools import product
from pathlib import Path
from typing import Any

from measuring import RESULTS, circumstances, few_processes, hardware, newest, today
from polishing_data import prepare

from largebatch import load_recipe, run
from largebatch.lab.studies.metrics import interval
from largebatch.runs.checkpoints import evaluate_checkpoint
from largebatch.runs.options import Options

NAME = "airbench"
RECIPES = ("cifar10_airbench_2000", "cifar10_airbench_2000_nesterov")
LEAST_VIEWS = ("evaluation.views=1",)


def measure(name: str, *, seed: int, data: Path | None, work: Path) -> dict[str, Any]:
    """Train a recipe and return its accuracies and seconds."""
    out = work / f"{name}-{seed}"
    summary = run(load_recipe(name, [f"seed={seed}"]), out=out, data=data, resume="auto")
    if summary.status != "finished":
        raise KeyboardInterrupt
    single = evaluate_checkpoint(out, Options(out=out, data=data, overrides=LEAST_VIEWS))
    assert summary.images_per_second is not None
    return {
        "recipe": name, "seed": seed, "date": today(), "samples": summary.samples,
        "top1": summary.top1, "top1_of_one_view": single.metrics.top1,
        "train_seconds": summary.samples / summary.images_per_second,
    }  # fmt: skip


def main() -> None:
    """Train what the newest results do not have."""
    parser = argparse.ArgumentParser(description="airbench94 with Muon and with Nesterov SGD")
    add = parser.add_argument
    add("--seeds", type=int, default=3)
    add("--processes", type=int, default=2, metavar="N", help="runs at a time, of one thread each")
    add("--work", type=Path, default=Path("build") / NAME, metavar="DIR", help="for the runs")
    args = parser.parse_args()
    path = newest(NAME, RESULTS) or RESULTS / f"{NAME}_{hardware()}_{today()}.json"
    found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    content = found or {**circumstances(NAME, "python benchmarks/airbench.py"), "runs": {}}
    data = prepare(args.work / "data", "cifar10", train=50_000)
    with few_processes(args.processes) as pool:
        jobs = {
            pool.submit(measure, name, seed=seed, data=data, work=args.work): key
            for seed, name in product(range(1, args.seeds + 1), RECIPES)
            if (key := f"{name}, seed {seed}") not in content["runs"]
        }
        for job in as_completed(jobs):
            content["runs"][jobs[job]] = job.result()
            path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
            print(f"{jobs[job]}: {job.result()['top1']:.2%}", flush=True)
    for name in RECIPES:
        runs = [one for one in content["runs"].values() if one["recipe"] == name]
        for key in ("top1", "top1_of_one_view"):
            mean = interval([one[key] for one in runs]).scaled(100)
            print(f"{name}, {key}: {mean.mean:.2f} ({mean.low:.2f} to {mean.high:.2f}) %")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("stopped; the same command continues from here")
