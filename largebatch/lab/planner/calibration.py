"""The constants of the model, fitted to published runs, and the errors of the fit.

The constants are few, and each is a physical time or rate. They are fitted in logarithms, so that
all stay positive and errors count as ratios, by least squares to the runs and to a prior. The prior
gives the size of a constant, which a constant keeps if no run depends on it, and its width becomes
part of the interval. The interval is conformal (Lei et al. 2018, arXiv:1604.04173, section 5.2):
the errors of left-out systems, in units of the error that the fit expects of each, give the factor
for the next one.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial

import numpy as np
from numpy.typing import NDArray

from largebatch.lab.planner.cluster import GENERATIONS
from largebatch.lab.planner.model import Constants
from largebatch.lab.planner.published import Published, predicted_seconds, published_runs

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
