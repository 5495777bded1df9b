"""BatchNorm spans over any division of a global batch, whole or shared by several workers.

The reference is plain PyTorch over each whole span. What the groups of workers exchange is tested
here between threads, and over the real communication libraries in test_crown.py.
"""

import copy
import io
import pickle
from collections.abc import Callable

import pytest
import torch
from on_forked_workers import on_forked_workers
from threads import Exchange, Thread, on_threads
from torch import Tensor, nn

from largebatch.distributed.backend import Group
from largebatch.distributed.connection import connect
from largebatch.distributed.serial import Serial
from largebatch.models.batchnorm import SpanBatchNorm, Spans, with_span
from largebatch.polish.statistics import polish

CPU = Serial(torch.device("cpu"))


def images(num: int, *shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num, *shape, dtype=torch.float64, generator=generator) * 3 + 1


def moments(layer: nn.Module) -> Tensor:
    assert isinstance(layer, SpanBatchNorm)
    assert layer.moments is not None
    return layer.moments


def shared(
    model: nn.Sequential, x: Tensor, weights: Tensor, *, workers: int
) -> tuple[nn.Sequential, Tensor, Tensor]:
    """Run forward and backward with a span of len(x) shared by a number of workers.

    Returns the model with the parameters' gradients summed and the moments added up, as the reducer
    and `Spans` do, the output, and the input's gradient.
    """
    ghost = with_span(copy.deepcopy(model), len(x))
    Spans(ghost, CPU)
    parts = list(zip(x.chunk(workers), weights.chunk(workers), strict=True))

    def work(group: Thread) -> tuple[nn.Sequential, Tensor, Tensor]:
        own = copy.deepcopy(ghost)
        Spans(own, CPU)
        layers = [layer for layer in own.modules() if isinstance(layer, SpanBatchNorm)]
        for layer in layers:
            layer.group = group
        images, factors = parts[group.rank]
        images = images.detach().clone().requires_grad_()
        out = own(images)
        (out * factors).sum().backward()
        assert images.grad is not None
        assert group.calls == 2 * len(layers)
        return own, out.detach(), images.grad

    results = on_threads(work, workers=workers)
    for own, _, _ in results:
        for total, mine in zip(ghost.parameters(), own.parameters(), strict=True):
            assert mine.grad is not None
            total.grad = mine.grad + (0 if total.grad is None else total.grad)
        for layer, part in zip(ghost.modules(), own.modules(), strict=True):
            if isinstance(part, SpanBatchNorm) and part.num_spans:
                assert isinstance(layer, SpanBatchNorm)
                assert layer.num_spans == 0  # one worker counts the span
                layer.moments, layer.num_spans = part.moments, part.num_spans
    outs, gradients = (torch.cat(parts) for parts in list(zip(*results, strict=True))[1:])
    return ghost, outs, gradients


@pytest.mark.parametrize(
    ("norm", "shape"),
    [
        pytest.param(nn.BatchNorm1d(5), (5,), id="1d without length"),
        pytest.param(nn.BatchNorm2d(5), (5, 4, 3), id="2d"),
        pytest.param(nn.BatchNorm3d(5), (5, 2, 3, 2), id="3d"),
        pytest.param(nn.BatchNorm2d(5, affine=False), (5, 4, 3), id="without weights"),
    ],
)
@pytest.mark.parametrize("workers", [2, 3])
def test_workers_that_share_a_span_match_batchnorm_on_the_whole_batch(
    norm: nn.Module, shape: tuple[int, ...], workers: int
) -> None:
    norm = copy.deepcopy(norm).double()
    for parameter in norm.parameters():
        nn.init.uniform_(parameter)
    x, weights = images(6, *shape), images(6, *shape, seed=1)
    ghost, out, gradient = shared(nn.Sequential(norm), x, weights, workers=workers)

    y = x.clone().requires_grad_()
    plain = norm(y)
    (plain * weights).sum().backward()
    torch.testing.assert_close(out, plain)
    torch.testing.assert_close(gradient, y.grad)
    for name, parameter in norm.named_parameters():
        torch.testing.assert_close(ghost[0].get_parameter(name).grad, parameter.grad)
    across = [0, *range(2, x.ndim)]
    expected = torch.stack([x.mean(across), x.var(across)])
    torch.testing.assert_close(moments(ghost[0]), expected)
    assert ghost[0].num_spans == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_float16_workers_share_float32_moments(dtype: torch.dtype) -> None:
    """Merged in half precision, the variance would be off by a hundredth."""
    norm = nn.BatchNorm2d(5)
    x, weights = (images(8, 5, 6, 6) + 20).to(dtype), images(8, 5, 6, 6, seed=1).to(dtype)
    ghost, out, gradient = shared(nn.Sequential(norm), x, weights, workers=4)
    y = x.detach().double().requires_grad_()
    exact = copy.deepcopy(norm).double()(y)
    (exact * weights).sum().backward()
    assert out.dtype == gradient.dtype == dtype
    assert y.grad is not None
    for ours, right in ((out, exact), (gradient, y.grad)):
        rounding = torch.finfo(dtype).eps * right.abs().max().item()
        torch.testing.assert_close(ours.double(), right, rtol=0, atol=rounding)
    expected = torch.stack([y.mean((0, 2, 3)), y.var((0, 2, 3))])
    torch.testing.assert_close(moments(ghost[0]).double(), expected, rtol=1e-5, atol=0)


def test_a_mean_ten_thousand_times_the_deviation_survives_the_merge_in_float32() -> None:
    x = (images(12, 3, 8, 8) / 3 + 1e4).float()
    weights = images(12, 3, 8, 8, seed=1).float()
    ghost, out, gradient = shared(nn.Sequential(nn.BatchNorm2d(3)), x, weights, workers=4)
    y = x.double().requires_grad_()
    exact = nn.BatchNorm2d(3).double()(y)
    (exact * weights).sum().backward()
    torch.testing.assert_close(out.double(), exact, rtol=0, atol=5e-3)
    assert y.grad is not None
    torch.testing.assert_close(gradient.double(), y.grad, rtol=0, atol=5e-3)
    torch.testing.assert_close(moments(ghost[0])[1].double(), y.var((0, 2, 3)), rtol=1e-4, atol=0)


class Nobody(Thread):
    """A group whose other workers never respond."""

    def __init__(self) -> None:
        super().__init__(0, Exchange(2))

    def all_gather(self, tensor: Tensor) -> Tensor:
        pytest.fail("a worker outside training waits for others")


def test_only_training_communicates() -> None:
    """Polishing accepts any share of the data on any worker, and normalises whole spans locally."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).double()
    ghost, alone = (with_span(copy.deepcopy(net), 4) for _ in "ab")
    nobody: Group = Nobody()
    for layer in (ghost[0], ghost[2]):
        assert isinstance(layer, SpanBatchNorm)
        layer.group = nobody
    data = images(12, 3, 5, 5)
    labels = torch.zeros(12)
    polish(ghost, [(data[:8], labels[:8]), (data[8:], labels[8:])], CPU)
    polish(alone, [(part, labels[:4]) for part in data.split(4)], CPU)
    torch.testing.assert_close(ghost.state_dict(), alone.state_dict())
    torch.testing.assert_close(ghost.eval()(data), alone.eval()(data))


def test_a_wrong_part_of_a_span_is_an_error() -> None:
    model = with_span(nn.Sequential(nn.BatchNorm1d(3)), 8)
    assert isinstance(model[0], SpanBatchNorm)
    model[0].group = Nobody()
    with pytest.raises(ValueError, match="2 workers .* 8 .* 4 .* 3"):
        model(torch.zeros(3, 3))


def saved(model: nn.Sequential) -> nn.Sequential:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded: nn.Sequential = torch.load(file, weights_only=False)
    return loaded


COPIES: list[Callable[[nn.Sequential], nn.Sequential]] = [
    copy.deepcopy,
    lambda model: pickle.loads(pickle.dumps(model)),
    saved,
]


def copies_of_shared_spans() -> None:
    """Copy a model whose spans two workers share, on worker 0; train the copy there alone."""
    backend = connect("torch")
    model = with_span(nn.Sequential(nn.BatchNorm1d(3)), 8).double()
    spans = Spans(model, backend, sync_workers=2)
    x = images(8, 3)[4 * backend.rank :][:4]
    plain = nn.BatchNorm1d(3).double()
    for make in COPIES if backend.rank == 0 else []:
        alone = make(model)
        torch.testing.assert_close(alone.state_dict(), model.state_dict())
        plain.load_state_dict(model[0].state_dict())
        torch.testing.assert_close(alone(x), plain(x))
        torch.testing.assert_close(alone[0].state_dict(), plain.state_dict())
    out = model(x)  # both workers: the model itself still shares its spans
    torch.testing.assert_close(
        out, nn.BatchNorm1d(3).double()(images(8, 3))[4 * backend.rank :][:4]
    )
    spans.reduce()
    spans.update()
    backend.close()


def test_a_copy_of_a_model_with_shared_spans_has_no_process_group() -> None:
    on_forked_workers(copies_of_shared_spans, workers=2)
