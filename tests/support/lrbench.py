"""The thirteen functions of LRBench (arXiv:1908.06477) in NumPy, as the paper writes them.

A referee: nothing of ours is in it. `k0` and `k1` are the paper's two rates, `n` its length l, `t`
the steps.
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


def rates(name: str, t: Floats, *, k0: float, k1: float, n: int, gamma: float, p: float) -> Floats:
    """Return the rate of every step; the decaying policies have no k1."""
    if name in DECAYS:
        return k0 * DECAYS[name](t, n, gamma, p)
    return abs(k0 - k1) * CYCLES[name](t, n, gamma, p) + min(k0, k1)
