"""Compiled code, channels_last and autocast beside plain passes: faults of backends and graphs.

The backends here are faulty on purpose. They get what inductor would get, a graph of torch
operations, and run it with one fault.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch._dynamo
from planted_audit import findings_of
from planted_parts import FEATURES, Arguments, Pair, loop
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from largebatch.audit import Finding, audit
from largebatch.audit.findings import Check
from largebatch.audit.passes import Numbers, compare
from largebatch.audit.rules.compiled import Comparison
from largebatch.optional import require_timm

pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated"),
    # The compiler looks at the scores, which a compiled loss gets.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]

Graph = Callable[..., tuple[Tensor, ...]]
Backend = Callable[[Any, Any], Graph]

BATCH, CLASSES = 8, 4


class Net(nn.Module):
    """A convolution, BatchNorm, dropout and a linear layer."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 8, 3)
        self.bn = nn.BatchNorm2d(8)
        self.dropout = nn.Dropout(dropout)
        self.fc = nn.Linear(128, CLASSES)

    def features(self, images: Tensor) -> Tensor:
        return torch.relu(self.bn(self.conv(images))).flatten(1)

    def forward(self, images: Tensor) -> Tensor:
        out: Tensor = self.fc(self.dropout(self.features(images)))
        return out


def compiled(model: nn.Module, backend: str | Backend = "eager", **words: Any) -> nn.Module:  # noqa: ANN401
    """Return torch.compile of a model, which is a module too."""
    result: Any = torch.compile(model, backend=backend, **words)
    assert isinstance(result, nn.Module)
    return result


def batches() -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(0)
    return [
        (
            torch.randn(BATCH, 3, 6, 6, generator=draw),
            torch.randint(0, CLASSES, (BATCH,), generator=draw),
        )
        for _ in range(3)
    ]


def audited(model: nn.Module, check: Check = "compiled code", **words: Any) -> list[Finding]:  # noqa: ANN401
    """Return what an audit of a model finds in one check; other faults are not expected."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    findings = audit(model, batches(), words.pop("loss_fn", cross_entropy), optimizer, **words)
    assert not [it for it in findings.faults if it.check != check]
    return [*findings.named(check)]


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch._dynamo.utils.clear_compilation_metrics()
    yield
    torch._dynamo.reset()


# Units.


@dataclass
class _Arithmetic:
    """What a comparison needs of passes."""

    eps: float = 1e-7
    names: tuple[str, ...] = ("first", "second")
    buffer_names: tuple[str, ...] = ()


def numbers(outputs: float, first: float = 1.0, second: float = 1.0) -> Numbers:
    values = [torch.full((4,), value, dtype=torch.float64) for value in (outputs, first, second)]
    return Numbers([values[0]], values[0].mean(), values[1:], [], [], frozenset(), {})


def compared(own: Numbers, wider: Numbers | None) -> Comparison:
    plain = [numbers(1.0)] * 2
    passes: Any = _Arithmetic()
    return compare(passes, [plain[0], own], plain, plain, wider and [wider] * 2)


def test_differences_are_in_units_of_the_distance_from_a_wider_type() -> None:
    near = compared(numbers(1 + 12e-6), numbers(1 + 3e-6))
    assert near.outputs.relative == pytest.approx(12e-6)
    assert near.outputs.units == pytest.approx(4)
    assert (near.outputs.place, near.beyond) == (1, "")
    far = compared(numbers(1 + 60e-6), numbers(1 + 3e-6))
    assert far.outputs.units == pytest.approx(20)
    assert far.beyond == "outputs"
    assert far.is_surely_beyond


def test_without_a_wider_type_the_unit_is_the_rounding_of_the_type() -> None:
    near = compared(numbers(1 + 1.2e-6), None)
    assert near.outputs.units == pytest.approx(12)
    far = compared(numbers(1 + 12e-6), None)
    assert far.beyond == "outputs"
    assert not far.is_surely_beyond  # a deep model may round this much
    assert compared(numbers(1.5), None).is_surely_beyond


def test_a_gradient_may_differ_by_what_an_activation_near_zero_makes() -> None:
    assert not compared(numbers(1.0, second=1.005), numbers(1.0)).beyond
    wrong = compared(numbers(1.0, second=1.02), numbers(1.0))
    assert (wrong.beyond, wrong.gradients.name) == ("gradients", "second")


def test_values_that_are_not_finite_in_one_computation_only_are_infinitely_far() -> None:
    assert compared(numbers(float("nan")), numbers(1.0)).beyond == "outputs"


# Correct code.


def wrapped(backend: str, dropout: float = 0.5) -> nn.Module:
    return compiled(Net(dropout), backend)


def in_place() -> nn.Module:
    model = Net(0.5)
    model.compile(backend="eager")
    return model


class Doubled(nn.Linear):
    """A class of its own: the compiler skips those of torch."""

    def forward(self, features: Tensor) -> Tensor:
        return 2 * super().forward(features)


def a_layer() -> nn.Module:
    model = Net(0.5)
    model.fc = Doubled(128, CLASSES)
    model.fc.compile(backend="eager")
    return model


def its_forward() -> nn.Module:
    model = Net(0.5)
    model.forward = torch.compile(model.forward, backend="eager")  # type: ignore[method-assign]
    return model


@pytest.mark.parametrize(
    ("make", "part"),
    [
        pytest.param(lambda: wrapped("eager"), "the model", id="torch.compile"),
        pytest.param(
            lambda: wrapped("aot_eager"), "the model", id="with autograd", marks=pytest.mark.long
        ),
        pytest.param(in_place, "the model", id="Module.compile"),
        pytest.param(a_layer, "layer fc", id="a layer"),
        pytest.param(its_forward, "the model", id="a forward pass"),
    ],
)
def test_compiled_code_that_computes_the_same_is_fine(
    make: Callable[[], nn.Module], part: str
) -> None:
    (found,) = audited(make())
    assert (found.level, found.figure) == ("fine", 0.0)
    assert part in found.text


@pytest.mark.long
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_code_of_inductor_differs_by_rounding(dropout: float) -> None:
    found = audited(wrapped("inductor", dropout))
    assert [it.level for it in found] == ["fine"]
    assert found[0].figure is not None
    assert 0 <= found[0].figure < 4


@pytest.mark.long
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("name", ["resnet18", "mobilenetv3_small_050", "vit_tiny_patch16_224"])
def test_networks_of_timm_are_fine(name: str, backend: str) -> None:
    require_timm()
    import timm  # needs torchvision's operators, which this has declared

    torch.manual_seed(0)
    words = {"img_size": 32, "patch_size": 8} if "vit" in name else {}
    network = timm.create_model(name, num_classes=CLASSES, drop_rate=0.2, **words)
    model = compiled(network, backend)
    data = [(torch.randn(16, 3, 32, 32), torch.arange(16) % CLASSES) for _ in range(2)]
    findings = audit(model, data, cross_entropy, torch.optim.SGD(model.parameters(), lr=0.01))
    assert [it.level for it in findings.named("compiled code") if it.level != "note"] == ["fine"]


def test_without_compiled_code_there_is_no_such_row() -> None:
    assert not audited(Net())


def test_a_compiled_loss_is_compared_too() -> None:
    def backend(graph: Graph, _: object) -> Graph:
        return lambda *args: tuple(1.25 * it for it in graph(*args))

    wrong = torch.compile(cross_entropy, backend=backend)
    (found,) = audited(Net(), loss_fn=wrong)
    assert found.level == "fault"
    assert "loss" in found.text


# Faulty code.


def casts(graph: Graph, _: object) -> Graph:
    def run(*args: Tensor) -> tuple[Tensor, ...]:
        with torch.autocast("cpu", torch.bfloat16):
            return tuple(it.float() for it in graph(*args))

    return run


def returns_bfloat16(graph: Graph, _: object) -> Graph:
    return lambda *args: tuple(it.bfloat16() for it in graph(*args))


def mutates(graph: Graph, _: object) -> Graph:
    def run(*args: Tensor) -> tuple[Tensor, ...]:
        out = graph(*args)
        for tensor in args:
            if tensor.ndim == 4 and not tensor.requires_grad:
                tensor.data.mul_(0.5)
        return out

    return run


def repeats(graph: Graph, _: object) -> Graph:
    def run(*args: Tensor) -> tuple[Tensor, ...]:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            out = graph(*args)
        torch.rand(1)  # its generator moves, as that of eager code
        return out

    return run


def keeps_statistics(graph: Graph, _: object) -> Graph:
    def run(*args: Tensor) -> tuple[Tensor, ...]:
        buffers = [it for it in args if it.ndim == 1 and not it.requires_grad]
        before = [it.clone() for it in buffers]
        out = graph(*args)
        for buffer, content in zip(buffers, before, strict=True):
            buffer.data.copy_(content)
        return out

    return run


def runs_twice(graph: Graph, _: object) -> Graph:
    def run(*args: Tensor) -> tuple[Tensor, ...]:
        with torch.no_grad():
            graph(*args)
        return graph(*args)

    return run


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, tensor: Tensor) -> Tensor:  # noqa: ANN401 -- as torch calls it
        return tensor.view_as(tensor)

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:  # noqa: ANN401
        return 0.98 * gradient


def scales_a_gradient(graph: Graph, _: object) -> Graph:
    shape = (CLASSES, 128)
    scaled: Any = _Scaled.apply
    return lambda *args: graph(*(scaled(it) if it.shape == shape else it for it in args))


@pytest.mark.parametrize(
    ("backend", "named"),
    [
        pytest.param(casts, "bfloat16", id="a cast within"),
        pytest.param(returns_bfloat16, "returns bfloat16", id="a cast of the output"),
        pytest.param(mutates, "tensor 1", id="a changed input"),
        pytest.param(repeats, "repeat", id="dropout repeats"),
        pytest.param(keeps_statistics, "running_mean", id="statistics stay"),
        pytest.param(runs_twice, "running_", id="statistics move twice"),
        pytest.param(scales_a_gradient, "fc.weight", id="a wrong gradient"),
    ],
)
def test_a_fault_of_a_backend_is_named(backend: Backend, named: str) -> None:
    model = compiled(Net(0.5 * (backend is repeats)), backend)
    (found,) = audited(model)
    assert found.level == "fault"
    assert named in found.text
    if backend is runs_twice:
        assert found.figure == pytest.approx(1 + 0.9, rel=1e-3)  # momentum 0.1
    if backend is keeps_statistics:
        assert found.figure == pytest.approx(0, abs=1e-6)


def number_of_python() -> float:
    return random.random()


def number_of_torch() -> float:
    return float(torch.rand(()))


frozen_of_python: Any = torch.compiler.assume_constant_result(number_of_python)
frozen_of_torch: Any = torch.compiler.assume_constant_result(number_of_torch)


class Frozen(Net):
    """Its scale is random, and drawn when it is compiled."""

    draw: Callable[[], float]

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images) * (1 + type(self).draw())


class FrozenOfPython(Frozen):
    draw = staticmethod(frozen_of_python)


class FrozenOfTorch(Frozen):
    draw = staticmethod(frozen_of_torch)


class Counts(Net):
    """Its scale is the number of its passes, or another number."""

    scale = 1.0
    counts = True

    def forward(self, images: Tensor) -> Tensor:
        if self.counts:
            self.scale += 1.0
        return super().forward(images) * self.scale


def without_guards(model: nn.Module) -> nn.Module:
    options = {"guard_filter_fn": lambda guards: [False for _ in guards]}
    return compiled(model, options=options)


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        pytest.param(FrozenOfPython, "random", id="of Python"),
        pytest.param(FrozenOfTorch, "torch", id="of torch"),
    ],
)
def test_a_random_number_in_the_graph_is_named(kind: type[Net], named: str) -> None:
    (found,) = audited(compiled(kind()))
    assert found.level == "fault"
    assert f"(of {named})" in found.text


def test_a_number_that_changed_since_the_compilation_is_named() -> None:
    network = Counts()
    network.counts = False
    model = without_guards(network)
    model(batches()[0][0])
    network.scale = 3.0
    (found,) = audited(model)
    assert found.level == "fault"
    assert "66.67 %" in found.text  # 1 instead of 3
    assert "stale" in found.text


def test_a_number_that_changes_in_each_pass_is_named() -> None:
    (found,) = audited(without_guards(Counts()))
    assert found.level == "fault"
    assert "frozen" in found.text
    assert "33.33 %" in found.text  # 2 instead of 3


# Graphs, and what is not examined.


class Breaks(Net):
    def forward(self, images: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return super().forward(images)


def test_graph_breaks_are_a_note_with_their_number() -> None:
    fine, note = sorted(audited(compiled(Breaks())), key=lambda it: it.level)
    assert (fine.level, note.level, note.figure) == ("fine", "note", 1.0)


def test_graphs_that_are_compiled_again_are_a_note_with_their_number() -> None:
    model = compiled(Net(), dynamic=False)
    for number in (2, 3, 4):
        model(torch.randn(number, 3, 6, 6))
    fine, note = sorted(audited(model), key=lambda it: it.level)
    assert (fine.level, note.level, note.figure) == ("fine", "note", 3.0)
    assert "size" in note.text


def test_a_compiled_step_is_not_examined() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @torch.compile(backend="eager")
    def step(batch: tuple[Tensor, Tensor]) -> None:
        optimizer.zero_grad()
        cross_entropy(model(batch[0]), batch[1]).backward()
        optimizer.step()

    (found,) = audited(model, step=step)
    assert found.level == "unknown"
    assert "step" in found.text


def test_a_compiler_that_fails_is_unknown_with_its_reason() -> None:
    def fails(_: object, __: object) -> Graph:
        raise RuntimeError("no compiler here")

    (found,) = audited(compiled(Net(), fails))
    assert found.level == "unknown"
    assert "no compiler here" in found.text


def random_outside() -> nn.Module:
    class Outside(Net):
        def __init__(self) -> None:
            super().__init__()
            self.draws = iter(torch.rand(100).tolist())

        def draw(self) -> float:
            return float(next(self.draws))

        def forward(self, images: Tensor) -> Tensor:
            draw: Any = torch.compiler.disable(self.draw)
            out: Tensor = super().forward(images) * draw()
            return out

    return compiled(Outside())


def test_eager_code_that_differs_from_itself_is_not_compared() -> None:
    optimizer = torch.optim.SGD((model := random_outside()).parameters(), lr=0.1)
    found = audit(model, batches(), cross_entropy, optimizer).named("compiled code")
    assert "unknown" in [it.level for it in found]
    assert "fault" not in [it.level for it in found]


def test_a_model_that_is_compiled_and_runs_eagerly_is_a_note(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = compiled(Net())
    monkeypatch.setattr(torch._dynamo.config, "disable", True)
    assert "note" in [it.level for it in audited(model)]


# Several workers.


def own_network() -> nn.Module:
    # The compiler skips classes of torch, such as nn.Sequential, within the wrapper.
    torch.manual_seed(0)
    return Pair(nn.Linear(FEATURES, CLASSES), nn.Linear(FEATURES, CLASSES))


def wrapper_around_compiled() -> Arguments:
    return loop(DistributedDataParallel(compiled(own_network())))


def compiled_around_wrapper() -> Arguments:
    return loop(compiled(DistributedDataParallel(own_network())))


def faulty_around_wrapper() -> Arguments:
    return loop(compiled(DistributedDataParallel(own_network()), casts))


@pytest.mark.long
def test_a_model_compiled_inside_and_around_its_wrapper_is_compared() -> None:
    loops = [wrapper_around_compiled, compiled_around_wrapper, faulty_around_wrapper]
    results = findings_of(loops)
    levels = {}
    for name, findings in results.items():
        assert not isinstance(findings, str), findings
        found = findings.named("compiled code")
        levels[name] = [it.level for it in found if it.level != "note"]
        assert findings.is_compared
    assert levels == {
        "wrapper_around_compiled": ["fine"],
        "compiled_around_wrapper": ["fine"],
        "faulty_around_wrapper": ["fault"],
    }


# Memory formats and types.


def in_channels_last(model: Any, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:  # noqa: ANN401
    return model(batch[0].to(memory_format=torch.channels_last)), batch[1]


class ReadsMemory(nn.Module):
    """Takes its input to be contiguous, as kernels may."""

    def forward(self, images: Tensor) -> Tensor:
        _, channels, height, width = images.shape
        strides = (channels * height * width, height * width, width, 1)
        return images.as_strided(images.shape, strides)


def test_channels_last_is_compared_with_contiguous_tensors() -> None:
    model = Net(0.5).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    (found,) = audited(model, "channels last", forward=in_channels_last)
    assert found.level == "fine"
    assert found.figure is not None
    assert 0 <= found.figure < 16


def test_a_layer_that_takes_channels_last_for_contiguous_is_a_fault() -> None:
    model = Net()
    model.conv = nn.Sequential(model.conv, ReadsMemory())  # type: ignore[assignment]
    model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    (found,) = audited(model, "channels last", forward=in_channels_last)
    assert found.level == "fault"


def autocast(dtype: torch.dtype) -> Callable[[Any, tuple[Tensor, Tensor]], tuple[Tensor, Tensor]]:
    def forward(model: Any, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:  # noqa: ANN401
        with torch.autocast("cpu", dtype):
            return model(batch[0]).float(), batch[1]

    return forward


class Cancels(Net):
    """Its scores are a difference of large numbers."""

    def forward(self, images: Tensor) -> Tensor:
        features = self.features(images)
        large = torch.full_like(features, 1000.0)
        out: Tensor = self.fc(features + large) - self.fc(large)
        return out


class Overflows(Net):
    """Its scores are larger than those of float16."""

    def forward(self, images: Tensor) -> Tensor:
        return 1e3 * super().forward(1e3 * images).detach() + super().forward(images)


@pytest.mark.parametrize("compiled", [False, True])
def test_autocast_differs_by_the_rounding_of_its_type(compiled: bool) -> None:
    model = wrapped("eager") if compiled else Net(0.5)
    (found,) = audited(model, "autocast", forward=autocast(torch.bfloat16))
    assert found.level == "fine"
    assert found.figure is not None
    assert 0.1 < found.figure < 8  # roundings of bfloat16


def test_digits_lost_under_autocast_are_a_fault() -> None:
    (found,) = audited(Cancels(), "autocast", forward=autocast(torch.bfloat16))
    assert found.level == "fault"
