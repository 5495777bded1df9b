"""BatchNorm's kernels against float64, layer by layer and inside networks.

Triton's interpreter runs them where there is no GPU, and its compiler makes their machine code.
"""

import copy
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from interpreted import DEVICE, run_kernels, wrap_kernels
from threads import Thread, on_threads
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from largebatch import accelerator, proof
from largebatch.distributed.serial import Serial
from largebatch.models import kernels, with_span
from largebatch.models.batchnorm import SpanBatchNorm, Spans
from largebatch.models.compiled import compile_model
from largebatch.models.fusion import pair

runs = pytest.mark.usefixtures("kernels_run")


@pytest.fixture(params=[False, True])
def whole(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, kernels_run: None
) -> bool:
    """Whether each program has a whole span."""
    monkeypatch.setattr(kernels.batchnorm(), "WHOLE", request.param)
    return bool(request.param)


__all__ = ["run_kernels", "wrap_kernels"]
CPU = Serial(DEVICE)


def in_rows(values: Tensor) -> Tensor:
    return values.movedim(1, -1).contiguous().movedim(-1, 1).to(DEVICE)


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return in_rows((2 * values + 1).to(dtype))


def by_hand(
    x: Tensor, other: Tensor | None, affine: tuple[Tensor, Tensor] | None, span: int, relu: bool
) -> tuple[Tensor, Tensor]:
    """Return the layer's result and the sums over spans of mean and variance."""
    axes = [0, *range(2, x.ndim)]
    outs, sums = [], torch.zeros(2, x.shape[1], dtype=x.dtype, device=x.device)
    for part in x.split(span):
        mean, variance = part.mean(axes), part.var(axes)
        sums = sums + torch.stack([mean, variance]).detach()
        shape = [1, -1] + [1] * (x.ndim - 2)
        biased = part.var(axes, unbiased=False)
        out = (part - mean.view(shape)) / (biased + 1e-5).sqrt().view(shape)
        if affine is not None:
            out = out * affine[0].view(shape) + affine[1].view(shape)
        outs.append(out)
    out = torch.cat(outs)
    out = out if other is None else out + other
    return (out.relu() if relu else out), sums


def error(ours: Tensor, exact: Tensor) -> float:
    return float((ours.detach().double() - exact.detach()).norm() / (exact.detach().norm() + 1e-30))


SHAPES = [
    ((8, 24, 3, 2), 4),
    ((7, 5, 3, 3), 3),  # odd channels and a smaller last span
    ((5, 5, 9, 5), 2),  # parts of several steps
    ((3, 40, 2, 4), 8),  # a span above the batch
    ((10, 12), 4),
    ((6, 3, 7), 2),
    ((4, 6, 2, 3, 2), 2),
    ((3, 1, 4, 2), 1),
    *[((16, 64, 56, 56), 8)] * (DEVICE.type == "cuda"),  # the same with the sizes of a GPU
]
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}


@runs
@pytest.mark.parametrize(
    ("shape", "span", "relu", "adds", "dtype", "whole"),
    [
        *((*shape, False, False, torch.float32, False) for shape in SHAPES[:2]),
        *(
            pytest.param(*shape, False, False, torch.float32, False, marks=pytest.mark.long)
            for shape in SHAPES[2:]
        ),
        *((*shape, True, True, torch.float32, False) for shape in SHAPES[:3]),
        *(
            pytest.param(*shape, True, True, torch.float32, False, marks=pytest.mark.long)
            for shape in SHAPES[3:]
        ),
        *((*shape, True, False, torch.float32, False) for shape in SHAPES[:2]),
        *((*shape, False, True, torch.bfloat16, False) for shape in SHAPES[:2]),
        *((*shape, True, True, torch.float16, False) for shape in SHAPES[:2]),
        (*SHAPES[0], False, False, torch.float32, True),
        *((*shape, True, True, torch.float32, True) for shape in SHAPES[1:4]),
        (*SHAPES[1], True, False, torch.bfloat16, True),
        (*SHAPES[1], False, True, torch.float16, True),
    ],
    indirect=["whole"],
)
def test_result_moments_and_gradients_are_those_of_the_formula(
    shape: tuple[int, ...],
    span: int,
    dtype: torch.dtype,
    relu: bool,
    adds: bool,
    whole: bool,
) -> None:
    channels, affine = shape[1], relu or adds
    x = draw(*shape, dtype=dtype).requires_grad_()
    other = draw(*shape, seed=1, dtype=dtype).requires_grad_() if adds else None
    weight = draw(channels, 1, seed=2).flatten().requires_grad_() if affine else None
    bias = draw(channels, 1, seed=3).flatten().requires_grad_() if affine else None
    sums = torch.ones(2, channels, device=DEVICE)
    settings: dict[str, Any] = {"eps": 1e-5, "span": span, "relu": relu}
    out, moments = kernels.batchnorm().normalise(x, other, weight, bias, sums=sums, **settings)
    slope = draw(*shape, seed=4, dtype=dtype)
    leaves = [it for it in (x, other, weight, bias) if it is not None]
    grads = torch.autograd.grad(out, leaves, slope)

    exact = [it.detach().double().requires_grad_() for it in leaves]
    own = iter(exact)
    x64, other64 = next(own), next(own) if adds else None
    affine64 = (next(own), next(own)) if affine else None
    expected, expected_sums = by_hand(x64, other64, affine64, span, relu)
    kept = slope.double() * (out != 0) if relu else slope.double()  # zeros within rounding
    unclipped, _ = by_hand(x64, other64, affine64, span, relu=False)
    assert error(out, expected.detach()) < TOLERANCE[dtype]
    assert error(sums - 1, expected_sums) < 1e-6
    assert moments[:, 2].sum(0).eq(x.numel() / channels).all()
    for ours, theirs in zip(grads, torch.autograd.grad(unclipped, exact, kept), strict=True):
        assert ours.dtype in {dtype, torch.float32}
        assert error(ours, theirs) < TOLERANCE[dtype] * (3 if x.numel() < 40 else 1)


@pytest.mark.usefixtures("whole")
def test_a_far_mean_costs_no_more_digits_than_in_pytorch() -> None:
    x = draw(16, 4, 5, 5) + 20_000
    out, moments = kernels.batchnorm().normalise(x, None, None, None, eps=1e-5, span=16, relu=False)
    exact, sums = by_hand(x.double(), None, None, 16, relu=False)
    plain = F.batch_norm(x, None, None, training=True)
    assert error(out, exact) < 1.5 * error(plain, exact)
    assert error(moments[0, 1] * (400 / 399), sums[1]) < 1e-4


@pytest.mark.usefixtures("whole")
def test_gradients_are_finite_differences() -> None:
    """Also of spans with one value, whose result and gradient are constant."""
    x, ahead, slope = (draw(6, 5, seed=seed) for seed in range(3))
    weight, bias = draw(5, 2, seed=3).unbind(1)

    def result(leaf: Tensor, span: int) -> Tensor:
        settings: dict[str, Any] = {"eps": 1e-5, "span": span, "relu": False}
        out: Tensor = kernels.batchnorm().normalise(leaf, None, weight, bias, **settings)[0]
        return out

    for span in (6, 1):
        leaf = x.clone().requires_grad_()
        (grad,) = torch.autograd.grad(result(leaf, span), leaf, slope)
        change = result(x + 1e-2 * ahead, span) - result(x - 1e-2 * ahead, span)
        expected = (change * slope).sum() / 2e-2
        torch.testing.assert_close((grad * ahead).sum(), expected, rtol=2e-3, atol=1e-6)
    assert torch.equal(result(x, 1), bias.expand_as(x))


@pytest.mark.usefixtures("whole")
@pytest.mark.filterwarnings("ignore:invalid value")  # NumPy's, in the interpreter
def test_nan_and_infinities_are_never_hidden() -> None:
    x = draw(4, 3, 2, 2)
    x[1, 0, 1, 1], x[2, 1, 0, 0] = torch.nan, torch.inf
    out, _ = kernels.batchnorm().normalise(x, x, None, None, eps=1e-5, span=4, relu=True)
    theirs = F.relu(F.batch_norm(x, None, None, training=True) + x)
    assert torch.equal(out.isnan(), theirs.isnan())
    assert out[:, :2].isnan().all()


@pytest.mark.usefixtures("whole")
@pytest.mark.parametrize("parts", [1, 10])
def test_the_same_input_gives_the_same_bits(parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU 1,000 times, with more programs than run at the same time; 10: spans in parts."""
    fused = kernels.batchnorm()
    monkeypatch.setattr(fused, "PARTS", parts * fused.PARTS)
    shape, times = ((64, 512, 14, 14), 1000) if DEVICE.type == "cuda" else ((8, 8, 2, 2), 2)
    x, other, slope = (draw(*shape, seed=seed) for seed in range(3))
    weight, bias = torch.rand(2, shape[1], device=DEVICE).requires_grad_()
    settings: dict[str, Any] = {"eps": 1e-5, "span": 4, "relu": True}
    first: list[Tensor] = []
    for _ in range(times):
        sums = torch.zeros(2, shape[1], device=DEVICE)
        leaves = [it.detach().requires_grad_() for it in (x, other, weight, bias)]
        out, moments = fused.normalise(*leaves, sums=sums, **settings)
        found = [out, moments, sums, *torch.autograd.grad(out, leaves, slope)]
        first = first or found
        assert all(map(torch.equal, found, first))


@runs
@pytest.mark.parametrize("workers", [3])
def test_workers_share_a_span(monkeypatch: pytest.MonkeyPatch, workers: int) -> None:
    launch, lock = accelerator.launch, threading.Lock()

    def alone(*args: Any, **constants: Any) -> None:  # noqa: ANN401 -- those of launch
        with lock:  # the interpreter is not made for threads
            launch(*args, **constants)

    monkeypatch.setattr(accelerator, "launch", alone)
    x, slope = draw(6, 12, 3, 3), draw(6, 12, 3, 3, seed=1)
    weight, bias = draw(2, 12, seed=2)
    fused = kernels.batchnorm()

    def work(group: Thread) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        own = x.chunk(workers)[group.rank].clone(memory_format=torch.preserve_format)
        leaves = [it.clone().requires_grad_() for it in (own, weight, bias)]
        out, _ = fused.normalise(
            leaves[0], None, *leaves[1:], eps=1e-5, span=6, relu=True, group=group, sums=sums
        )
        return out, *torch.autograd.grad(out, leaves, slope.chunk(workers)[group.rank])

    sums = torch.zeros(2, 12, device=DEVICE)
    outs, *grads = zip(*on_threads(work, workers=workers), strict=True)
    exact = [it.double().requires_grad_() for it in (x, weight, bias)]
    expected, expected_sums = by_hand(exact[0], None, (exact[1], exact[2]), 6, relu=True)
    theirs = torch.autograd.grad(expected, exact, slope.double())
    assert error(torch.cat(outs).detach(), expected.detach()) < 1e-6
    assert error(sums / workers, expected_sums) < 1e-6
    assert error(torch.cat(grads[0]), theirs[0]) < 1e-6
    assert error(sum(grads[1]), theirs[1]) < 1e-6
    assert error(sum(grads[2]), theirs[2]) < 1e-6


@pytest.mark.parametrize(
    ("shape", "span", "chosen"),
    [
        pytest.param((256, 2048, 7, 7), 8, [True, True, True], id="small spans, many channels"),
        pytest.param((256, 2048, 7, 7), 16, [True, False, True], id="two programs, two tensors"),
        pytest.param((256, 256, 56, 56), 8, [False] * 3, id="spans above the cache"),
        pytest.param((48, 1024, 7, 7), 8, [False, False, True], id="few programs"),
        pytest.param((28, 2048, 7, 7), 28, [False] * 3, id="fewer than multiprocessors"),
    ],
)
@runs
def test_spans_that_stay_in_the_cache_of_an_h100_are_read_once(
    shape: tuple[int, ...], span: int, chosen: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accelerator, "multiprocessors", lambda _: (132, 50 * 2**20))
    images = torch.empty(shape, dtype=torch.bfloat16, device="meta")
    of = kernels.batchnorm()._LaunchShape.of
    shapes = [of(images, span, tensors=num) for num in (1, 2, 3)]
    assert [shape.whole for shape in shapes] == chosen
    assert not of(images, span, tensors=3, in_parts=True).whole
    assert all(shape.parts == 1 for shape in shapes if shape.whole)


@pytest.mark.usefixtures("kernels_in_graphs")
def test_a_graph_of_torch_compile_has_the_operators(whole: bool) -> None:
    """It is traced with the shapes that they declare; Triton's code is a GPU's matter."""
    torch.compiler.reset()  # other tests may have used up the recompilations of a layer
    block = nn.Sequential(nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 1))
    block = with_span(block.to(DEVICE), 2 if whole else 4)
    pair(block)
    compiled = copy.deepcopy(block)
    called: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        called.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    images = draw(4, 3, 2, 2)
    results = []
    for model, forward in (
        (block, block),
        (compiled, torch.compile(compiled, backend=backend, dynamic=False)),
    ):
        spans = Spans(model, CPU)
        for _ in range(2):
            forward(images).square().sum().backward()
        spans.reduce()
        spans.update()
        results.append([it.grad for it in model.parameters()] + list(model.buffers()))
    assert any("normalise_in_graph" in name for name in called)
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("images", "other"),
    [
        pytest.param(torch.zeros(2, 3, 2, 2), None, id="NCHW"),
        pytest.param(torch.zeros(2, 3).double(), None, id="float64"),
        pytest.param(torch.zeros(0, 3), None, id="no samples"),
        pytest.param(torch.zeros(2, 3), torch.zeros(1, 3), id="a sum that broadcasts"),
        pytest.param(torch.zeros(2, 3), torch.zeros(2, 3).half(), id="a sum of two types"),
        pytest.param(torch.zeros(70_000, 3), None, id="more spans than CUDA launches"),
        pytest.param(torch.zeros(1, 2**20 - 1), None, id="more blocks than CUDA launches"),
    ],
)
@runs
def test_what_the_kernels_do_not_take_is_left_to_pytorch(
    images: Tensor, other: Tensor | None, caplog: pytest.LogCaptureFixture
) -> None:
    kernels._log_refused.cache_clear()
    for _ in range(2):
        assert not kernels.take(images.to(DEVICE), None if other is None else other.to(DEVICE))
    assert len(caplog.records) == (images.ndim == 4 or images.dtype == torch.float64)
    assert kernels.take(torch.zeros(70_000, 3, device=DEVICE), span=2)


@pytest.mark.usefixtures("kernels_in_graphs")
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # the tracer reads it
def test_fake_tensors_and_tracers_see_the_operator() -> None:
    layer, images = with_span(nn.BatchNorm1d(3), 2).to(DEVICE), draw(4, 3)
    graph = make_fx(layer)(images)
    assert "span_batchnorm" in graph.code
    assert torch.equal(graph(images), layer(images))

    def gradient(values: Tensor) -> Tensor:
        leaf = values.detach().requires_grad_()
        (grad,) = torch.autograd.grad(layer(leaf).square().sum(), leaf)
        return grad

    graph = make_fx(gradient)(images)
    assert "span_batchnorm_backward" in graph.code
    assert torch.equal(graph(images), gradient(images))
    with FakeTensorMode(allow_non_fake_inputs=True):
        out = layer(torch.empty(4, 3, device=DEVICE))
        out.sum().backward()
    assert out.shape == images.shape


@runs
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")
def test_compilation_tries_the_kernels_before_its_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: dict[tuple[str, torch.device], str | None] = {}
    monkeypatch.setattr(proof, "DECISIONS", tried)
    monkeypatch.setattr(proof, "prove_alone", lambda *_: proof.TrialsResult())
    for model in (nn.Linear(3, 4), with_span(nn.BatchNorm1d(4), 2)):
        compile_model(model.to(DEVICE), True, DEVICE, shares_spans=False)
        assert bool(tried) == isinstance(model, SpanBatchNorm)


def test_kernels_are_launched_on_the_device_of_their_tensors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Triton takes the current device, where tensors of another GPU cannot be read."""
    guard = mock.MagicMock()
    monkeypatch.setattr(torch.accelerator, "device_index", guard)
    kernel = mock.MagicMock()
    with FakeTensorMode(allow_non_fake_inputs=True):
        accelerator.launch(kernel, (1,), torch.empty(1, device="cuda:1"))
    guard.assert_called_once_with(1)


@pytest.mark.long
@pytest.mark.parametrize("arch", [80, 90])
def test_the_compiler_takes_every_kernel(arch: int) -> None:
    """Machine code for A100 and H100, which needs no GPU; the interpreter accepts more."""
    pytest.importorskip("triton", reason="Triton, whose compiler reads the kernels")
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    script = Path(__file__).parents[1] / "support" / "compile_kernels.py"
    command = [sys.executable, str(script), str(arch)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["10", "kernels"]
