"""LRBench's functions (arXiv:1908.06477) in NumPy: the paper's thirteen and its code's later ones.

A referee: nothing of ours is in it. `k0` and `k1` are the paper's two rates, `n` its length l, `t`
the steps. The later ones are those of LRBench/lr/LRfunctions.py, in which l of a cosine is half a
cycle.
"""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


def tri(t: Floats, n: int) -> Floats:
    return np.asarray(2 / np.pi * np.abs(np.arcsin(np.sin(np.pi * t / (2 * n)))))


def sin(t: Floats, n: int) -> Floats:
    return np.asarray(np.abs(np.sin(np.pi * t / (2 * n))))


def nstep(t: Floats, boundaries: Sequence[int], gamma: float) -> Floats:
    """gamma^i where l_{i-1} <= t < l_i."""
    passed = np.sum(t[:, None] >= np.asarray(boundaries)[None, :], axis=1)
    return np.asarray(np.power(gamma, passed))


Shape = Callable[[Floats, int, float, float], Floats]

DECAYS: dict[str, Shape] = {
    "fix": lambda t, n, gamma, p: np.ones(len(t)),
    "step": lambda t, n, gamma, p: gamma ** np.floor(t / n),
    "exp": lambda t, n, gamma, p: gamma**t,
    "inv": lambda t, n, gamma, p: (1 + t * gamma) ** -p,
    "poly": lambda t, n, gamma, p: (1 - np.minimum(t, n) / n) ** p,  # held where the paper ends
    "sig": lambda t, n, gamma, p: 1 / (1 + np.exp(np.minimum(gamma * (t - n), 700))),  # -gamma
}
"""g(t, n, gamma, p); the rate is k0 g."""

CYCLES: dict[str, Shape] = {
    "tri": lambda t, n, gamma, p: tri(t, n),
    "tri2": lambda t, n, gamma, p: tri(t, n) / 2 ** np.floor(t / (2 * n)),
    "triexp": lambda t, n, gamma, p: gamma**t * tri(t, n),
    "sin": lambda t, n, gamma, p: sin(t, n),
    "sin2": lambda t, n, gamma, p: sin(t, n) / 2 ** np.floor(t / (2 * n)),
    "sinexp": lambda t, n, gamma, p: gamma**t * sin(t, n),
    "cos": lambda t, n, gamma, p: (1 + np.cos(2 * np.pi * t / n)) / 2,
}
"""g(t, n, gamma, p); the rate is |k0 - k1| g + min(k0, k1)."""


def remaining(t: Floats, n: int) -> Floats:
    """What is left of a fall: -t / l - floor(-t / l); the code has 0 where one begins, this 1."""
    left = -t / n - np.floor(-t / n)
    return np.asarray(np.where(t % n == 0, 1.0, left))


def sine_of(share: Floats) -> Floats:
    return np.asarray(np.sin(np.pi / 2 * share))


def cosine_of(share: Floats) -> Floats:
    return np.asarray(0.5 * (1 - np.cos(np.pi * share)))


def up(t: Floats, n: int) -> Floats:
    return np.asarray(0.5 * (1 + np.cos(np.pi * (t / n + 1))))


def down(t: Floats, n: int) -> Floats:
    return np.asarray(0.5 * (1 + np.cos(np.pi * t / n)))


LATER: dict[str, Shape] = {
    "dtri": lambda t, n, gamma, p: tri(t + n, n),
    "dtri2": lambda t, n, gamma, p: tri(t + n, n) / 2 ** np.floor((t + n) / (2 * n)),
    "dtriexp": lambda t, n, gamma, p: tri(t + n, n) * gamma**t,
    "dsin": lambda t, n, gamma, p: sin(t + n, n),
    "dsin2": lambda t, n, gamma, p: sin(t + n, n) / 2 ** np.floor((t + n) / (2 * n)),
    "dsinexp": lambda t, n, gamma, p: sin(t + n, n) * gamma**t,
    "cos2": lambda t, n, gamma, p: down(t, n) / 2 ** np.floor((t + n) / (2 * n)),
    "cosexp": lambda t, n, gamma, p: down(t, n) * gamma**t,
    "upcos": lambda t, n, gamma, p: up(t, n),
    "upcos2": lambda t, n, gamma, p: up(t, n) / 2 ** np.floor(t / (2 * n)),
    "upcosexp": lambda t, n, gamma, p: up(t, n) * gamma**t,
    "rsw": lambda t, n, gamma, p: remaining(t, n),
    "rsw2": lambda t, n, gamma, p: remaining(t, n) / 2 ** np.floor(t / n),
    "rswexp": lambda t, n, gamma, p: remaining(t, n) * gamma**t,
    "sinrsw": lambda t, n, gamma, p: sine_of(remaining(t, n)),
    "sinrsw2": lambda t, n, gamma, p: sine_of(remaining(t, n)) / 2 ** np.floor(t / n),
    "sinrswexp": lambda t, n, gamma, p: sine_of(remaining(t, n)) * gamma**t,
    "cosrsw": lambda t, n, gamma, p: cosine_of(remaining(t, n)),
    "cosrsw2": lambda t, n, gamma, p: cosine_of(remaining(t, n)) / 2 ** np.floor(t / n),
    "cosrswexp": lambda t, n, gamma, p: cosine_of(remaining(t, n)) * gamma**t,
}
"""g(t, n, gamma, p) of its code; the rate is (k1 - k0) g + k0."""

CYCLES |= LATER


def rates(name: str, t: Floats, *, k0: float, k1: float, n: int, gamma: float, p: float) -> Floats:
    """Return the rate of every step; the decaying policies have no k1."""
    if name in DECAYS:
        return k0 * DECAYS[name](t, n, gamma, p)
    return abs(k0 - k1) * CYCLES[name](t, n, gamma, p) + min(k0, k1)
