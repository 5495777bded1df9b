"""Shampoo beside the library's own, which the crown test compares it with."""

import copy

import pytest
import torch
from torch import Tensor, nn

from largebatch.optim.shampoo import Shampoo


def a_model() -> nn.Module:
    """Return one with a tensor of blocks of one shape, of several, and one too small for any."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 12), nn.Linear(12, 2)).double()


def an_optimizer(model: nn.Module, *, block_size: int = 16) -> Shampoo:
    return Shampoo(
        model.parameters(),
        lr=1e-3,
        betas=(0.9, 0.7),
        block_size=block_size,
        start_preconditioning_step=2,
        preconditioning_compute_steps=1,
    )


def train(model: nn.Module, optimizer: Shampoo, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        images = torch.randn(24, 16, dtype=torch.float64, generator=generator)
        optimizer.zero_grad()
        model(images).square().sum().backward()
        optimizer.step()


def vector(model: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def test_workers_with_different_generators_get_the_same_bits() -> None:
    """The library computes the largest of several close eigenvalues from a random vector."""
    torch.manual_seed(9)
    grads = torch.linalg.qr(torch.randn(3, 16, 16, dtype=torch.float64)).Q
    grads *= torch.linspace(1, 1.01, 16, dtype=torch.float64)
    found = []
    for seed in range(4):
        weight = nn.Parameter(torch.zeros(16, 16, dtype=torch.float64))
        optimizer = Shampoo(
            [weight],
            block_size=16,
            matrix_eps=1e-2,
            start_preconditioning_step=1,
            preconditioning_compute_steps=1,
        )
        torch.manual_seed(seed)
        for grad in grads:
            weight.grad = grad.clone()
            optimizer.step()
        found.append(weight.detach())
    assert all(torch.equal(found[0], other) for other in found)


def test_a_run_continues_from_its_saved_state_bit_by_bit() -> None:
    straight = a_model()
    train(straight, an_optimizer(straight), range(7))
    begun = a_model()
    first = an_optimizer(begun)
    train(begun, first, range(4))
    saved = copy.deepcopy(first.state_dict())
    resumed = a_model()
    resumed.load_state_dict(begun.state_dict())
    second = an_optimizer(resumed)
    second.load_state_dict(saved)
    train(resumed, second, range(4, 7))
    assert torch.equal(vector(resumed), vector(straight))


def test_a_state_of_other_blocks_is_refused() -> None:
    model = a_model()
    optimizer = an_optimizer(model)
    train(model, optimizer, range(3))
    other = an_optimizer(model, block_size=8)
    with pytest.raises(ValueError, match="Shampoo"):
        other.load_state_dict(optimizer.state_dict())
