"""The state of LARS: masters, momentum and settings; and the states that it refuses."""

import math
import sys
from collections.abc import Callable, Iterable
from copy import deepcopy
from typing import Any

import pytest
import torch
from lars_formula import Formula, Path, assert_close, choose_path
from torch import Tensor, nn
from torch.optim import Optimizer

from largebatch.errors import MissingPackageError
from largebatch.optim.lars import LARS

__all__ = ["choose_path"]  # the fixture `path`

Change = Callable[[dict[Any, Any]], object]

short_types = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])


@short_types
@pytest.mark.parametrize("way", ["fused", "batched", "apex", "table"])
def test_short_weights_follow_a_float32_master(path: Path, way: str, dtype: torch.dtype) -> None:
    """Steps of 1e-4 of the weight vanish in bfloat16; many of them do not."""
    path(way)
    start = torch.randn(8, 4, 3, 3, generator=torch.Generator().manual_seed(0)).to(dtype)
    short = nn.Parameter(start.to(memory_format=torch.channels_last))
    optimizer = LARS([short], lr=0.1, momentum=0.5, weight_decay=1e-4)
    formula = Formula(short, optimizer.param_groups[0])
    for step in range(10 if way == "table" else 50):
        grad = torch.randn(short.shape, generator=torch.Generator().manual_seed(step)).to(dtype)
        short.grad = grad
        formula.step(grad.double().numpy(), 0.1)
        optimizer.step()
    master = optimizer.state[short]["master"]
    assert master.dtype == optimizer.state[short]["momentum_buffer"].dtype == torch.float32
    assert master.stride() == short.stride()
    assert_close(master, formula.w, 1e-6)
    assert short.dtype == dtype
    if way == "table":  # Triton's interpreter does not round bfloat16 to nearest, a GPU does
        torch.testing.assert_close(short.float(), master, rtol=torch.finfo(dtype).eps, atol=1e-6)
    else:
        assert short.equal(master.to(dtype))
    assert not short.equal(start)


@short_types
def test_a_state_dict_keeps_every_digit_of_the_masters(dtype: torch.dtype) -> None:
    weight = nn.Parameter(torch.randn(5, 5).to(dtype))
    optimizer = LARS([weight], lr=0.01, eta=0.1)
    for _ in range(3):
        weight.grad = torch.randn(5, 5).to(dtype)
        optimizer.step()
    copy = nn.Parameter(weight.detach().clone())
    restored = LARS([copy])
    restored.load_state_dict(deepcopy(optimizer.state_dict()))
    for key in ("master", "momentum_buffer"):
        ours, theirs = restored.state[copy][key], optimizer.state[weight][key]
        assert ours.dtype == torch.float32
        assert ours.equal(theirs)
        assert not ours.to(dtype).float().equal(ours), "nothing that rounding would have changed"
    for parameter, one in ((weight, optimizer), (copy, restored)):
        parameter.grad = torch.full((5, 5), 0.3, dtype=dtype)
        one.step()
    assert restored.state[copy]["master"].equal(optimizer.state[weight]["master"])


def _replace_buffers(optimizer: LARS, kind: torch.dtype) -> None:
    for each in optimizer.state.values():
        each["momentum_buffer"] = each["momentum_buffer"].to(kind, copy=True)


def _move_a_parameter(optimizer: LARS) -> None:
    first, second = (group["params"] for group in optimizer.param_groups)
    second.insert(0, first.pop())


def _wrap_weights(optimizer: LARS, weights: list[nn.Parameter]) -> None:
    """Replace the parameters of the first group by others of the same memory."""
    weights[:2] = [nn.Parameter(weight.data) for weight in weights[:2]]
    optimizer.param_groups[0]["params"] = weights[:2]
    _set_gradients(weights[:2], torch.empty(5, 3))


def _set_gradients(weights: list[nn.Parameter], grad: Tensor | None) -> None:
    for weight in weights:
        weight.grad = None if grad is None else grad.clone()


def _set_data(tensors: Iterable[Any], model: Tensor | None = None) -> None:
    for tensor in tensors:
        tensor.data = (tensor if model is None else model).clone()


@pytest.mark.parametrize(
    "change",
    [
        lambda optimizer, _: _replace_buffers(optimizer, torch.float32),
        lambda optimizer, _: _replace_buffers(optimizer, torch.float64),
        lambda optimizer, _: _move_a_parameter(optimizer),
        lambda _, weights: _set_gradients(weights[2:], None),
        lambda optimizer, _: optimizer.state.clear(),
        lambda optimizer, _: optimizer.load_state_dict(deepcopy(optimizer.state_dict())),
        _wrap_weights,
        lambda _, weights: _set_data(weights),
        lambda _, weights: _set_data([it.grad for it in weights], torch.empty(3, 5).t()),
    ],
)
def test_a_table_follows_changes_of_groups_and_state(
    path: Path, change: Callable[[LARS, list[nn.Parameter]], None]
) -> None:
    """A table has addresses: one that missed a change would write to memory that was freed."""
    path("table")
    weights = [nn.Parameter(torch.randn(5, 3)) for _ in range(3)]
    groups = [{"params": weights[:2], "lr": 1.0}, {"params": weights[2:], "lr": 10.0}]
    optimizer = LARS(groups, eta=0.1, weight_decay=0.01)
    formulas = [Formula(weight, optimizer.param_groups[0]) for weight in weights]
    for weight in weights:
        weight.grad = torch.empty_like(weight)
    for step in range(4):
        if step == 2:
            change(optimizer, weights)
            for weight, formula in zip(weights, formulas, strict=True):
                formula.b *= weight in optimizer.state
        rates = {id(it): group["lr"] for group in optimizer.param_groups for it in group["params"]}
        for weight, formula in zip(weights, formulas, strict=True):
            if weight.grad is not None:
                weight.grad.copy_(torch.randn(5, 3))
                formula.step(weight.grad.double().numpy(), rates[id(weight)])
        optimizer.step()
    for weight, formula in zip(weights, formulas, strict=True):
        assert_close(weight, formula.w, 1e-6)


def test_a_table_reads_gradients_of_1_x_1_convolutions_in_place(path: Path) -> None:
    """Strides of dimensions of size 1 differ between weights and gradients in channels_last."""
    path("table")
    weight = nn.Parameter(torch.randn(6, 5, 1, 1).to(memory_format=torch.channels_last))
    optimizer = LARS([weight], lr=1.0, eta=0.1)
    formula = Formula(weight, optimizer.param_groups[0])
    for _ in range(3):
        weight.grad = torch.randn(6, 5, 1, 1)
        assert weight.grad.stride() != weight.stride()
        formula.step(weight.grad.double().numpy(), 1.0)
        optimizer.step()
        assert optimizer._tables[0].is_lasting
    assert_close(weight, formula.w, 1e-6)


def stepped(make: Callable[[list[nn.Parameter]], Optimizer]) -> Optimizer:
    """Return an optimizer of a 2 x 3 weight and a bias after one step."""
    weights = [nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.ones(3))]
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer = make(weights)
    optimizer.step()
    return optimizer


def without(*keys: object) -> Change:
    """Return a function that removes one key from a state."""

    def take(state: dict[Any, Any]) -> object:
        for key in keys[:-1]:
            state = state[key]
        return state.pop(keys[-1])

    return take


def with_value(value: object, *keys: object) -> Change:
    """Return a function that sets a value in a state."""

    def put(state: dict[Any, Any]) -> None:
        for key in keys[:-1]:
            state = state[key]
        state[keys[-1]] = value

    return put


@pytest.mark.parametrize(
    ("make", "damage", "message"),
    [
        pytest.param(
            lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9),
            lambda _: None,
            "group 0.*convention",
            id="of SGD",
        ),
        pytest.param(LARS, without("state"), "no state", id="no state"),
        pytest.param(
            LARS, without("state", 1, "momentum_buffer"), "parameter 1 ", id="no momentum"
        ),
        pytest.param(
            LARS, with_value(torch.ones(3), "state", 0, "momentum_buffer"), r"\(2, 3\)", id="shape"
        ),
        pytest.param(
            LARS, with_value("nesterov", "param_groups", 0, "convention"), "convention", id="word"
        ),
        pytest.param(LARS, with_value(math.nan, "param_groups", 0, "lr"), "^lr ", id="nan"),
    ],
)
def test_an_incomplete_state_is_refused_without_changes(
    make: Callable[[list[nn.Parameter]], Optimizer],
    damage: Change,
    message: str,
) -> None:
    saved, optimizer = stepped(make).state_dict(), stepped(LARS)
    damage(saved)
    before = deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(saved)
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    for number in (0, 1):
        assert after["state"][number]["momentum_buffer"].equal(
            before["state"][number]["momentum_buffer"]
        )
    assert not optimizer._optimizer_load_state_dict_pre_hooks


def test_a_sparse_gradient_is_refused_before_any_update() -> None:
    dense, sparse = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2, 2))
    dense.grad, sparse.grad = torch.ones(2, 2), torch.ones(2, 2).to_sparse()
    with pytest.raises(ValueError, match=r"torch.sparse_coo .*\(2, 2\)"):
        LARS([{"params": [dense]}, {"params": [sparse]}]).step()
    assert dense.equal(torch.ones(2, 2))


def test_without_apex_the_error_names_the_install_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "amp_C", None)
    with pytest.raises(MissingPackageError, match="APEX_CUDA_EXT=1 pip install"):
        LARS([nn.Parameter(torch.ones(1))], kernels="apex")
