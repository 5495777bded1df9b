"""What LARS keeps beside the weights: masters, momentum, its choices; and what it refuses."""

import sys
from copy import deepcopy

import fake_apex
import pytest
import torch
from lars_formula import Formula, Path, assert_close, choose_path
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from largebatch.errors import MissingPackageError
from largebatch.lars import LARS

__all__ = ["choose_path"]  # the fixture `path`

short_types = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])


@short_types
@pytest.mark.parametrize("way", ["fused", "batched", "apex"])
def test_short_weights_follow_a_float32_master(path: Path, way: str, dtype: torch.dtype) -> None:
    """Steps of 1e-4 of the weight vanish in bfloat16; 50 of them do not."""
    path(way)
    start = torch.randn(8, 4, 3, 3, generator=torch.Generator().manual_seed(0)).to(dtype)
    short = nn.Parameter(start.to(memory_format=torch.channels_last))
    optimizer = LARS([short], lr=0.1, momentum=0.5, weight_decay=1e-4)
    formula = Formula(short, optimizer.param_groups[0])
    for step in range(50):
        grad = torch.randn(short.shape, generator=torch.Generator().manual_seed(step)).to(dtype)
        short.grad = grad
        formula.step(grad.double().numpy(), 0.1)
        optimizer.step()
    master = optimizer.state[short]["master"]
    assert master.dtype == optimizer.state[short]["momentum_buffer"].dtype == torch.float32
    assert master.stride() == short.stride()
    assert_close(master, formula.w, 1e-6)
    assert short.dtype == dtype
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


def test_a_float32_model_takes_no_masters_from_a_short_ones_state() -> None:
    short, full = nn.Parameter(torch.ones(2, 2).bfloat16()), nn.Parameter(torch.ones(2, 2))
    optimizer, restored = LARS([short]), LARS([full])
    short.grad = torch.ones(2, 2).bfloat16()
    optimizer.step()
    restored.load_state_dict(deepcopy(optimizer.state_dict()))
    assert set(restored.state[full]) == {"momentum_buffer"}


def test_momentum_is_laid_out_anew_when_the_weights_are() -> None:
    """A checkpoint from the CPU goes on in channels_last on a GPU."""
    weight = nn.Parameter(torch.randn(4, 3, 2, 2))
    optimizer = LARS([weight], lr=1.0, eta=0.1)
    formula = Formula(weight, optimizer.param_groups[0])
    for step in range(3):
        grad = torch.randn(4, 3, 2, 2)
        formula.step(grad.double().numpy(), 1.0)
        weight.grad = grad
        optimizer.step()
        if step == 0:
            weight.data = weight.data.to(memory_format=torch.channels_last)
    assert_close(weight, formula.w, 1e-6)
    assert optimizer.state[weight]["momentum_buffer"].stride() == weight.stride()


def test_the_kernels_are_chosen_here_and_not_by_a_checkpoint() -> None:
    first, second = LARS([nn.Parameter(torch.ones(1))]), LARS([nn.Parameter(torch.ones(1))])
    saved = first.state_dict()
    saved["param_groups"][0]["kernels"] = "apex"
    second.load_state_dict(saved)
    assert second.param_groups[0]["kernels"] == "torch"
    del saved["param_groups"][0]["kernels"]  # written before there was a choice
    second.load_state_dict(saved)
    assert second.param_groups[0]["kernels"] == "torch"


def test_a_sparse_gradient_is_refused_before_anything_moves() -> None:
    dense, sparse = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2, 2))
    dense.grad, sparse.grad = torch.ones(2, 2), torch.ones(2, 2).to_sparse()
    with pytest.raises(ValueError, match=r"dense gradients, got torch.sparse_coo .* \(2, 2\)"):
        LARS([{"params": [dense]}, {"params": [sparse]}]).step()
    assert dense.equal(torch.ones(2, 2))


def test_complex_parameters_are_refused() -> None:
    with pytest.raises(ValueError, match="real floating-point parameters, got torch.complex64"):
        LARS([nn.Parameter(torch.ones(2, dtype=torch.complex64))])


def test_apex_that_is_not_installed_is_asked_for_with_its_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "amp_C", None)
    with pytest.raises(MissingPackageError, match="APEX_CUDA_EXT=1 pip install"):
        LARS([nn.Parameter(torch.ones(1))], kernels="apex")


def test_apex_refuses_the_cpu_and_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "amp_C", fake_apex)
    with pytest.raises(ValueError, match=r"got torch.float32 on cpu; use kernels='torch'"):
        LARS([nn.Parameter(torch.ones(1))], kernels="apex")
    with FakeTensorMode():
        LARS([nn.Parameter(torch.ones(1, device="cuda"))], kernels="apex")
        double = nn.Parameter(torch.ones(1, device="cuda", dtype=torch.float64))
        with pytest.raises(ValueError, match="got torch.float64 on cuda"):
            LARS([double], kernels="apex")
