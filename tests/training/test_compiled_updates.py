"""Updates of a compiled model: one graph for each shape, and the numbers of an uncompiled one."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from on_forked_workers import on_forked_workers
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounter
from torch.utils.checkpoint import checkpoint

from largebatch.data.types import Batch
from largebatch.distributed.backend import Backend
from largebatch.distributed.connection import connect
from largebatch.distributed.reducer import Reducer
from largebatch.distributed.serial import Serial
from largebatch.errors import RecipeError
from largebatch.models import affine_parameters, param_groups
from largebatch.models.batchnorm import SpanBatchNorm, Spans, with_span
from largebatch.models.compiled import compile_model
from largebatch.models.wrappers import failures_named, uncompiled
from largebatch.optim.lars import LARS
from largebatch.training.loop import EagerStep, cross_entropy, step_seeds, train

CPU = torch.device("cpu")
SAMPLES, STEPS = 8, 3

compiles = torch.compile

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")


def without_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trace as always, and let PyTorch's kernels do what inductor's would: that takes a second."""

    def traces(
        model: Callable[..., Tensor], *, dynamic: bool, **_: object
    ) -> Callable[..., Tensor]:
        return compiles(model, dynamic=dynamic, backend="aot_eager")

    monkeypatch.setattr(torch, "compile", traces)


class Recomputed(nn.Sequential):
    """Its backward pass computes it again."""

    def forward(self, images: Tensor) -> Tensor:
        out: Tensor = checkpoint(super().forward, images, use_reentrant=False)
        return out


def net(second: type[nn.Sequential] | None) -> nn.Sequential:
    """One or two convolutions with BatchNorm."""
    torch.manual_seed(0)
    blocks = [
        kind(nn.Conv2d(channels, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU())
        for kind, channels in ((nn.Sequential, 3), (second, 4))
        if kind is not None
    ]
    head = [nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Dropout(0.2), nn.Linear(16, 10)]
    return nn.Sequential(*blocks, *head)


def batches(backend: Backend, *, size: int = 16) -> list[Batch]:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(2 * SAMPLES, 3, size, size, generator=generator)
    labels = torch.randint(10, (2 * SAMPLES,), generator=generator)
    parts = zip(images.split(SAMPLES), labels.split(SAMPLES), strict=True)
    return [Batch(*part) for part in parts][backend.rank :: backend.world_size]


@dataclass(frozen=True)
class Case:
    """What an update is made with."""

    span: int = SAMPLES
    accumulation: int = 1
    second: type[nn.Sequential] | None = nn.Sequential
    mode: bool = False
    affine: bool = True
    """True if updates of the affine stage follow."""


@dataclass(frozen=True)
class Found:
    """The result of some updates."""

    state: dict[str, Tensor]
    losses: list[float]
    graphs: int
    breaks: int


def updates(case: Case, backend: Backend, *, sizes: tuple[int, ...] = (16,)) -> Found:
    """Train on images of one size after the other, then of what the affine stage leaves."""
    torch._dynamo.reset()
    torch.compiler.set_stance("default")  # workers that were threads of a test may leave another
    torch._dynamo.utils.counters.clear()
    workers = max(1, case.span // SAMPLES)
    model = with_span(net(case.second), case.span)
    if case.mode:
        compile_model(model, case.mode, CPU, shares_spans=workers > 1)
    spans = Spans(model, backend, sync_workers=workers)
    losses: list[float] = []
    for size in sizes:
        losses += [loss.item() for loss in some_updates(case, model, spans, backend, size=size)]
    if case.affine:
        trained = affine_parameters(model)
        for weight in model.parameters():
            weight.requires_grad_(weight in trained)
        size = sizes[-1]
        losses += [loss.item() for loss in some_updates(case, model, spans, backend, size=size)]
    counters = torch._dynamo.utils.counters
    graphs, breaks = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
    return Found(model.state_dict(), losses, graphs, breaks)


def some_updates(
    case: Case, model: nn.Module, spans: Spans, backend: Backend, *, size: int
) -> list[Tensor]:
    with Reducer(model.named_parameters(), backend) as reducer:
        step = EagerStep(
            model,
            LARS(param_groups(model, weight_decay=1e-4), lr=0.1),
            cross_entropy(smoothing=0.0, off_target="all"),
            reducer,
            spans,
            global_batch=SAMPLES * case.accumulation * backend.world_size,
        )
        made = train(
            step,
            itertools.cycle(batches(backend, size=size)),
            lambda _: 0.1,
            steps=range(STEPS),
            accumulation=case.accumulation,
            seed=step_seeds(0, backend.rank),
        )
        return [update.loss for update in made]


def assert_close(ours: Found, plain: Found) -> None:
    torch.testing.assert_close(ours.losses, plain.losses, rtol=0, atol=1e-6)
    torch.testing.assert_close(ours.state, plain.state, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case(), id="one span", marks=pytest.mark.long),
        pytest.param(
            Case(span=4, accumulation=2), id="two spans, accumulated", marks=pytest.mark.long
        ),
        pytest.param(Case(span=3, accumulation=3), id="a rest, accumulated"),
    ],
)
def test_a_model_is_one_graph_for_each_shape(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spans and the hooks of the reducer break none, and count no micro-batch into a new one."""
    without_compiler(monkeypatch)
    ours = updates(replace(case, mode=True), Serial(CPU), sizes=(16, 18))
    assert_close(ours, updates(case, Serial(CPU), sizes=(16, 18)))
    assert ours.breaks == 0
    assert 2 <= ours.graphs <= 3  # of two sizes; torch 2.13 makes one of fewer gradients


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # of what is traced
def test_what_is_recomputed_in_the_backward_pass_counts_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    without_compiler(monkeypatch)
    ours = updates(Case(span=4, second=Recomputed, mode=True), Serial(CPU))
    assert_close(ours, updates(Case(span=4, second=Recomputed), Serial(CPU)))


def test_cuda_graphs_may_write_to_what_the_layers_count() -> None:
    """Their addresses are aligned, without which the forward pass would be left out."""
    model = with_span(net(nn.Sequential), SAMPLES)
    Spans(model, Serial(CPU))
    counted = [layer for layer in model.modules() if isinstance(layer, SpanBatchNorm)]
    written = [
        tensor
        for layer in counted
        for tensor in (layer.moments, layer.num_in_graphs)
        if tensor is not None
    ]
    assert len(written) == 4
    assert [tensor.data_ptr() % 16 for tensor in written] == [0] * 4


@pytest.mark.long
def test_inductor_computes_the_same(compiler: None) -> None:
    """One block and no affine stage: the C++ compiler takes two seconds for each kernel."""
    case = Case(span=4, accumulation=2, second=None, affine=False)
    ours = updates(replace(case, mode=True), Serial(CPU))
    assert_close(ours, updates(case, Serial(CPU)))
    assert ours.breaks == 0
    assert ours.graphs == 1


def beside_the_model_as_written(case: Case) -> tuple[Found, Found]:
    backend = connect("torch")
    with pytest.MonkeyPatch.context() as patch:
        without_compiler(patch)
        ours = updates(replace(case, mode=True), backend)
    plain = updates(case, backend)
    backend.close()
    return ours, plain


def test_spans_that_workers_share_stay_out_of_the_graphs() -> None:
    """Their moments are exchanged between the graphs of what lies before and after."""
    case = Case(span=2 * SAMPLES, accumulation=2)
    ours, plain = on_forked_workers(beside_the_model_as_written, case, workers=2)
    assert_close(ours, plain)
    assert ours.breaks > 0


def test_without_a_compiler_the_recipe_is_refused() -> None:
    import torch._inductor.config

    refused = pytest.raises(RecipeError, match=r"execution\.compile: .*C\+\+")
    with torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",)}), refused:
        compile_model(net(nn.Sequential), True, CPU, shares_spans=False)


@pytest.mark.parametrize("passes", ["forward", "backward"])
def test_a_model_that_cannot_be_compiled_is_refused(
    passes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(graph: object, inputs: object) -> Callable[..., Tensor]:
        cause = NotImplementedError("no kernel for this layer")
        raise torch._inductor.exc.InductorError(cause, None)

    def take(graph: Callable[..., Tensor], inputs: object) -> Callable[..., Tensor]:
        return graph

    compilers = {"fw_compiler": take, "bw_compiler": take, f"{passes[0]}w_compiler": refuse}
    backend = aot_autograd(**compilers)

    def fails(model: Callable[..., Tensor], **_: object) -> Callable[..., Tensor]:
        return compiles(model, backend=backend)

    monkeypatch.setattr(torch, "compile", fails)
    model = with_span(net(nn.Sequential), SAMPLES)
    compile_model(model, True, CPU, shares_spans=False)
    cause = r"execution\.compile: .*no kernel for this layer"
    with pytest.raises(RecipeError, match=cause), failures_named():
        model(batches(Serial(CPU))[0].images).sum().backward()


def test_blocks_of_two_threads_leave_models_compiled() -> None:
    """As two threads enter and leave them, of which neither is inside the other's."""
    counter = CompileCounter()
    model = compiles(nn.ReLU(), backend=counter)
    first, second = uncompiled(), uncompiled()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    model(torch.ones(1))
    assert not counter.frame_count
    second.__exit__(None, None, None)
    model(torch.ones(1))
    assert counter.frame_count
