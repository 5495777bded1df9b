"""Comparison of a script's gradients with a sum over all workers, tensor by tensor."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from largebatch.audit.ranks import Ranks
from largebatch.audit.reference import Gradients

Numbers = npt.NDArray[np.float64]

_TOGETHER = 2**22
"""Number of values in one all-reduce: 32 MiB of float64."""


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
        return self.residuals(whole=True)[0]

    def residuals(self, *, whole: bool = False) -> list[float]:
        """Return the residual of each parameter at the common scale, or of all together."""
        scale = self.scale
        if math.isnan(scale):
            return [float(self.own.sum() > 0)]
        rest = self.own - 2 * scale * self.product + scale**2 * self.exact
        own = self.own
        if whole:
            rest, own = rest.sum(keepdims=True), own.sum(keepdims=True)
        largest = np.maximum(own, scale**2 * (self.exact.sum(keepdims=whole)))
        parts = np.divide(np.maximum(rest, 0), largest, out=np.zeros_like(rest), where=largest > 0)
        return [float(it) for it in np.sqrt(parts)]


@dataclass(frozen=True, slots=True)
class Shares:
    """What the workers contributed to an update, equal on all of them."""

    counts: list[list[float]]
    """Samples of each micro-batch, or the sum of their class weights, by worker."""

    by_weight: bool

    loss_scale: float
    """Factor of the script's loss to the mean loss of a micro-batch; NaN if not seen."""

    loss_cosine: float

    @property
    def samples(self) -> float:
        """Number of samples in the update, or the sum of their class weights."""
        return math.fsum(map(math.fsum, self.counts))

    @property
    def text(self) -> str:
        """Format the number of samples."""
        if self.by_weight:
            return f"samples, whose class weights sum to {self.samples:g}"
        return f"{self.samples:,.0f} samples"

    @property
    def micros(self) -> int:
        """Largest number of micro-batches of a worker."""
        return max(map(len, self.counts))

    @property
    def are_equal(self) -> bool:
        """True if all micro-batches of all workers have equally many samples."""
        return len({count for counts in self.counts for count in counts}) <= 1


Transform = Callable[[Tensor, nn.Parameter], Tensor]
"""Function that does to a reference what the script did to its gradient after the reduction."""


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
    for places in _groups(parameters):
        flat = torch.cat([_filled(parts[place], parameters[place]) for place in places])
        total = ranks.sum(flat) / divisor
        sizes = [parameters[place].numel() for place in places]
        for place, piece in zip(places, total.split(sizes), strict=True):
            exact = transform(piece, parameters[place]) if transform else piece
            rows.append(_row(_filled(gradients[place], parameters[place]), exact))
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


def names_of_unequal(fit: Fit, names: Sequence[str], tolerance: float) -> list[str]:
    """Return the names of the gradients that differ from references by this part or more."""
    rest = fit.own - 2 * fit.product + fit.exact
    limit = tolerance**2 * np.maximum(fit.own, 1e-12 * fit.own.sum())
    return [name for name, bad in zip(names, rest > limit, strict=True) if bad]


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


def _groups(parameters: Sequence[nn.Parameter]) -> Iterator[list[int]]:
    """Yield the numbers of the parameters that are summed together."""
    group, size = list[int](), 0
    for place, parameter in enumerate(parameters):
        group.append(place)
        size += parameter.numel()
        if size >= _TOGETHER:
            yield group
            group, size = [], 0
    if group:
        yield group
