"""The search for the base rate of a policy or setting: its trials, and the values it finds.

A policy is a shape. All rates of its schedule are multiples of one base rate, which is searched
for each shape (arXiv:2603.10301): at one common rate, a study would rank base rates.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from largebatch.lab.studies.metrics import CONFIDENCE
from largebatch.lab.studies.study import RATE, Search
from largebatch.optional import require_optuna
from largebatch.recipe.arithmetic.plan import Plan

if TYPE_CHECKING:
    from largebatch.lab.studies.trained import Result

Ranges = Mapping[str, tuple[float, float]]
"""The lowest and the highest value of every searched key."""

FIRST_FACTORS = (1.0, 0.4, 2.5, 0.16, 6.25)
"""Multiples of the recipe's own rate that the first trials of every search have."""

RUNGS = 4
"""Number of equal parts of a trial; it may be stopped early after each."""

COMPARED = 3
"""Least number of earlier trials that a trial is compared with before it can be stopped."""


def rounded(value: float) -> float:
    """Round a value to four digits, as recipes have them.

    >>> rounded(0.123456)
    0.1235
    """
    return float(f"{value:.4g}")


def first_values(
    search: Search, own: Mapping[str, float], ranges: Ranges
) -> list[dict[str, float]]:
    """Return the fixed values of the first trials, given the recipe's own.

    The rate varies first, or the first key if the rate is not searched; the others stay.
    """
    centre = {key: min(max(own[key], low), high) for key, (low, high) in ranges.items()}
    varied = RATE if RATE in ranges else next(iter(ranges))
    low, high = ranges[varied]
    rates = {rounded(rate): rate for rate in (centre[varied] * each for each in FIRST_FACTORS)}
    inside = [rate for rate in rates.values() if low <= rate <= high]
    return [{**centre, varied: rate} for rate in inside][: search.trials]


def drawn_values(
    search: Search, ranges: Ranges, trials: Sequence["Result"], *, number: int
) -> dict[str, float]:
    """Return the values of trial `number`, counted from 1, by Optuna's Gaussian process.

    With so few trials it comes closer than TPE to the maximum of a noisy bell over the logarithm
    of the rate; started after three trials, it spends the next ones at the ends of the range.
    The seed differs between trials, so that no two processes draw the same.
    """
    require_optuna()
    import optuna
    from optuna.distributions import BaseDistribution, FloatDistribution

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    seed = (search.seed + number - 1) % 2**32
    sampler = optuna.samplers.GPSampler(seed=seed, n_startup_trials=len(FIRST_FACTORS))
    study = optuna.create_study(direction="maximize", sampler=sampler)
    distributions: dict[str, BaseDistribution] = {
        key: FloatDistribution(low, high, log=True) for key, (low, high) in ranges.items()
    }
    for trial in trials:
        inside = {
            key: min(max(trial.values[key], low), high) for key, (low, high) in ranges.items()
        }
        study.add_trial(
            optuna.trial.create_trial(
                params=inside, distributions=distributions, value=search.value_of(trial)
            )
        )
    return {key: rounded(value) for key, value in study.ask(distributions).params.items()}


def rungs(plan: Plan) -> list[int]:
    """Return the updates after which a trial is compared: the evaluations next to equal parts.

    None is within the warm-up, where a policy that rises for longer looks worse than it is.
    """
    near = {
        min(plan.evaluate_after, key=lambda step: abs(step - plan.steps * part / RUNGS), default=0)
        for part in range(1, RUNGS)
    }
    return [step for step in sorted(near) if plan.warmup_steps < step < plan.train_steps]


def should_prune(so_far: Sequence[float], others: Sequence[float]) -> bool:
    """Return True if the best value so far is below the median of others after as many updates.

    `others` has those of complete trials that came as far. A trial that is stopped early is
    recorded with its accuracy there, so that the search learns from it.
    """
    return len(others) >= COMPARED and max(so_far) < statistics.median(others)


def chosen_values(search: Search, trials: Sequence["Result"]) -> dict[str, float]:
    """Return the values of the lowest rate whose trial is as good as the best one.

    That is within the standard error of its accuracy on the held-out images (Breiman et al.
    1984, the one-standard-error rule): the best of a few trials of one seed is often close to
    divergence. Of trials at one rate the most accurate counts, then the one with the lowest
    loss.
    """
    whole = [trial for trial in trials if trial.pruned_after is None]
    best = max(search.value_of(trial) for trial in whole)
    least = best - math.sqrt(best * (1 - best) / search.held_out)

    def merit(trial: "Result") -> tuple[float, float, float]:
        loss = trial.loss if math.isfinite(trial.loss) else math.inf
        return -trial.values.get(RATE, 0.0), search.value_of(trial), -loss

    good = (trial for trial in whole if search.value_of(trial) >= least)
    return dict(max(good, key=merit).values)


@dataclass(frozen=True, slots=True, kw_only=True)
class GoodValues:
    """The values of a search that are within the noise of the best trial."""

    ranges: Ranges
    number: int
    trials: int
    """Number of good trials, and of all."""


def good_values(
    search: Search, trials: Sequence["Result"], seeds: Sequence["Result"]
) -> GoodValues:
    """Return the range of values within the noise of the best trial.

    The noise of a trial has two parts, of the held-out images (binomial) and of the seed (the
    spread of top-1 over the seeds at the end); two trials differ by the root of 2 times that.
    Trials that were stopped early or diverged are not good.
    """
    value = search.value_of
    whole = [trial for trial in trials if trial.pruned_after is None and trial.diverged is None]
    if not whole:
        return GoodValues(ranges={}, number=0, trials=len(trials))
    best = max(map(value, whole))
    variance = best * (1 - best) / search.held_out
    ends = [value(run) for run in seeds]
    variance += statistics.variance(ends) if len(ends) > 1 else 0.0
    width = statistics.NormalDist().inv_cdf((1 + CONFIDENCE) / 2) * math.sqrt(2 * variance)
    good = [trial for trial in whole if value(trial) >= best - width]
    ranges = {
        key: (min(one.values[key] for one in good), max(one.values[key] for one in good))
        for key in good[0].values
    }
    return GoodValues(ranges=ranges, number=len(good), trials=len(trials))
