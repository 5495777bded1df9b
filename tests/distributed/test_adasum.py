"""Adasum against its formula in NumPy, and one result on any number of workers."""

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import crown
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from crown import GLOBAL_BATCH, MOMENTUM, NETS, SMOOTHING, SPAN, STEPS, WEIGHT_DECAY, State
from on_forked_workers import on_forked_workers
from short_runs import a_recipe, weights
from torch import nn

from largebatch import run
from largebatch.distributed.adasum import Adasum, adasum
from largebatch.distributed.connection import connect
from largebatch.distributed.serial import Serial
from largebatch.errors import PlanError, RecipeError
from largebatch.recipe.arithmetic.plan import make_plan

Array = np.ndarray[Any, np.dtype[np.float64]]

DIVIDED = {1: (4, 8), 2: (2, 4), 4: (1, 2)}
"""Numbers of micro-batches by workers."""


def by_formula(gradients: Sequence[Array]) -> Array:
    """Combine a power of two of gradients of one tensor, halves first."""
    if len(gradients) == 1:
        return gradients[0]
    middle = len(gradients) // 2
    a, b = by_formula(gradients[:middle]), by_formula(gradients[middle:])
    dot = float(np.vdot(a, b))
    return (1 - dot / (2 * np.vdot(a, a))) * a + (1 - dot / (2 * np.vdot(b, b))) * b


def by_hand(net: str, *, parts: int) -> State:
    """Plain PyTorch, one process: SGD on the combination of the parts' mean gradients."""
    model = crown.net(net)
    images, labels = crown.data()
    named = dict(model.named_parameters())
    velocity = {name: torch.zeros_like(weight) for name, weight in named.items()}
    size = GLOBAL_BATCH // parts
    for step in range(STEPS):
        before = {name: value.clone() for name, value in model.named_buffers()}
        gradients: dict[str, list[Array]] = {name: [] for name in named}
        after = []
        for part in range(parts):
            model.zero_grad()
            first = step * GLOBAL_BATCH + part * size
            for start in range(first, first + size, SPAN):
                for name, buffer in model.named_buffers():
                    buffer.copy_(before[name])
                logits, chosen = model(images[start : start + SPAN]), labels[start : start + SPAN]
                loss = F.cross_entropy(logits, chosen, label_smoothing=SMOOTHING, reduction="sum")
                (loss / size).backward()
                after.append({name: value.clone() for name, value in model.named_buffers()})
            for name, weight in named.items():
                assert weight.grad is not None
                gradients[name].append(weight.grad.numpy().copy())
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                buffer.copy_(torch.stack([found[name] for found in after]).double().mean(0))
            for name, weight in named.items():
                decay = WEIGHT_DECAY if weight.ndim > 1 else 0.0
                step_by = torch.from_numpy(by_formula(gradients[name])) + decay * weight
                velocity[name] = MOMENTUM * velocity[name] + step_by
                weight.sub_(crown.rate(step) * velocity[name])
    return model.state_dict()


def assert_equal(ours: State, expected: State) -> None:
    torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-10, check_dtype=True)


def test_two_gradients_combine_by_their_agreement() -> None:
    generator = torch.Generator().manual_seed(0)
    one, other = torch.randn(2, 5, 7, dtype=torch.float64, generator=generator)
    expected = by_formula([one.numpy(), other.numpy()])
    np.testing.assert_allclose(adasum(one, other).numpy(), expected, rtol=1e-13)
    torch.testing.assert_close(adasum(one, one), one)
    torch.testing.assert_close(adasum(one, 3 * one), 2 * one)
    along, across = torch.tensor([2.0, 0.0]), torch.tensor([0.0, -3.0])
    assert adasum(along, across).equal(along + across)
    nothing = torch.zeros_like(one)
    assert adasum(one, nothing).equal(one)
    assert adasum(nothing, one).equal(one)
    assert adasum(nothing, nothing).equal(nothing)
    assert adasum(one.float(), other.float()).dtype == torch.float32
    assert not adasum(one, one.index_fill(0, torch.tensor([2]), torch.inf)).isfinite().all()


@pytest.mark.parametrize("parts", [2, 4])
@pytest.mark.parametrize("net", NETS)
def test_one_worker_computes_the_parts_one_by_one(net: str, parts: int) -> None:
    expected = by_hand(net, parts=parts)
    for accumulation in DIVIDED[1]:
        backend = Serial(torch.device("cpu"))
        ours = crown.solve(backend, net, "sgd", accumulation=accumulation, parts=parts)
        assert_equal(ours.state_dict(), expected)


def solve_all(path: Path) -> None:
    """Solve every case on these workers; worker 0 writes the results."""
    backend = connect("torch")
    results = {}
    for parts, accumulation in product((2, 4), DIVIDED[backend.world_size]):
        model = crown.solve(backend, "batchnorm", "sgd", accumulation=accumulation, parts=parts)
        results[parts, accumulation] = model.state_dict()
    if backend.rank == 0:
        torch.save(results, path)
    backend.close()


def test_workers_with_one_or_half_a_part_agree(tmp_path: Path) -> None:
    on_forked_workers(solve_all, tmp_path / "solved.pt", workers=4)
    solved: dict[tuple[int, int], State] = torch.load(tmp_path / "solved.pt")
    assert len(solved) == 4
    for (parts, _), ours in solved.items():
        assert_equal(ours, by_hand("batchnorm", parts=parts))


def test_a_missing_gradient_of_a_part_is_zero() -> None:
    torch.manual_seed(0)
    head = nn.Linear(3, 1)
    model = nn.Sequential(nn.Linear(2, 3), head).double()
    images = torch.randn(2, 4, 2, dtype=torch.float64)
    backend = Serial(torch.device("cpu"))
    with Adasum(model, backend, parts=2, accumulation=2) as reducer:
        reducer.zero()
        model(images[0])
        head.bias.sum().backward()
        assert next(model.parameters()).grad is None
        reducer.arm()
        model(images[1]).sum().backward()
        second = next(model.parameters()).grad
        assert second is not None
        expected = 2 * second  # of the parts' means, which are twice as large
        reducer.wait()
        torch.testing.assert_close(next(model.parameters()).grad, expected)
        assert bool(reducer.finite())


def test_a_step_with_a_wrong_number_of_passes_is_refused() -> None:
    model = nn.Linear(2, 1)
    with Adasum(model, Serial(torch.device("cpu")), parts=2, accumulation=4) as reducer:
        reducer.zero()
        reducer.arm()
        model(torch.ones(1, 2)).sum().backward()
        with pytest.raises(ValueError, match="1 forward passes in a step, expected 4"):
            reducer.wait()
    with pytest.raises(ValueError, match="3 parts, a power of two, cannot be divided over 1"):
        Adasum(model, Serial(torch.device("cpu")), parts=3, accumulation=3)
    assert not model._forward_pre_hooks


ADASUM = (
    *("reduction={kind: adasum, parts: 4}", "batch.bn_span=12", "model.arguments.drop_rate=0"),
    *("duration={steps: 4}", "schedule.warmup={steps: 1}"),
)


def train(folder: Path) -> None:
    run(a_recipe("statistics: {samples: 96}", changes=ADASUM), out=folder)


def test_a_run_of_a_recipe_is_the_same_on_one_worker_and_on_two(tmp_path: Path) -> None:
    train(tmp_path / "1")
    on_forked_workers(train, tmp_path / "2", workers=2)
    one, two = weights(tmp_path / "1"), weights(tmp_path / "2")
    torch.testing.assert_close(two, one, rtol=1e-3, atol=1e-4)
    run(a_recipe("statistics: {samples: 96}", changes=ADASUM[1:]), out=tmp_path / "sum")
    summed = weights(tmp_path / "sum")["conv1.weight"]
    assert not torch.allclose(summed, one["conv1.weight"], rtol=1e-2)


@pytest.mark.parametrize(
    ("reduction", "message"),
    [
        ("{kind: adasum}", "kind: adasum and parts belong together"),
        ("{kind: adasum, parts: 6}", r"parts \(6\) must be a power of two"),
        ("{kind: adasum, parts: 4, dtype: bf16}", "kind: adasum sends in fp32: leave dtype: bf16"),
        ("{kind: adasum, parts: 4}", r"reduction.parts \(4\) does not divide batch.global_batch"),
    ],
)
def test_an_invalid_number_of_parts_is_refused(reduction: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        a_recipe("statistics: {samples: 96}", changes=(f"reduction={reduction}",))


def test_an_indivisible_number_of_workers_is_refused() -> None:
    recipe = a_recipe("statistics: {samples: 96}", changes=ADASUM)
    with pytest.raises(
        PlanError, match=r"over 3 workers; possible numbers of workers: 1, 2, 4, 8$"
    ):
        make_plan(recipe, workers=3)
    assert make_plan(recipe, workers=8).device_batch == 12
    assert make_plan(recipe, workers=1).device_batch == 24
    assert [make_plan(recipe, workers=2).positions(1, m, 1).start for m in (0, 1)] == [144, 168]
