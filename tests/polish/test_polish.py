from collections.abc import Iterator
from typing import NoReturn

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from largebatch.distributed.serial import Serial
from largebatch.errors import DataError, PeerLostError
from largebatch.models.batchnorm import with_span
from largebatch.polish.statistics import polish

CPU = Serial(torch.device("cpu"))
Pairs = list[tuple[Tensor, Tensor]]


def batches(*sizes: int, offset: float = 0.0, dtype: torch.dtype = torch.float64) -> Pairs:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(sum(sizes), 3, 5, 5, dtype=torch.float64, generator=generator)
    labels = torch.zeros(len(images), dtype=torch.long)
    images = (images * torch.tensor([1.0, 2.0, 3.0]).view(3, 1, 1) + offset).to(dtype)
    return list(zip(images.split(sizes), labels.split(sizes), strict=True))


def first_layer() -> nn.Sequential:
    """A network whose first layer sees the data itself."""
    torch.manual_seed(0)
    layers = [nn.BatchNorm2d(3), nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(), nn.ReLU()]
    return nn.Sequential(*layers).double()


def state_of(model: nn.Module) -> dict[str, object]:
    """Everything that polishing must not change, without the values of the statistics."""
    return {
        "modes": [module.training for module in model.modules()],
        "buffers": {name: id(value) for name, value in model.named_buffers()},
        "addresses": {name: value.data_ptr() for name, value in model.state_dict().items()},
        "trained": [(p.requires_grad, p.grad) for p in model.parameters()],
        "hooks": [(list(m._forward_hooks), list(m._forward_pre_hooks)) for m in model.modules()],
        "norms": [
            (m.momentum, m.eps, m.track_running_stats, m.__dict__.keys() - {"moments"})
            for m in model.modules()
            if isinstance(m, _BatchNorm)
        ],
        "generator": torch.get_rng_state().tolist(),
    }


def peculiar() -> nn.Sequential:
    """A model with settings that are easily lost."""
    model = first_layer()
    model[3].eval()
    model[0].momentum = None  # type: ignore[assignment]  # PyTorch's cumulative average
    model[2].track_running_stats = False  # type: ignore[assignment]  # a flag
    model[1].requires_grad_(False)
    model[2].register_forward_pre_hook(lambda *_: None)
    model[2].register_forward_hook(lambda *_: None)
    return model


@pytest.mark.parametrize("span", [None, 2])
def test_only_the_running_statistics_change(span: int | None) -> None:
    model = with_span(first_layer(), span) if span else peculiar()
    values = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(3)
    before = state_of(model)
    polish(model, batches(4), CPU)
    assert state_of(model) == before
    changed = {name for name, value in model.state_dict().items() if not value.equal(values[name])}
    assert changed == {"0.running_mean", "0.running_var", "2.running_mean", "2.running_var"}


class Fails(Serial):
    """A backend whose other workers are gone."""

    def all_reduce(self, tensor: Tensor) -> NoReturn:
        raise PeerLostError("gone")


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt, GeneratorExit])
@pytest.mark.parametrize("where", ["batches", 0, 1, 2, 3, 4, "workers"])
@pytest.mark.parametrize("span", [None, 2])
def test_a_failure_in_the_middle_leaves_the_model_untouched(
    error: type[BaseException], where: str | int, span: int | None
) -> None:
    calls = []

    def fail(*_: object) -> None:
        calls.append(where)
        if len(calls) == 2:
            raise error

    def data() -> Iterator[tuple[Tensor, Tensor]]:
        yield from batches(4, 4)
        if where == "batches":
            raise error

    model = with_span(first_layer(), span) if span else peculiar()
    if isinstance(where, int):
        model[where].register_forward_hook(fail)
    before = state_of(model)
    values = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(PeerLostError if where == "workers" else error):
        polish(model, data(), Fails(CPU.device) if where == "workers" else CPU)
    assert state_of(model) == before
    torch.testing.assert_close(dict(model.state_dict()), values, rtol=0, atol=0)


def test_no_data_and_no_batchnorm_are_refused() -> None:
    with pytest.raises(DataError, match="clean"):
        polish(first_layer(), [], CPU)
    with pytest.raises(ValueError, match="nothing to polish"):
        polish(nn.Sequential(nn.Conv2d(3, 3, 1)), batches(4), CPU)


def test_drift_measures_shift_and_variance_against_the_running_statistics() -> None:
    model = nn.Sequential(nn.BatchNorm2d(3, eps=1e-12).double())
    ((images, labels),) = batches(10)
    model[0].running_mean = images.mean((0, 2, 3)) - 0.5 * images.std((0, 2, 3))
    model[0].running_var = images.var((0, 2, 3))
    (layer,) = polish(model, [(images, labels)], CPU)
    assert (layer.name, layer.channels) == ("0", 3)
    assert layer.mean_shift == pytest.approx(0.5)
    assert layer.log_variance_ratio == pytest.approx(0.0, abs=1e-12)
    (layer,) = polish(model, [(2 * images, labels)], CPU)
    assert layer.log_variance_ratio == pytest.approx(torch.tensor(4.0).log().item())
