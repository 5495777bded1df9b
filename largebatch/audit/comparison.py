"""Comparison of a script's gradients with a sum over all workers, tensor by tensor."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from largebatch.audit.ranks import Ranks
from largebatch.audit.reference import Gradients

Numbers = npt.NDArray[np.float64]

Transform = Callable[[Tensor, nn.Parameter], Tensor]
"""Function that does to a reference what the script did to its gradient after the reduction."""


@dataclass(frozen=True, slots=True)
class Fit:
    """How gradients and a reference compare; arrays have a value for each parameter.

    A Fit over several workers is their mean, and equal on all of them.
    """

    own: Numbers
    """Squared lengths of the script's gradients."""

    product: Numbers
    """Products of the script's gradients with the references."""

    exact: Numbers
    """Squared lengths of the references."""

    lost: Numbers
    """Numbers of values that are zero, while those of the references are not."""

    nonzero: Numbers
    """Numbers of values of the references that are not zero."""

    @property
    def scale(self) -> float:
        """Factor by which the reference is multiplied for the least distance."""
        square = float(self.exact.sum())
        return float(self.product.sum()) / square if square else math.nan

    @property
    def cosine(self) -> float:
        """Cosine of the angle between gradient and reference; 1 if both are zero."""
        length = math.sqrt(float(self.own.sum()) * float(self.exact.sum()))
        if not length:
            return 1.0 if not self.own.sum() and not self.exact.sum() else 0.0
        return float(self.product.sum()) / length

    @property
    def residual(self) -> float:
        """Part of the gradient's length that no factor of the reference explains, 0 .. 1."""
        own, product, exact = (float(it.sum()) for it in (self.own, self.product, self.exact))
        if not exact:
            return float(own > 0)
        rest, largest = own - product**2 / exact, max(own, product**2 / exact)
        return math.sqrt(max(rest, 0.0) / largest) if largest else 0.0

    def names_of_unequal(
        self, names: Sequence[str], tolerance: float, *, scale: float = 1.0
    ) -> list[str]:
        """Return the names of the gradients that differ from `scale` times the references by this
        part or more, those that differ most first.
        """
        rest = self.own - 2 * scale * self.product + scale**2 * self.exact
        limit = tolerance**2 * np.maximum(self.own, 1e-12 * self.own.sum())
        order = np.argsort(-rest / np.maximum(limit, np.finfo(np.float64).tiny), kind="stable")
        return [names[place] for place in order if rest[place] > limit[place]]


def compare(
    gradients: Gradients,
    parts: Gradients,
    parameters: Sequence[nn.Parameter],
    ranks: Ranks,
    *,
    divisor: float,
    transform: Transform | None = None,
) -> Fit:
    """Compare the workers' gradients with the sum of their parts over `divisor`."""
    rows = []
    for own, part, parameter in zip(gradients, parts, parameters, strict=True):
        exact = ranks.sum(_filled(part, parameter)) / divisor
        exact = transform(exact, parameter) if transform else exact
        rows.append(_row(_filled(own, parameter), exact))
    table = ranks.sum(torch.stack(rows, 1)) / ranks.size
    return Fit(*table.cpu().numpy())  # sync: in an audit only


def compare_alone(
    gradients: Gradients, parts: Gradients, parameters: Sequence[nn.Parameter]
) -> Fit:
    """Compare this worker's gradients with its own part, without other workers."""
    rows = [
        _row(_filled(own, parameter), _filled(part, parameter))
        for own, part, parameter in zip(gradients, parts, parameters, strict=True)
    ]
    return Fit(*torch.stack(rows, 1).cpu().numpy())  # sync: in an audit only


def _row(own: Tensor, exact: Tensor) -> Tensor:
    used = exact != 0
    return torch.stack(
        [own @ own, own @ exact, exact @ exact, (used & (own == 0)).sum(), used.sum()]
    ).double()


def _filled(gradient: Tensor | None, parameter: nn.Parameter) -> Tensor:
    """Return a gradient as a vector of float64; zeros if there is none."""
    if gradient is None:
        return torch.zeros(parameter.numel(), dtype=torch.float64, device=parameter.device)
    return gradient.to_dense().flatten().double()
