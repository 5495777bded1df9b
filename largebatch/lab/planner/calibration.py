"""The constants of the model, fitted to published runs, and the errors of the fit.

The constants are few, and each is a physical time or rate. They are fitted in logarithms, so that
all stay positive and errors count as ratios, by least squares to the runs and to a prior. The prior
gives the size of a constant, which a constant keeps if no run depends on it, and its width becomes
part of the interval. The interval is conformal (Lei et al. 2018, arXiv:1604.04173, section 5.2):
the errors of left-out systems, in units of the error that the fit expects of each, give the factor
for the next one.
"""

import csv
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib.resources import files
from itertools import takewhile

import numpy as np
from numpy.typing import NDArray

from largebatch.lab.planner.cluster import (
    GENERATIONS,
    Cluster,
    ClusterError,
    Generation,
    Gpu,
    Software,
    installed_clusters,
)
from largebatch.lab.planner.model import Constants, Load, evaluation_seconds, machine, step_seconds

IMAGES, VALIDATION = 1_281_167, 50_000
EVALUATE_EVERY = 4
"""Epochs between two evaluations, by MLPerf's rules."""

_BEFORE_80GB = {"v0.6", "v0.7"}
"""Rounds before the A100 with 80 GB was announced (November 2020)."""

_FORMS = re.compile("SXM|PCIE|NVL|OAM")
"""Form factors of a chip, which decide its power and bandwidth."""

_CTS_WATTS = 500.0
"""Watts of an A100 with custom thermal solution (MLPerf v2.0 system description)."""

_GRAPHS_SINCE = 1.0
"""The first round in which NVIDIA's entries capture their steps as CUDA graphs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """Result of one system, and the work of its steps."""

    round: str
    submitter: str
    system: str
    cluster: Cluster
    workers: int
    global_batch: int
    epochs: float
    seconds: float
    bn_span: int
    overlap: bool

    @property
    def device_batch(self) -> int:
        """Images on each GPU."""
        return self.global_batch // self.workers

    @property
    def generation(self) -> Generation:
        """Generation of its GPUs."""
        assert self.cluster.gpu is not None
        return self.cluster.gpu.generation

    @property
    def software(self) -> Software:
        """How its steps were launched."""
        return "graphs" if float(self.round.lstrip("v")) >= _GRAPHS_SINCE else "launched"

    @property
    def load(self) -> Load:
        """Work of a step."""
        return Load(
            workers=self.workers,
            device_batch=self.device_batch,
            overlap=self.overlap,
            sync_workers=max(1, self.bn_span // self.device_batch),
        )


def predicted_seconds(run: Published, constants: Constants) -> float:
    """Return the time of a run: its start, whole steps of every epoch, and its evaluations.

    The entries start each epoch with a new batch, so an epoch has ceil(images / batch) steps; their
    learning-rate schedules, which count steps, confirm it.
    """
    on = machine(run.cluster, constants, software=run.software)
    steps = run.epochs * math.ceil(IMAGES / run.global_batch)
    one = evaluation_seconds(on, workers=run.workers, samples=VALIDATION)
    evaluations = run.epochs / EVALUATE_EVERY * one
    return on.start + steps * step_seconds(on, run.load).seconds + evaluations


@cache
def published_runs() -> tuple[Published, ...]:
    """Return the installed runs, each system once."""
    file = files("largebatch") / "lab" / "planner" / "mlperf_resnet50_runs.csv"
    runs = parse_runs(file.read_text(encoding="utf-8").splitlines())
    return tuple({(run.submitter, run.system, run.seconds): run for run in runs}.values())


def parse_runs(lines: Iterable[str]) -> list[Published]:
    """Return the runs in lines of CSV; one that starts with # is a comment.

    Raises ClusterError for a GPU that no installed cluster has.
    """
    return [_run(row) for row in csv.DictReader(line for line in lines if line[:1] != "#")]


def _run(row: dict[str, str]) -> Published:
    workers, nodes = int(row["accelerators"]), int(row["nodes"])
    cluster = _cluster(row, workers // nodes, nodes=nodes)
    return Published(
        round=row["round"],
        submitter=row["submitter"],
        system=row["system"],
        cluster=cluster.model_copy(update={"sharp": row["sharp"] == "yes"}),
        workers=workers,
        global_batch=int(row["global_batch"]),
        epochs=(float(row["epochs_min"]) + float(row["epochs_max"])) / 2,
        seconds=float(row["seconds"]),
        bn_span=int(row["bn_span"]),
        overlap=row["overlap"] == "yes",
    )


def _cluster(row: dict[str, str], gpus_per_node: int, *, nodes: int = 1) -> Cluster:
    """Return the installed cluster with these GPUs and as many in a node, or the most similar one.

    For several nodes, one with a network is preferred.

    >>> row = {"round": "v0.7", "system": "2xC4140", "accelerator": "V100-SXM2"}
    >>> _cluster(row, 4).name
    'c4140-v100'
    """
    named = re.sub(r"^\d+x|[^a-z0-9]", "", row["system"].lower())
    found = re.sub(r"NVIDIA|TESLA|[^A-Z0-9]", "", row["accelerator"].upper())
    found = found.replace("A100SXM80", "A100SXM480").replace("A100SXM40", "A100SXM440")
    if row["round"] in _BEFORE_80GB:
        found = found.replace("A100SXM480GB", "A100SXM440GB")

    def likeness(one: Cluster) -> tuple[bool, bool, int, bool]:
        assert one.gpu is not None
        letters = zip(one.gpu.name.upper().replace("-", ""), found, strict=False)
        common = len(list(takewhile(lambda pair: pair[0] == pair[1], letters)))
        form = _FORMS.search(found)
        place = named.startswith(one.name.partition("-")[0])
        fits = common >= len("V100") and (form is None or form.group() in one.gpu.name)
        linked = nodes == 1 or one.network_gigabytes_per_second is not None
        return fits, linked, common + 3 * place, one.gpus_per_node == gpus_per_node

    best = max(installed_clusters().values(), key=likeness)
    if not likeness(best)[0]:
        raise ClusterError(f"{row['system']}: no installed cluster has {row['accelerator']}")
    assert best.gpu is not None
    gpu = _with_watts(best.gpu, row["accelerator"].upper())
    return best.model_copy(update={"gpus_per_node": gpus_per_node, "gpu": gpu})


def _with_watts(gpu: Gpu, accelerator: str) -> Gpu:
    named = re.search(r"(\d{3,4})W\b", accelerator)
    watts = float(named[1]) if named else _CTS_WATTS if "CTS" in accelerator else gpu.watts
    if watts == gpu.watts:
        return gpu
    return gpu.model_copy(update={"watts": watts, "peak_watts": gpu.peak_watts or gpu.watts})


COVERAGE = 0.9
"""Probability that an interval holds the time."""

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
Seconds = Callable[[Constants], float]
"""The time of a run, by the constants."""


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
        deviation = self.deviation(partial(predicted_seconds, run))
        seconds = predicted_seconds(run, self.constants)
        return LeftOut(run=run, predicted=seconds, deviation=deviation)

    def deviation(self, seconds: Seconds) -> float:
        """Return the standard deviation of the logarithm of a time."""
        slope = _slope(seconds, self.logs)
        return math.sqrt(NOISE**2 + float(slope @ self.covariance @ slope))


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """Prediction of a run from others."""

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


def fit(
    runs: Sequence[Published],
    *,
    near: Fit | None = None,
    prior: Mapping[str, tuple[float, float]] = PRIOR,
) -> Fit:
    """Return the constants that fit the runs best; the search starts at another fit's."""
    from scipy.optimize import least_squares

    centre, width = np.array([(math.log(size), width) for size, width in prior.values()]).T
    found = least_squares(
        lambda logs: np.concatenate([_residuals(runs, logs), (logs - centre) / width]),
        centre if near is None else near.logs,
        method="lm",
        ftol=1e-6,
        xtol=1e-6,
    )
    return Fit(found.x, np.linalg.inv(found.jac.T @ found.jac))


@cache
def installed_fit() -> Fit:
    """Return the fit to the installed runs."""
    return fit(published_runs())


@cache
def installed_left_out() -> tuple[LeftOut, ...]:
    """Return the prediction of each installed run from those of other systems."""
    runs, near = published_runs(), installed_fit()
    return tuple(
        fit([one for one in runs if one.system != run.system], near=near).predict(run)
        for run in runs
    )


def quantile(left_out: Sequence[LeftOut]) -> float:
    """Return the expected deviations that hold the next run with probability COVERAGE."""
    scores = sorted(one.score for one in left_out)
    rank = math.ceil(COVERAGE * (len(scores) + 1))
    return scores[min(rank, len(scores)) - 1]


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


def _residuals(runs: Sequence[Published], logs: Vector) -> Vector:
    constants = _constants(logs)
    ratios = [predicted_seconds(run, constants) / run.seconds for run in runs]
    return np.log(ratios) / NOISE


def _slope(seconds: Seconds, logs: Vector) -> Vector:
    """Return the derivative of the log of a time with respect to the log of each constant."""

    def log_at(place: Vector) -> float:
        return math.log(seconds(_constants(place)))

    steps = 1e-4 * np.eye(len(logs))
    return np.array([log_at(logs + step) - log_at(logs - step) for step in steps]) / 2e-4
