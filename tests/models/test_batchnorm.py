import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from largebatch.distributed.serial import Serial
from largebatch.models import build
from largebatch.models.batchnorm import SpanBatchNorm, Spans, with_span
from largebatch.models.batchnorm_functional import normalise

CPU = Serial(torch.device("cpu"))


def images(num: int, *shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num, *shape, dtype=torch.float64, generator=generator) * 3 + 1


@pytest.mark.parametrize(
    ("norm", "shape", "layout"),
    [
        pytest.param(nn.BatchNorm1d(5), (5,), torch.contiguous_format, id="1d without length"),
        pytest.param(nn.BatchNorm1d(5), (5, 7), torch.contiguous_format, id="1d"),
        pytest.param(nn.BatchNorm2d(5), (5, 6, 3), torch.contiguous_format, id="2d"),
        pytest.param(nn.BatchNorm2d(5), (5, 6, 3), torch.channels_last, id="channels last"),
        pytest.param(nn.BatchNorm3d(5), (5, 2, 3, 2), torch.contiguous_format, id="3d"),
    ],
)
def test_each_group_is_normalised_as_batchnorm_would(
    norm: nn.Module, shape: tuple[int, ...], layout: torch.memory_format
) -> None:
    norm.double()
    nn.init.uniform_(norm.weight)  # type: ignore[arg-type]  # affine
    ghost = with_span(nn.Sequential(copy.deepcopy(norm)), 4)
    x, weights = images(12, *shape), images(12, *shape, seed=1)
    x = x.to(memory_format=layout).requires_grad_()
    y = x.detach().clone().requires_grad_()
    out, plain = ghost(x), torch.cat([norm(part) for part in y.split(4)])
    for result in (out, plain):
        (result.square() * weights).sum().backward()
    torch.testing.assert_close(out, plain)
    torch.testing.assert_close(x.grad, y.grad)
    assert x.grad is not None
    assert all(it.stride() == x.stride() for it in (out, x.grad))
    for name, parameter in norm.named_parameters():
        torch.testing.assert_close(ghost[0].get_parameter(name).grad, parameter.grad)


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("num", [8, 6], ids=["whole groups", "a smaller last one"])
def test_the_gradients_are_those_of_the_function(num: int, affine: bool) -> None:
    def function(
        x: torch.Tensor, weight: torch.Tensor | None = None, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        return normalise(x, weight, bias, eps=1e-5, span=4, group=None)[0]

    parameters = [images(3, seed=seed).requires_grad_() for seed in (1, 2)] if affine else []
    assert torch.autograd.gradcheck(function, [images(num, 3, 2).requires_grad_(), *parameters])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_float16_is_normalised_by_float32_moments(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(3, 5, 3, bias=False), nn.BatchNorm2d(5))
    ghost = with_span(copy.deepcopy(plain), 4)
    Spans(ghost, CPU)
    x = (images(8, 3, 8, 8) + 20).float()
    weights = images(8, 5, 6, 6, seed=1).to(dtype)
    with torch.autocast("cpu", dtype):
        ours, theirs = ghost(x), torch.cat([plain(part) for part in x.split(4)])
        features = plain[0](x).double()
        (ours * weights).sum().backward()
        (theirs * weights).sum().backward()
    assert ours.dtype == dtype
    torch.testing.assert_close(ours, theirs)
    for name, parameter in plain.named_parameters():
        gradient = ghost.get_parameter(name).grad
        assert gradient is not None
        assert parameter.grad is not None
        rounding = torch.finfo(dtype).eps * parameter.grad.abs().max().item()
        torch.testing.assert_close(gradient, parameter.grad, rtol=0, atol=4 * rounding)
    assert isinstance(ghost[1], SpanBatchNorm)
    assert ghost[1].moments is not None
    assert ghost[1].moments.dtype == torch.float32
    mean = torch.stack([part.mean((0, 2, 3)) for part in features.split(4)]).sum(0)
    torch.testing.assert_close(ghost[1].moments[0].double(), mean, rtol=1e-5, atol=1e-5)


def test_one_value_per_channel_is_refused() -> None:
    model = with_span(nn.Sequential(nn.BatchNorm1d(3)), 4)
    with pytest.raises(ValueError, match=r" 1 .*\(3,\)"):
        model(torch.zeros(5, 3))


def test_running_statistics_are_updated_once_per_step_with_the_mean_of_all_spans() -> None:
    model = with_span(nn.Sequential(nn.BatchNorm2d(3).double()), 4)
    spans = Spans(model, CPU)
    micro = [images(12, 3, 2, 2, seed=seed) for seed in (1, 2)]
    for part in micro:
        model(part)
    assert not model.get_buffer("0.running_mean").any()
    spans.reduce()
    spans.update()
    groups = torch.cat(micro).split(4)
    mean = torch.stack([group.mean((0, 2, 3)) for group in groups]).mean(0)
    var = torch.stack([group.var((0, 2, 3)) for group in groups]).mean(0)
    torch.testing.assert_close(model[0].running_mean, 0.1 * mean)
    torch.testing.assert_close(model[0].running_var, 0.9 + 0.1 * var)
    assert model[0].num_batches_tracked == 1
    model(micro[0])
    spans.reduce()
    spans.update()
    assert model[0].num_batches_tracked == 2


def test_without_momentum_the_running_statistics_are_the_mean_over_steps() -> None:
    model = with_span(nn.Sequential(nn.BatchNorm1d(3, momentum=None).double()), 4)
    spans = Spans(model, CPU)
    batches = [images(4, 3, seed=seed) for seed in (1, 2, 3)]
    for batch in batches:
        model(batch)
        spans.reduce()
        spans.update()
    expected = torch.stack([batch.mean(0) for batch in batches]).mean(0)
    torch.testing.assert_close(model[0].running_mean, expected)


def test_a_layer_counts_its_own_spans() -> None:
    """Used twice it has twice as many, under whatever name; not used it keeps its statistics."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.twice, self.idle = nn.BatchNorm1d(3).double(), nn.BatchNorm1d(3).double()
            self.alias = self.twice

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.alias(self.twice(x) + 1)
            return y

    model = with_span(Net(), 4)
    assert model.alias is model.twice
    spans = Spans(model, CPU)
    x = images(4, 3)
    model(x)
    spans.reduce()
    spans.update()
    assert model.twice.running_mean is not None
    torch.testing.assert_close(model.twice.running_mean, 0.1 * (x.mean(0) + 1) / 2)
    assert model.idle.num_batches_tracked == 0
    assert model.get_buffer("idle.running_var").equal(torch.ones(3, dtype=torch.float64))


@pytest.mark.parametrize("momentum", [0.1, None])
def test_a_skipped_step_leaves_no_trace_even_of_nan_moments(momentum: float | None) -> None:
    model = with_span(nn.Sequential(nn.BatchNorm1d(3, momentum=momentum)), 4)
    without = copy.deepcopy(model)
    spans, expected = Spans(model, CPU), Spans(without, CPU)
    for seed, skipped in enumerate([True, False, True, False]):
        batch = images(4, 3, seed=seed).float()
        model(torch.full_like(batch, torch.nan) if skipped else batch)
        spans.reduce()
        spans.update(skipped=torch.tensor(skipped))
        if not skipped:
            without(batch)
            expected.reduce()
            expected.update()
        torch.testing.assert_close(model.state_dict(), without.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("momentum", [0.1, None])
def test_without_spans_statistics_are_updated_in_every_forward_pass(momentum: float | None) -> None:
    """By the mean over its groups; of one group just as nn.BatchNorm does."""
    plain = nn.BatchNorm2d(3, momentum=momentum).double()
    whole = with_span(nn.Sequential(copy.deepcopy(plain)), 99)
    groups = with_span(nn.Sequential(copy.deepcopy(plain)), 4)
    mean, var = torch.zeros(3).double(), torch.ones(3).double()
    for step in range(3):
        x = images(8, 3, 5, 5, seed=step) * (step + 1)
        for model in (plain, whole, groups):
            model(x)
        weight = 1 / (step + 1) if momentum is None else momentum
        parts = [part.transpose(0, 1).flatten(1) for part in x.split(4)]
        mean += weight * (torch.stack([part.mean(1) for part in parts]).mean(0) - mean)
        var += weight * (torch.stack([part.var(1) for part in parts]).mean(0) - var)
    torch.testing.assert_close(whole[0].state_dict(), plain.state_dict())
    torch.testing.assert_close(groups[0].running_mean, mean)
    torch.testing.assert_close(groups[0].running_var, var)


def test_timms_batchnorm_keeps_its_activation() -> None:
    """EfficientNet's layers normalise, drop and activate under the names of the plain ones."""
    torch.manual_seed(0)
    plain = build("efficientnet_b0", num_classes=7, arguments={"drop_rate": 0.0}).double()
    ghost = with_span(copy.deepcopy(plain), 4)
    assert ghost.state_dict().keys() == plain.state_dict().keys()
    assert sum(isinstance(module, SpanBatchNorm) for module in ghost.modules()) == 49
    x = images(8, 3, 32, 32)
    weights = images(8, 7, seed=1)
    (ghost(x) * weights).sum().backward()
    (torch.cat([plain(part) for part in x.split(4)]) * weights).sum().backward()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(ghost.get_parameter(name).grad, parameter.grad)
    ghost.load_state_dict(plain.state_dict())
    torch.testing.assert_close(ghost.eval()(x), plain.eval()(x))


def named(kind: str) -> nn.Module:
    """Return a BatchNorm with an attribute, hooks and a forward pass by someone else."""
    norm = nn.BatchNorm1d(3).double()
    if kind == "weight norm":
        nn.utils.parametrizations.weight_norm(norm)
    elif kind == "own forward":
        norm.forward = nn.Identity().forward  # type: ignore[method-assign]
    elif kind == "subclass":
        norm = type("BatchNormAct2d", (nn.BatchNorm2d,), {})(3)  # a class with the name of timm's
    elif kind == "no statistics":
        norm = nn.BatchNorm1d(3, track_running_stats=False)
    return norm


@pytest.mark.parametrize("kind", ["weight norm", "own forward", "subclass", "no statistics"])
def test_an_unsupported_batchnorm_is_refused_by_name_before_any_is_changed(kind: str) -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Sequential(nn.ReLU(), named(kind)))
    with pytest.raises(ValueError, match=r"layer 1\.1 "):
        with_span(model, 2)
    assert type(model[0]) is nn.BatchNorm1d
    with pytest.raises(ValueError, match="the model"):
        with_span(named(kind), 2)


class InAList(nn.Module):
    """A layer that is also in a plain list, which the forward pass reads."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.layers = norm, [norm]

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layers[0](values)
        return result


@pytest.mark.parametrize("wrap", [lambda norm: norm, nn.Sequential, InAList])
def test_a_layer_keeps_hooks_attributes_and_keys_wherever_it_is(
    wrap: Callable[[nn.Module], nn.Module],
) -> None:
    """The bare layer itself, one of a model, and one that is referred to elsewhere."""
    norm, seen = nn.BatchNorm1d(3).double(), []
    norm.note = "mine"  # type: ignore[assignment]
    norm.register_forward_pre_hook(lambda _, inputs: (2 * inputs[0] + 1,))
    handle = norm.register_forward_hook(lambda *_: seen.append("forward"))
    norm.register_full_backward_hook(lambda *_: seen.append("backward"))
    norm.register_load_state_dict_pre_hook(lambda *_: seen.append("loaded"))
    model = wrap(norm)
    keys = model.state_dict().keys()
    expected = copy.deepcopy(norm)
    result = with_span(model, 4)
    x = images(8, 3).requires_grad_()
    out = result(x)
    seen.clear()
    torch.testing.assert_close(out, torch.cat([expected(part) for part in x.split(4)]))
    assert result.state_dict().keys() == keys
    out.sum().backward()
    result.load_state_dict(model.state_dict())
    assert seen == ["forward", "forward", "backward", "loaded"]
    handle.remove()
    with_span(result, 2)(x)
    (layer,) = (module for module in result.modules() if isinstance(module, SpanBatchNorm))
    assert layer.note == "mine"
    assert (layer.span, len(seen)) == (2, 4)


@pytest.mark.parametrize("span", [0, -1, 2.5, True, "4", None])
def test_a_span_is_a_number_of_samples(span: int) -> None:
    norm = nn.BatchNorm1d(3)
    with pytest.raises(ValueError, match="span"):
        with_span(norm, span)
    assert type(norm) is nn.BatchNorm1d
    assert "span=4" in repr(with_span(norm, 4))
