import pytest
import torch
from torch import nn

from largebatch.backends.serial import Serial
from largebatch.norm import SpanBatchNorm, Spans, with_span

CPU = Serial(torch.device("cpu"))


def images(num: int, *shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num, *shape, dtype=torch.float64, generator=generator) * 3 + 1


@pytest.mark.parametrize(
    ("norm", "shape"),
    [
        pytest.param(nn.BatchNorm1d(5), (5,), id="1d without length"),
        pytest.param(nn.BatchNorm1d(5), (5, 7), id="1d"),
        pytest.param(nn.BatchNorm2d(5), (5, 4, 3), id="2d"),
        pytest.param(nn.BatchNorm3d(5), (5, 2, 3, 2), id="3d"),
    ],
)
def test_each_group_is_normalised_as_batchnorm_would(
    norm: nn.Module, shape: tuple[int, ...]
) -> None:
    norm.double()
    nn.init.uniform_(norm.weight)  # type: ignore[arg-type]  # affine
    ghost = with_span(nn.Sequential(norm), 4)
    x = images(12, *shape).requires_grad_()
    weights = images(12, *shape, seed=1)
    (ghost(x) * weights).sum().backward()

    y = x.detach().clone().requires_grad_()
    plain = torch.cat([norm(part) for part in y.split(4)])
    (plain * weights).sum().backward()
    torch.testing.assert_close(ghost(x), plain)
    torch.testing.assert_close(x.grad, y.grad)


def test_running_statistics_move_once_a_step_towards_the_mean_of_all_spans() -> None:
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


def test_names_values_and_evaluation_stay_as_they_were() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Sequential(nn.BatchNorm2d(4))).double().eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    x = images(5, 3, 2, 2)
    expected = model(x)
    with_span(model, 2)
    assert isinstance(model.get_submodule("1.0"), SpanBatchNorm)
    torch.testing.assert_close(dict(model.state_dict()), before)
    torch.testing.assert_close(model(x), expected, rtol=0, atol=0)


def test_a_smaller_last_group_is_normalised_by_itself() -> None:
    model = with_span(nn.Sequential(nn.BatchNorm1d(3, affine=False).double()), 4)
    out = model(images(6, 3))
    torch.testing.assert_close(out[4:].mean(0), torch.zeros(3, dtype=torch.float64))


def test_evaluation_and_polishing_do_not_count_as_training() -> None:
    model = with_span(nn.Sequential(nn.BatchNorm1d(3).double()), 4)
    model.eval()(images(4, 3))
    assert isinstance(model[0], SpanBatchNorm)
    assert not model[0].moments.any()


def test_a_batchnorm_that_does_more_is_refused_by_name() -> None:
    class BatchNormAct(nn.BatchNorm2d):
        pass

    with pytest.raises(ValueError, match="layer 0.1 is a BatchNormAct; only nn.BatchNorm1d"):
        with_span(nn.Sequential(nn.Sequential(nn.ReLU(), BatchNormAct(3))), 2)
    with pytest.raises(ValueError, match="layer 0 keeps no running statistics"):
        with_span(nn.Sequential(nn.BatchNorm2d(3, track_running_stats=False)), 2)


def test_a_vector_is_no_batch() -> None:
    with pytest.raises(ValueError, match="expected N x C x ..., got 1 dimensions"):
        with_span(nn.Sequential(nn.BatchNorm1d(3)), 2).eval()(torch.zeros(3))
