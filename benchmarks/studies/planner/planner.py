"""Fit the planner's constants to published runs, and compare it with runs that were left out.

    python -m benchmarks.studies.planner.planner [--rows benchmarks/studies/planner/rows.csv]

The constants, of largebatch.lab.planner.prediction, are fitted in logarithms by least squares to
`runs.csv` and to a prior, which a constant keeps if no run depends on it. Every system is left out
once and predicted from the others, and V100 and A100 are predicted from their data sheets. The
interval is conformal (Lei et al. 2018, arXiv:1604.04173, section 5.2): the errors of systems that
were left out, in units of the error expected of each, give the factor for the next one.

Frozen results: planner and planner_logs (starts and evaluations in MLPerf's logs), of 5e5e2716;
planner_here (this machine against `plan --calibrate`), of f0658091.
"""

import argparse
import csv
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import get_args

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from benchmarks.speed.measuring import write
from largebatch.lab.planner.cluster import Cluster, Generation, Software, load_cluster
from largebatch.lab.planner.prediction import (
    Constants,
    Load,
    evaluation_seconds,
    machine,
    step_seconds,
)
from largebatch.lab.planner.suggest import IMAGES, VALIDATION

RUNS = Path(__file__).with_name("runs.csv")
GENERATIONS: tuple[Generation, ...] = get_args(Generation)
EVALUATE_EVERY = 4  # epochs, by MLPerf's rules

COVERAGE = 0.9  # probability that an interval holds the time

NOISE = 0.05
"""Expected deviation of a run from the model, as a ratio; it weights runs against priors."""

PRIOR: dict[str, tuple[float, float]] = {
    "scale": (3.1, 1.0),
    **{f"deviation {name}": (1.0, 0.15) for name in GENERATIONS},
    "launch launched": (0.006, 0.7),
    "launch graphs": (0.002, 0.7),
    "level": (0.0003, 0.7),
    "start launched": (4.2, 0.3),
    "start graphs": (0.63, 0.2),
    "evaluation": (0.039, 0.15),
}
"""The size of each constant, and the standard deviation of its logarithm.

scale: PyTorch on one A100 makes 2,470 images a second (NVIDIA DeepLearningExamples), 3.1 in these
units. launch: about 1,000 kernels at 6 microseconds from the CPU, at 2 in a graph. start and
evaluation: geometric means in the logs of systems of 32 nodes or more, and their standard errors
(benchmarks/results/planner_logs_*.json). The level is an assumption, chosen after looking at the
runs, which determine it only with A100s among them.
"""

Vector = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """Result of one system, and the work of its steps."""

    system: str
    generation: Generation
    cluster: Cluster
    software: Software
    epochs: float
    seconds: float
    global_batch: int
    load: Load

    def predicted(self, constants: Constants) -> float:
        """Return the time of its start, whole steps of every epoch, and its evaluations.

        The entries start each epoch with a new batch, so an epoch has ceil(images / batch) steps;
        their learning-rate schedules, which count steps, confirm it.
        """
        on = machine(self.cluster, constants, software=self.software)
        steps = self.epochs * math.ceil(IMAGES / self.global_batch)
        one = evaluation_seconds(on, workers=self.load.workers, samples=VALIDATION)
        evaluations = self.epochs / EVALUATE_EVERY * one
        return on.start + steps * sum(step_seconds(on, self.load).values()) + evaluations


def read_runs(file: Path) -> list[Published]:
    """Return the runs of a CSV, each system once; a line that starts with # is a comment."""
    lines = file.read_text(encoding="utf-8").splitlines()
    runs = [_run(row) for row in csv.DictReader(line for line in lines if line[:1] != "#")]
    return list({(run.system, run.seconds): run for run in runs}.values())


def _run(row: dict[str, str]) -> Published:
    workers, batch = int(row["accelerators"]), int(row["global_batch"])
    cluster = load_cluster(row["cluster"])
    assert cluster.gpu is not None
    changes = {"gpus_per_node": workers // int(row["nodes"]), "sharp": row["sharp"] == "yes"}
    return Published(
        system=row["system"],
        generation=cluster.gpu.generation,
        cluster=cluster.model_copy(update=changes),
        software="graphs" if float(row["round"].lstrip("v")) >= 1 else "launched",
        epochs=(float(row["epochs_min"]) + float(row["epochs_max"])) / 2,
        seconds=float(row["seconds"]),
        global_batch=batch,
        load=Load(
            workers=workers,
            device_batch=batch // workers,
            overlap=row["overlap"] == "yes",
            sync_workers=max(1, int(row["bn_span"]) // (batch // workers)),
        ),
    )


@dataclass(frozen=True, slots=True)
class Fit:
    """Fitted constants, and the covariance of their logarithms."""

    logs: Vector
    covariance: Vector

    @property
    def constants(self) -> Constants:
        """The constants themselves."""
        return _constants(self.logs)

    def predict(self, run: Published) -> "LeftOut":
        """Predict a run that is not among those of the fit."""
        seconds = run.predicted(self.constants)
        return LeftOut(run, seconds, self.deviation(run.predicted))

    def deviation(self, seconds: Callable[[Constants], float]) -> float:
        """Return the standard deviation of the logarithm of a time."""
        steps = 1e-4 * np.eye(len(self.logs))
        slope = np.array([
            math.log(seconds(_constants(self.logs + step)) / seconds(_constants(self.logs - step)))
            for step in steps
        ]) / 2e-4  # fmt: skip
        return math.sqrt(NOISE**2 + float(slope @ self.covariance @ slope))


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Prediction of a run from others, and its expected deviation."""

    run: Published
    predicted: float
    deviation: float

    @property
    def error(self) -> float:
        """Predicted over published time, less one."""
        return self.predicted / self.run.seconds - 1

    @property
    def score(self) -> float:
        """Distance of the logarithms in expected deviations."""
        return abs(math.log(self.predicted / self.run.seconds)) / self.deviation


def fit(runs: Sequence[Published], *, near: Fit | None = None) -> Fit:
    """Return the constants that fit the runs best; the search starts at another fit's."""
    centre, width = np.array([(math.log(size), width) for size, width in PRIOR.values()]).T

    def residuals(logs: Vector) -> Vector:
        constants = _constants(logs)
        ratios = [run.predicted(constants) / run.seconds for run in runs]
        return np.concatenate([np.log(ratios) / NOISE, (logs - centre) / width])

    start = centre if near is None else near.logs
    found = least_squares(residuals, start, method="lm", ftol=1e-6, xtol=1e-6)
    return Fit(found.x, np.linalg.inv(found.jac.T @ found.jac))


@cache
def fitted() -> Fit:
    """Return the fit to all runs."""
    return fit(read_runs(RUNS))


@cache
def left_out() -> tuple[LeftOut, ...]:
    """Return the prediction of each run from those of other systems."""
    runs, near = read_runs(RUNS), fitted()
    return tuple(
        fit([one for one in runs if one.system != run.system], near=near).predict(run)
        for run in runs
    )


def leave_generation_out(generation: Generation) -> list[LeftOut]:
    """Predict a generation of GPUs from all others and its data sheets."""
    runs = read_runs(RUNS)
    found = fit([run for run in runs if run.generation != generation])
    return [found.predict(run) for run in runs if run.generation == generation]


def quantile(predictions: Sequence[LeftOut]) -> float:
    """Return the expected deviations that hold the next run with probability COVERAGE."""
    scores = sorted(one.score for one in predictions)
    rank = math.ceil(COVERAGE * (len(scores) + 1))
    return scores[min(rank, len(scores)) - 1]


def covered(predictions: Sequence[LeftOut]) -> list[bool]:
    """Return, for each system, True if it is in the interval from the errors of all others."""
    return [
        one.score <= quantile([other for other in predictions if other is not one])
        for one in predictions
    ]


def summary(predictions: Sequence[LeftOut]) -> dict[str, float]:
    """Return the median, the 90th percentile and the largest of absolute errors."""
    sizes = np.abs([one.error for one in predictions])
    found = [np.median(sizes), np.quantile(sizes, 0.9), sizes.max()]
    return dict(zip(("median", "90th percentile", "largest"), map(float, found), strict=True))


def _constants(logs: Vector) -> Constants:
    values = dict(zip(PRIOR, map(math.exp, logs), strict=True))
    return Constants(
        scale=values["scale"],
        deviations={name: values[f"deviation {name}"] for name in GENERATIONS},
        launch={"launched": values["launch launched"], "graphs": values["launch graphs"]},
        level=values["level"],
        start={"launched": values["start launched"], "graphs": values["start graphs"]},
        evaluation=values["evaluation"],
    )


def main() -> None:
    """Fit, leave out, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=Path, help="more runs, in the columns of runs.csv")
    args = parser.parse_args()
    old = [one for one in left_out() if one.run.generation != "hopper"]
    more = [] if args.rows is None else [fitted().predict(run) for run in read_runs(args.rows)]
    result = {
        "constants": asdict(fitted().constants),
        "quantile": quantile(left_out()),
        "covered": sum(covered(left_out())),
        "errors": {one.run.system: one.error for one in (*left_out(), *more)},
        "V100 and A100, each system left out": summary(old),
        "V100 left out whole": summary(leave_generation_out("volta")),
        "A100 left out whole": summary(leave_generation_out("ampere")),
    }
    print(write("planner", result))


if __name__ == "__main__":
    main()
