"""Compute which momentum late gradients allow on a quadratic, exactly: seconds, nothing is trained.

    python benchmarks/momentum_quadratic.py

SGD with momentum m and gradients that are tau updates late follows, along a direction of curvature
h, x(t + 1) = (1 + m) x(t) - m x(t - 1) - rate h x(t - tau). It shrinks if all roots of its
characteristic polynomial are smaller than 1, and by their largest in every update. The curvatures
lie between 1 / CONDITION and 1; without staleness, the best momentum for this range is 0.9. For
every tau and momentum the rate is the one with which the slowest direction shrinks fastest.

Without noise, with a delay that is constant, and with no division of the rate by tau, which is
another rate here. Writes benchmarks/results/momentum_quadratic_<machine>_<date>.json.
"""

import math

import numpy as np
from measuring import write
from scipy.optimize import brentq, minimize_scalar

NAME = "momentum_quadratic"
TAUS = (0, 1, 2, 3, 6, 9, 14, 27)
MOMENTA = (-0.5, -0.3, -0.1, 0.0, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95)
CONDITION = ((1 + math.sqrt(0.9)) / (1 - math.sqrt(0.9))) ** 2
"""Condition number for which a momentum of 0.9 is best without staleness (Polyak 1964)."""

CURVATURES = np.geomspace(1 / CONDITION, 1.0, 9)


def main() -> None:
    """Compute all pairs, print them and write the result."""
    rows = [row(tau, momentum) for tau in TAUS for momentum in MOMENTA]
    for one in rows:
        print({key: round(value, 4) for key, value in one.items()}, flush=True)
    best = {tau: min(updates(rows, tau), key=updates(rows, tau).__getitem__) for tau in TAUS}
    print("best momentum", best)
    found = {"condition number": CONDITION, "rows": rows, "best momentum": best}
    print(write(NAME, f"python benchmarks/{NAME}.py", found))


def row(tau: int, momentum: float) -> dict[str, float]:
    """Return the largest stable rate, the best one, and the updates in which it divides by e."""
    limit = largest_stable(tau, momentum)
    rate = best_rate(tau, momentum, limit)
    return {
        "tau": tau,
        "momentum": momentum,
        "largest stable rate": limit,
        "the same over 1 - momentum": limit / (1 - momentum),
        "best rate": rate,
        "updates": -1 / math.log(slowest(tau, momentum, rate)),
    }


def updates(rows: list[dict[str, float]], tau: int) -> dict[float, float]:
    """Return the updates of one tau by momentum."""
    return {one["momentum"]: one["updates"] for one in rows if one["tau"] == tau}


def radius(tau: int, momentum: float, step: float) -> float:
    """Return the factor of an update along a direction, with `step` its rate times its curvature.

    >>> round(radius(0, 0.0, 0.25), 6)
    0.75
    """
    polynomial = np.zeros(max(tau, 1) + 2)
    polynomial[:3] = 1, -1 - momentum, momentum
    polynomial[tau + 1] += step
    return float(np.abs(np.roots(polynomial)).max())


def largest_stable(tau: int, momentum: float) -> float:
    """Return the rate above which the direction of the largest curvature grows.

    >>> round(largest_stable(0, 0.9), 6), round(largest_stable(1, 0.9), 6)
    (3.8, 0.1)
    """
    steps = np.geomspace(1e-4, 4.0, 400)
    first = next(i for i, step in enumerate(steps) if radius(tau, momentum, step) > 1)

    def excess(step: float) -> float:
        return radius(tau, momentum, step) - 1

    return float(brentq(excess, steps[first - 1], steps[first], xtol=1e-10))


def slowest(tau: int, momentum: float, rate: float) -> float:
    """Return the factor of the direction that shrinks most slowly."""
    return max(radius(tau, momentum, rate * each) for each in CURVATURES)


def best_rate(tau: int, momentum: float, limit: float) -> float:
    """Return the rate whose slowest direction shrinks fastest."""
    logs = np.linspace(math.log(limit / 50), math.log(limit), 25)
    factors = [slowest(tau, momentum, math.exp(log)) for log in logs]
    near = min(range(1, len(logs) - 1), key=lambda i: factors[i])
    found = minimize_scalar(
        lambda log: slowest(tau, momentum, math.exp(log)),
        bounds=(logs[near - 1], logs[near + 1]),
        method="bounded",
        options={"xatol": 1e-6},
    )
    return math.exp(found.x)


if __name__ == "__main__":
    main()
