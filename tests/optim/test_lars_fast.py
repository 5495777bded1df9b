"""Every way to compute the LARS update against the formula."""

import importlib.util
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any
from unittest import mock

import accelerator as device
import numpy as np
import pytest
import torch
from lars_formula import (
    CONVENTIONS,
    RATES,
    TOLERANCE,
    Formula,
    Path,
    assert_close,
    choose_path,
    gradients,
    parameters,
    take_steps,
)
from on_forked_workers import on_forked_workers
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from largebatch import accelerator, proof
from largebatch.optim import kernels
from largebatch.optim.kernels import batched, fused, table
from largebatch.optim.lars import LARS
from largebatch.optim.rates import set_rates
from largebatch.optim.sgd import TabledSGD, build_sgd
from largebatch.optional import INSTALL_APEX
from largebatch.recipe.choices import Convention, Kernels

__all__ = ["choose_path"]  # the fixture `path`

ETA, EPS = 0.02, 1e-9

every_convention = pytest.mark.parametrize("convention", CONVENTIONS)
every_path = pytest.mark.parametrize(
    ("way", "dtype"),
    [
        ("fused", torch.float64),
        ("fused", torch.float32),
        ("batched", torch.float64),
        ("batched", torch.float32),
        ("apex", torch.float32),
    ],
)


@every_path
@every_convention
@pytest.mark.parametrize(
    ("adapt", "settings"),
    [
        *(
            (adapt, {"weight_decay": decay, "momentum": momentum})
            for adapt, decay, momentum in product([True, False], [0.0, 0.05], [0.0, 0.9])
        ),
        (True, {"weight_decay": 0.05, "clip_ratio": 0.019}),
        (True, {"weight_decay": 0.05, "clip_ratio": 0.019, "clip_gradient": 0.7}),
        (False, {"weight_decay": 0.05, "clip_ratio": 0.019, "clip_gradient": 0.7}),
    ],
    ids=str,
)
def test_every_implementation_matches_the_formula(
    path: Path,
    way: str,
    dtype: torch.dtype,
    convention: Convention,
    adapt: bool,
    settings: dict[str, Any],
) -> None:
    path(way)
    weights = parameters(dtype)
    group = {"params": weights, "adapt": adapt}
    optimizer = LARS([group], max(RATES), eta=ETA, eps=EPS, convention=convention, **settings)
    formulas = [Formula(weight, optimizer.param_groups[0]) for weight in weights]
    if way == "apex" and "clip_gradient" in settings:
        with pytest.raises(ValueError, match="apex"):
            take_steps(optimizer, weights, formulas, range(1))
        return
    take_steps(optimizer, weights, formulas, range(len(RATES)))
    for weight, formula in zip(weights, formulas, strict=True):
        assert_close(weight, formula.w, TOLERANCE[dtype])
        if weight.numel() > 1 and weight in optimizer.state:
            assert_close(optimizer.state[weight]["momentum_buffer"], formula.b, TOLERANCE[dtype])
    assert weights[-1] not in optimizer.state


RATIOS = 0.019
"""Between the ratios of `parameters`; half of the tensors would have a larger one."""


TABLE: list[tuple[Convention, bool, dict[str, Any]]] = [
    ("reference", True, {"weight_decay": 0.05}),
    ("scaled-momentum", True, {"clip_ratio": RATIOS, "clip_gradient": 0.7}),
    ("outside", True, {"weight_decay": 0.05, "clip_ratio": RATIOS}),
    ("fujitsu", True, {"weight_decay": 0.05, "clip_gradient": 0.7}),
    ("reference", False, {"weight_decay": 0.05, "momentum": 0.0, "clip_gradient": 0.7}),
]


needs_apex = pytest.mark.skipif(
    not torch.cuda.is_available() or importlib.util.find_spec("amp_C") is None,
    reason="no CUDA GPU, or NVIDIA's apex is not installed; " + INSTALL_APEX,
)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize(
    ("convention", "adapt", "settings", "kernels"),
    [
        *((*row, "torch") for row in TABLE),
        *(
            pytest.param(*row, "apex", marks=needs_apex)
            for row in TABLE
            if "clip_gradient" not in row[2]
        ),
    ],
)
def test_the_table_matches_the_formula(
    path: Path, convention: Convention, adapt: bool, settings: dict[str, Any], kernels: Kernels
) -> None:
    """Its kernels, and apex's, run on a GPU; without one, in Triton's interpreter, which is slow.

    On a GPU no step waits once all tensors have come.
    """
    if not torch.cuda.is_available():
        path("table")
    weights = parameters(torch.float32)
    formulas = [Formula(weight, {}) for weight in weights]
    for weight in weights:
        weight.data = weight.data.to(accelerator.current())
    group = {"params": weights, "adapt": adapt, "kernels": kernels}
    optimizer = LARS([group], eta=0.02, eps=1e-3, convention=convention, **settings)
    for formula in formulas:
        formula.group = optimizer.param_groups[0]
    take_steps(optimizer, weights, formulas, range(3))
    for weight, formula in zip(weights, formulas, strict=True):
        assert_close(weight.cpu(), formula.w, 1e-6)
    if torch.cuda.is_available():
        torch.cuda.set_sync_debug_mode("error")
        try:
            optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("nesterov", [False, True])
def test_sgd_in_a_table_is_that_of_pytorch(path: Path, nesterov: bool) -> None:
    """In one launch, with PyTorch's groups and state; on a GPU if there is one."""
    if not torch.cuda.is_available():
        path("table")
    device = accelerator.current()
    launch = mock.Mock(side_effect=accelerator.launch)
    ours, theirs = parameters(torch.float32), parameters(torch.float32)
    for weight in ours:
        weight.data = weight.data.to(device)

    def groups(weights: list[nn.Parameter]) -> list[dict[str, Any]]:
        return [{"params": weights[:6], "weight_decay": 0.05}, {"params": weights[6:], "lr": 0.7}]

    settings: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "nesterov": nesterov}
    table = build_sgd(groups(ours), scaled=False, **settings)
    plain = torch.optim.SGD(groups(theirs), foreach=False, **settings)
    assert isinstance(table, TabledSGD)
    with mock.patch.object(accelerator, "launch", launch):
        for step in range(4):
            for optimizer in (table, plain):
                set_rates(optimizer, RATES[step], step=step)
            for one, other, grad in zip(ours, theirs, gradients(ours, step), strict=True):
                if grad is not None:
                    one.grad, other.grad = grad.to(device), grad.clone()
            table.step()
            plain.step()
    assert launch.call_count == 4
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.cpu(), other, rtol=0, atol=2e-6)
    plain.load_state_dict(table.state_dict())
    table.load_state_dict(plain.state_dict())
    assert table.state_dict()["param_groups"] == plain.state_dict()["param_groups"]


@pytest.mark.parametrize(
    "settings", [{}, {"maximize": True}, {"dampening": 0.5}, {"momentum": 0.0}], ids=str
)
def test_pytorch_updates_what_its_table_cannot(path: Path, settings: dict[str, Any]) -> None:
    """Sparse gradients, a bias that becomes shorter, and some settings."""
    path("table")
    models, optimizers = [], []
    for make in (partial(build_sgd, scaled=True), torch.optim.SGD):
        words, layer = nn.Embedding(10, 4, sparse=True), nn.Linear(4, 3)
        for number, weight in enumerate((words.weight, layer.weight, layer.bias)):
            nn.init.normal_(weight, generator=torch.Generator().manual_seed(number))
        groups = [{"params": [words.weight, layer.bias]}, {"params": [layer.weight], **settings}]
        optimizer = make(groups, lr=0.01, momentum=0.9, nesterov=False)
        for step in range(4):
            optimizer.zero_grad()
            if step == 2:
                layer.bias.data = layer.bias.data.bfloat16()
            out = words(torch.tensor([step, 2])) @ layer.weight.t() + layer.bias
            out.square().sum().backward()
            optimizer.step()
        models.append((words.weight, layer.weight, layer.bias))
        optimizers.append(optimizer)
    assert isinstance(optimizers[0], TabledSGD)
    assert not optimizers[0]._step_supports_amp_scaling
    torch.testing.assert_close(*models, rtol=1e-5, atol=2e-6)
    state, expected = (optimizer.state_dict()["state"] for optimizer in optimizers)
    torch.testing.assert_close(state, expected, rtol=1e-5, atol=2e-6)


def examined(path: Path) -> tuple[list[nn.Parameter], LARS]:
    """Return weights of each kind after a step; the last one is not adapted."""
    if not torch.cuda.is_available():
        path("table")
    kinds = (1500, torch.float32), (1200, torch.bfloat16), (0, torch.float32), (1100, torch.float32)
    values = (torch.linspace(-1, 2, size, dtype=dtype) for size, dtype in kinds)
    weights = [nn.Parameter(value.to(accelerator.current())) for value in values]
    for weight in weights:
        weight.grad = weight.detach() / 3
    apart: dict[str, Any] = {"params": weights[3:], "adapt": False}
    optimizer = LARS([{"params": weights[:3]}, apart], lr=0.5, weight_decay=0.1, eta=0.1)
    optimizer.step()
    return weights, optimizer


class Own(LARS):
    """May change gradients by `.data`, which no version counts."""

    def step(self, closure: Any = None) -> Any:  # noqa: ANN401 -- as torch's
        return super().step(closure)


Change = Callable[[LARS, torch.Tensor], object]

CHANGES: dict[str, Change] = {
    "": lambda *_: None,
    "a hook": lambda it, _: it.register_step_pre_hook(mock.Mock(return_value=None)),
    "a subclass": lambda it, _: setattr(it, "__class__", Own),
    "no ratios": lambda it, _: it.param_groups[0].update(adapt=False),
    "a weight of no group": lambda it, _: it.param_groups[1]["params"].clear(),
}


@pytest.mark.parametrize("name", CHANGES)
def test_norms_tell_whether_all_gradients_are_finite_or_nothing(path: Path, name: str) -> None:
    weights, optimizer = examined(path)
    CHANGES[name](optimizer, weights[0])
    optimizer.step()
    for place, element in product((0, 1, 3), (1e30, np.nan, np.inf, -np.inf)):
        weights[place].grad[1050] = element  # type: ignore[index]  # there is one
        found = optimizer.examine(weights)
        assert found is None if name else bool(found) is (element == 1e30)
        weights[place].grad[1050] = 1.0  # type: ignore[index]


WRITES: dict[str, Change] = {
    "": lambda *_: None,
    "a step": lambda optimizer, _: optimizer.step(),
    "another group": lambda optimizer, _: optimizer.param_groups[1].update(adapt=True),
    "a scale": lambda optimizer, _: setattr(optimizer, "grad_scale", torch.tensor(3.0)),
}


@pytest.mark.parametrize("name", WRITES)
def test_only_the_next_step_of_the_same_tables_uses_norms(path: Path, name: str) -> None:
    """One launch is left of two, and the bits are those of a step that computes norms."""
    found = []
    for examines in (False, True):
        weights, optimizer = examined(path)
        assert not examines or bool(optimizer.examine(weights))
        WRITES[name](optimizer, weights[0].requires_grad_(False))
        with mock.patch.object(accelerator, "launch", side_effect=accelerator.launch) as launch:
            optimizer.step()
        assert launch.call_count == (1 if examines and not name else 2)
        found.append([*weights, *(it for each in optimizer.state.values() for it in each.values())])
    torch.testing.assert_close(*found, rtol=0, atol=0)


@pytest.mark.parametrize("sums", [table.SUMS if torch.cuda.is_available() else 32, 8])
def test_all_sums_of_a_long_tensor_are_added(
    path: Path, monkeypatch: pytest.MonkeyPatch, sums: int
) -> None:
    """There are more chunks than sums; on a GPU, chunks of their size."""
    if not torch.cuda.is_available():
        path("table")
        assert kernels.works(accelerator.CPU)  # tried with chunks of another size
        monkeypatch.setattr(table, "CHUNK", 64)
    monkeypatch.setattr(table, "SUMS", sums)
    elements = table.CHUNK * (sums + 6) + 5
    weight = nn.Parameter(torch.linspace(0, 1, elements))
    formula = Formula(weight, {})
    weight.data = weight.data.to(accelerator.current())
    optimizer = LARS([weight], lr=1.0, eta=0.1, weight_decay=0.01)
    formula.group = optimizer.param_groups[0]
    expected, ratios = [], []
    for step in range(2):
        grad = torch.linspace(step, 1, elements)
        weight.grad = grad.to(weight.device)
        expected.append(formula.ratio(grad.double().numpy(), 0.01))
        formula.step(grad.double().numpy(), 1.0)
        optimizer.step()
        ratios.append(optimizer.trust_ratios()[weight])
    assert optimizer._tables
    assert [ratio.item() for ratio in ratios] == pytest.approx(expected, rel=1e-6)  # of both steps
    assert_close(weight.cpu(), formula.w, 1e-6)


def on_two_devices() -> None:
    sim = device.simulate()
    device.use_kernels()
    kernels.DEVICES.add("cpu")
    proof.decide(torch.device("cpu"), {proof.OPTIMIZER: None})
    weights = parameters(torch.float32)
    weights[::2] = [nn.Parameter(weight.detach().to(sim)) for weight in weights[::2]]
    optimizer = LARS(weights, eta=0.02, weight_decay=0.05)
    formulas = [Formula(weight.cpu(), optimizer.param_groups[0]) for weight in weights]
    take_steps(optimizer, weights, formulas, range(2))
    assert {it.device.type for it in optimizer._tables} == {"cpu", sim.type}
    for weight, formula in zip(weights, formulas, strict=True):
        assert_close(weight.cpu(), formula.w, 1e-6)


def test_each_device_has_a_table() -> None:
    pytest.importorskip("triton", reason="Triton, whose interpreter runs the kernels")
    on_forked_workers(on_two_devices, workers=1)


def test_the_limits_match_plain_pytorch() -> None:
    """The rule of LARS-ImageNet-PyTorch: `outside`, ratio up to 50, elements up to 10."""
    start = torch.randn(30, 20, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    weight, plain = nn.Parameter(start.clone()), start.clone()
    optimizer = LARS(
        [weight],
        weight_decay=1e-4,
        eta=1e-3,
        eps=1e-5,
        convention="outside",
        clip_ratio=50.0,
        clip_gradient=10.0,
    )
    velocity = torch.zeros_like(plain)
    for step, size in enumerate((1.0, 30.0, 1e-7, 1.0)):  # elements over 10, then a ratio over 50
        grad = size * torch.randn(
            plain.shape, generator=torch.Generator().manual_seed(step), dtype=torch.float64
        )
        length = plain.norm()
        ratio = (1e-3 * length / (grad.norm() + 1e-4 * length + 1e-5)).clamp(max=50.0)
        velocity = 0.9 * velocity + (grad + 1e-4 * plain).clamp(-10.0, 10.0)
        optimizer.param_groups[0]["lr"] = 0.5
        plain = plain - 0.5 * ratio * velocity
        weight.grad = grad
        optimizer.step()
    torch.testing.assert_close(weight.detach(), plain, rtol=1e-12, atol=1e-12)


@every_path
@every_convention
def test_an_optimizer_rebuilt_from_its_groups_matches_the_formula(
    path: Path, way: str, dtype: torch.dtype, convention: Convention
) -> None:
    """hvd.DistributedOptimizer does this, before the first step."""
    path(way)
    weights = parameters(dtype)
    group = {"params": weights, "momentum": 0.7, "weight_decay": 0.02}
    first = LARS([group], max(RATES), eta=ETA, eps=1e-3, convention=convention)
    rebuilt = type(first)(first.param_groups)
    formulas = [Formula(weight, {**first.param_groups[0]}) for weight in weights]
    take_steps(rebuilt, weights, formulas, range(len(RATES)))
    for weight, formula in zip(weights, formulas, strict=True):
        assert_close(weight, formula.w, TOLERANCE[dtype])


@pytest.mark.parametrize("elements", [1, 511, 512, 513, 2_359_296, 10_000_001])
@pytest.mark.parametrize("kind", ["normal", "equal"])
def test_float32_norms_are_accurate_to_one_in_a_million(elements: int, kind: str) -> None:
    generator = torch.Generator().manual_seed(1)
    tensor = torch.full((elements,), 0.1)
    if kind == "normal":
        tensor.normal_(generator=generator)
    exact = np.linalg.norm(tensor.double().numpy())
    assert fused.norm(tensor) == pytest.approx(exact, rel=1e-6)


class Recorder(TorchDispatchMode):
    """Record the operations that compute; views do not."""

    VIEWS = ("as_strided", "view", "unsqueeze", "detach", "split", "slice", "select", "alias")

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN204
        name = func.overloadpacket.__name__
        if name not in self.VIEWS:
            self.names.append(name)
        if name == "_fused_sgd_" and args[0][0].device.type == "cuda":
            return None  # torch has no fake of it
        return func(*args, **(kwargs or {}))


def operations(optimizer: LARS) -> list[str]:
    """Return the operations of one more step."""
    with Recorder() as recorder:
        optimizer.step()
    names: list[str] = recorder.names
    return names


WAITS = {"_local_scalar_dense", "item", "nonzero", "is_nonzero", "_to_copy", "_unique2"}
"""Operations that make the host wait for the device, or copy between them."""


@every_convention
@pytest.mark.parametrize("adapt", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_number_of_batched_operations_does_not_grow_with_the_tensors(
    path: Path, convention: Convention, adapt: bool, dtype: torch.dtype
) -> None:
    path("batched")

    def ops(number: int) -> list[str]:
        weights = [nn.Parameter(torch.ones(3, 2, dtype=dtype)) for _ in range(number)]
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        group = {"params": weights, "adapt": adapt}
        optimizer = LARS([group], weight_decay=0.1, convention=convention)
        optimizer.step()
        return operations(optimizer)

    few, many = ops(10), [name for name in ops(1000) if name != "empty_like"]
    assert many == [name for name in few if name != "empty_like"]
    assert 0 < len(many) < 30
    assert not WAITS & set(many)


@every_convention
@pytest.mark.parametrize("limits", [{}, {"clip_ratio": 50.0, "clip_gradient": 10.0}])
def test_on_cuda_a_step_waits_for_nothing(convention: Convention, limits: dict[str, Any]) -> None:
    """With tensors that report a GPU; mixing them with CPU tensors is an error."""
    try:
        with FakeTensorMode():
            weights = [nn.Parameter(torch.empty(40, 30, device="cuda")) for _ in range(3)]
            for weight in weights:
                weight.grad = torch.empty_like(weight)
            optimizer = LARS(weights, weight_decay=0.1, convention=convention, **limits)
            with Recorder():
                optimizer.step()
            done = operations(optimizer)
    finally:
        batched._owners.cache_clear()  # it holds a tensor that has no memory
    assert "_foreach_norm" in done
    assert not WAITS & set(done)
