"""Final Polishing: BatchNorm statistics measured exactly on clean training data.

Augmented training pictures are distributed differently from the clean ones that a model is
validated on, and running averages lag behind the weights (Kasagi et al., HPDC 2020, doi
10.1145/3369583.3392687). The statistics pass shows the model clean training pictures, forward only,
and replaces every running mean and variance by the moments over all of them, on all workers:
counts, means and sums of squares are pooled (Chan, Golub and LeVeque 1983), never averaged.

Each layer normalises by the statistics of its batch, as in training, so that the layers above see
what they were trained on. With a span (`norm.py`) those are the recipe's, and neither the batch
size nor the number of workers shows in the result; a plain BatchNorm's are the whole batch's.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from largebatch.contracts import Backend
from largebatch.errors import DataError


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerDrift:
    """How far one layer's polished statistics lie from its running ones."""

    name: str
    channels: int

    mean_shift: float
    """Root mean square over the channels of (polished mean - running mean) / running std."""

    log_variance_ratio: float
    """Root mean square over the channels of ln(polished variance / running variance)."""


Drift = tuple[LayerDrift, ...]


@dataclass(slots=True)
class _Moments:
    """Per channel, over everything a layer has seen so far, in float64."""

    count: float
    mean: Tensor
    deviations: Tensor
    """Sum of squared deviations from the mean."""

    def add(self, values: Tensor) -> None:
        """Merge N x C x ... values (Chan, Golub and LeVeque 1983, equation 2.1)."""
        values = values.double().transpose(0, 1).flatten(1)
        count = values.shape[1]
        var, mean = torch.var_mean(values, dim=1, correction=0)
        total = self.count + count
        shift = mean - self.mean
        self.deviations += var * count + shift.square() * (self.count * count / total)
        self.mean += shift * (count / total)
        self.count = total


@torch.no_grad()
def polish(model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]], backend: Backend) -> Drift:
    """Set the running statistics of every BatchNorm layer to the moments over all batches.

    Every worker gives its own batches of clean training data, or none; all get the same statistics.
    Weights, training flags, momentum and num_batches_tracked stay as they were, and so does
    everything if the pass fails; a layer that the forward pass does not use keeps its statistics.

    Returns the drift of each layer, in the order of the model. Raises DataError if no worker had a
    batch; ValueError if the model has no BatchNorm layer with running statistics.
    """
    layers = {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, _BatchNorm) and layer.running_mean is not None
    }
    if not layers:
        raise ValueError("the model has no BatchNorm layer with running statistics to polish")
    with _measuring(model, layers) as moments:
        for images, _ in batches:
            model(images)
    pooled = _pool(moments, backend)
    drift = tuple(
        _apply(name, layers[name], found) for name, found in pooled.items() if found.count
    )
    if not drift:
        raise DataError("polishing needs clean training pictures, and no worker was given any")
    return drift


@contextmanager
def _measuring(model: nn.Module, layers: dict[str, _BatchNorm]) -> Iterator[dict[str, _Moments]]:
    """Yield the moments of each layer's input, gathered as it is used; undo everything on exit."""
    modes = {module: module.training for module in model.modules()}
    tracks = {layer: layer.track_running_stats for layer in layers.values()}
    moments = {}
    hooks = []
    model.eval()
    try:
        for name, layer in layers.items():
            zeros = torch.zeros_like(layer.running_mean, dtype=torch.float64)  # type: ignore[arg-type]  # not None: see polish
            moments[name] = _Moments(0.0, zeros, zeros.clone())
            hooks.append(layer.register_forward_pre_hook(_measure(moments[name])))
            layer.training = True  # not train(): a dropout inside the layer stays off
            layer.track_running_stats = False
        yield moments
    finally:
        for hook in hooks:
            hook.remove()
        for layer, track in tracks.items():
            layer.track_running_stats = track
        for module, training in modes.items():
            module.training = training


def _measure(moments: _Moments) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
    def hook(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        moments.add(inputs[0])

    return hook


def _pool(moments: dict[str, _Moments], backend: Backend) -> dict[str, _Moments]:
    """Return every layer's moments over all workers, after one broadcast and one all-reduce.

    Worker 0's means serve all workers as the origin, so that sums of squares about it add up
    without cancellation however far a mean lies from zero.
    """
    origin = torch.cat([found.mean for found in moments.values()])
    backend.broadcast(origin)
    sizes = [len(found.mean) for found in moments.values()]
    parts = []
    for found, centre in zip(moments.values(), origin.split(sizes), strict=True):
        shift = found.mean - centre
        first = found.count * shift
        parts += [found.mean.new_tensor([found.count]), first, found.deviations + first * shift]
    totals = torch.cat(parts)
    backend.all_reduce(totals).wait()
    pooled = {}
    split = iter(totals.split([size for c in sizes for size in (1, c, c)]))
    for name, centre in zip(moments, origin.split(sizes), strict=True):
        count, first, second = next(split).item(), next(split), next(split)  # sync: once per layer
        shift = first / max(count, 1)
        pooled[name] = _Moments(count, centre + shift, second - first * shift)
    return pooled


def _apply(name: str, layer: _BatchNorm, found: _Moments) -> LayerDrift:
    """Fill the running buffers in place; variance with Bessel's correction, as PyTorch keeps it."""
    mean, var = layer.running_mean, layer.running_var
    assert mean is not None
    assert var is not None
    new_var = found.deviations / max(found.count - 1, 1)
    shift = (found.mean - mean) / (var.double() + layer.eps).sqrt()
    ratio = torch.log((new_var + layer.eps) / (var + layer.eps))
    mean.copy_(found.mean)
    var.copy_(new_var)
    return LayerDrift(
        name=name,
        channels=layer.num_features,
        mean_shift=shift.square().mean().sqrt().item(),  # sync: wanted in the report
        log_variance_ratio=ratio.square().mean().sqrt().item(),  # sync: wanted in the report
    )
