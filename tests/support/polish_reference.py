"""A slow reference of Final Polishing: store all inputs of a layer, then compute two moments.

Only a layer's span is taken from the package. Everything is float64 and in one process.
"""

import copy
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

Pairs = list[tuple[Tensor, Tensor]]
Moments = dict[str, tuple[Tensor, Tensor]]


class Recorder(nn.Module):
    """Replaces a BatchNorm layer: stores its inputs, and normalises them as in training."""

    def __init__(self, like: _BatchNorm) -> None:
        super().__init__()
        self.weight = like.weight
        self.bias = like.bias
        self.eps = like.eps
        self.span = getattr(like, "span", None)
        self.after = nn.Sequential(*like.children())
        self.seen: list[Tensor] = []

    def forward(self, values: Tensor) -> Tensor:
        self.seen.append(values)
        return torch.cat([self._normalise(part) for part in values.split(self.span or len(values))])

    def _normalise(self, part: Tensor) -> Tensor:
        rows = part.transpose(0, 1).flatten(1)
        mean = rows.mean(1, keepdim=True)
        normal = (rows - mean) / ((rows - mean).square().mean(1, keepdim=True) + self.eps).sqrt()
        if self.weight is not None:
            normal = normal * self.weight.unsqueeze(1) + self.bias.unsqueeze(1)
        result: Tensor = self.after(normal.view(part.transpose(0, 1).shape).transpose(0, 1))
        return result


def moments_of(seen: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return mean and variance, with Bessel's correction, of all values together.

    One value is subtracted from all others first, which is exact even if the mean is far from zero.
    """
    rows = torch.cat([values.double().transpose(0, 1).flatten(1) for values in seen], dim=1)
    origin = rows[:, :1]
    return (rows - origin).mean(1) + origin.flatten(), (rows - origin).var(1)


@torch.no_grad()
def one_pass(model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]) -> Moments:
    """Return the expected statistics of polishing in one pass, by the name of the layer."""
    model = copy.deepcopy(model).double().eval()
    recorders: dict[str, Recorder] = {}
    replaced: dict[nn.Module, Recorder] = {}
    for name, layer in list(model.named_modules(remove_duplicate=False)):
        if isinstance(layer, _BatchNorm):
            if layer not in replaced:
                recorders[name] = replaced[layer] = Recorder(layer)
            parent, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(parent), attribute, replaced[layer])
    for images, _ in batches:
        model(images.double())
    return {name: moments_of(layer.seen) for name, layer in recorders.items() if layer.seen}


def norms(model: nn.Module) -> Iterator[tuple[str, _BatchNorm]]:
    return ((name, m) for name, m in model.named_modules() if isinstance(m, _BatchNorm))


def assert_right(model: nn.Module, right: Moments, *, rel: float) -> None:
    """Compare variances relative to themselves, and means to themselves or the deviation."""
    layers = dict(norms(model))
    assert right
    for name, (mean, var) in right.items():
        found_mean = layers[name].running_mean
        found_var = layers[name].running_var
        assert found_mean is not None
        assert found_var is not None
        assert ((found_var - var).abs() <= rel * var).all(), (name, found_var, var)
        wrong = (found_mean - mean).abs()
        assert (wrong <= rel * torch.maximum(mean.abs(), var.sqrt())).all(), (name, wrong, mean)
