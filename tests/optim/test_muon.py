"""Muon: which weights it takes, and that workers share its work. The formula: the crown test."""

import math
from typing import Any, cast

import accelerator
import pytest
import torch
from on_forked_workers import on_forked_workers
from short_runs import DIGITS
from threads import Thread, on_threads
from torch import Tensor, nn
from torch.optim import SGD

from largebatch import load_recipe
from largebatch.distributed.backend import Group
from largebatch.distributed.serial import Serial
from largebatch.errors import RecipeError
from largebatch.models import build, hidden_matrices
from largebatch.optim.muon import Muon
from largebatch.runs.optimizer_of_recipe import build_optimizer

SHAPES = ((16, 8), (8, 8), (8, 4, 3, 3), (4, 40), (5, 4), (24, 20), (12, 2, 3, 3))
SERIAL = Serial(torch.device("cpu"))


def after_updates(
    workers: Group,
    *,
    shapes: tuple[tuple[int, ...], ...] = SHAPES,
    device: torch.device = SERIAL.device,
) -> list[Tensor]:
    """Return matrices, and a vector of the other optimizer, after three updates."""
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device)

    matrices = [nn.Parameter(draw(*shape)) for shape in shapes]
    vector = nn.Parameter(draw(9))
    others = SGD([{"params": [vector], "lr_ratio": 0.5}], momentum=0.9)
    optimizer = Muon(matrices, others, workers, lr=0.1)
    for _ in range(3):
        for weight in (*matrices, vector):
            weight.grad = draw(*weight.shape)
        optimizer.step()
    return [weight.detach() for weight in (*matrices, vector)]


def on_accelerator(shapes: tuple[tuple[int, ...], ...]) -> tuple[float, int]:
    """Return the largest difference from the CPU, and the launches of three updates."""
    device = accelerator.simulate()
    expected = after_updates(SERIAL, shapes=shapes)
    accelerator.COUNTS.clear()
    found = after_updates(Serial(device), shapes=shapes, device=device)
    launches = accelerator.COUNTS.launches.total()
    pairs = zip(found, expected, strict=True)
    return max(float((a.cpu() - b).abs().max()) for a, b in pairs), launches


def test_matrices_of_equal_shapes_are_orthogonalised_together_on_a_gpu() -> None:
    alike = ((8, 6), (8, 2, 3, 1), (8, 6), (8, 3, 1, 2))
    difference, launches = on_forked_workers(on_accelerator, alike, workers=1)
    other, launches_alone = on_forked_workers(
        on_accelerator, ((8, 6), (8, 5), (7, 6), (6, 8)), workers=1
    )
    assert max(difference, other) < 1e-6
    assert launches < 0.5 * launches_alone


@pytest.mark.parametrize("workers", [2, 3, 10], ids="{} workers".format)
def test_workers_that_share_the_matrices_get_the_bits_of_one(workers: int) -> None:
    """Ten workers are more than there are matrices; each update is one collective."""

    def work(worker: Thread) -> tuple[list[Tensor], int]:
        return after_updates(cast("Group", worker)), worker.calls

    expected = after_updates(SERIAL)
    for weights, calls in on_threads(work, workers=workers):
        assert calls == 3
        assert all(map(torch.equal, weights, expected))


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has Muon from 2.9")
@pytest.mark.parametrize("adjust_lr", ["original", "match_rms_adamw"])
def test_in_bfloat16_it_is_the_muon_of_torch(adjust_lr: Any) -> None:  # noqa: ANN401 -- a literal
    generator = torch.Generator().manual_seed(2)
    ours = nn.Parameter(torch.randn(24, 10, generator=generator))
    theirs = nn.Parameter(ours.detach().clone())
    settings: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.2}
    others = SGD([{"params": [], "lr_ratio": 1.0}])
    own = Muon([ours], others, SERIAL, **settings, ns_dtype="bf16", adjust_lr=adjust_lr)
    library = torch.optim.Muon([theirs], **settings, adjust_lr_fn=adjust_lr)
    for _ in range(4):
        ours.grad = torch.randn(24, 10, generator=generator)
        theirs.grad = ours.grad.clone()
        own.step()
        library.step()
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


def authors_update(grad: Tensor) -> Tensor:
    """Return Keller Jordan's first update without its rate (KellerJordan/Muon, muon.py).

    It has the direction of the gradient. His factor is of the last two sides of the gradient.
    """
    matrix = grad.flatten(1)
    tall = len(matrix) > matrix.shape[1]
    wide: Tensor = (matrix.T if tall else matrix) / matrix.norm()
    for _ in range(5):
        square = wide @ wide.T
        wide = 3.4445 * wide + (-4.7750 * square + 2.0315 * square @ square) @ wide
    factor = math.sqrt(max(1, grad.size(-2) / grad.size(-1)))
    return (wide.T if tall else wide).reshape(grad.shape).mul(factor)


@pytest.mark.parametrize("shape", [(24, 6), (6, 24), (24, 6, 1, 1), (64, 2, 3, 3), (8, 4, 7, 1)])
def test_original_is_as_long_as_its_authors_step(shape: tuple[int, ...]) -> None:
    weight = nn.Parameter(torch.zeros(shape, dtype=torch.float64))
    generator = torch.Generator().manual_seed(5)
    weight.grad = torch.randn(shape, generator=generator, dtype=torch.float64)
    expected = -0.1 * authors_update(weight.grad)
    others = SGD([{"params": [], "lr_ratio": 1.0}])
    Muon([weight], others, SERIAL, lr=0.1, adjust_lr="original").step()
    torch.testing.assert_close(weight.detach(), expected, rtol=1e-4, atol=1e-6)


def left_out(model: nn.Module) -> list[str]:
    """Return the weights of more than one dimension that Muon does not take."""
    taken = set(hidden_matrices(model))
    named = model.named_parameters()
    return [name for name, weight in named if weight.ndim > 1 and weight not in taken]


@pytest.mark.parametrize(
    ("model", "arguments", "expected"),
    [
        ("lenet5", {}, ["features.0.weight", "head.weight"]),
        ("resnet18", {"layers": [1, 1, 1, 1]}, ["conv1.weight", "fc.weight"]),
        (
            "vit_tiny_patch16_224",
            {"depth": 1},
            ["cls_token", "pos_embed", "patch_embed.proj.weight", "head.weight"],
        ),
        (
            "convnext_atto",
            {"depths": [1, 1, 1, 1], "dims": [4, 8, 8, 16]},
            [
                "stem.0.weight",
                *(f"stages.{stage}.blocks.0.conv_dw.weight" for stage in range(4)),
                "head.fc.weight",
            ],
        ),
        (
            "swin_tiny_patch4_window7_224",
            {"depths": [1], "num_heads": [3]},
            [
                "patch_embed.proj.weight",
                "layers.0.blocks.0.attn.relative_position_bias_table",
                "head.fc.weight",
            ],
        ),
    ],
)
def test_it_takes_all_hidden_matrices(
    model: str, arguments: dict[str, Any], expected: list[str]
) -> None:
    """Not the first layer, class tokens, positions, depthwise convolutions or the classifier."""
    assert left_out(build(model, num_classes=10, arguments=arguments)) == expected


def test_every_weight_has_one_optimizer_and_its_own_rate() -> None:
    recipe = load_recipe(
        DIGITS,
        (
            "optimizer={kind: muon, others: {kind: sgd, lr: 0.02, head_lr: 0.1}}",
            "schedule.peak_lr=0.04",
        ),
    )
    model = build("lenet5", num_classes=10)
    groups = build_optimizer(recipe, model, SERIAL).param_groups
    assert [group["lr_ratio"] for group in groups] == [1.0, 0.5, 2.5, 0.5]
    weights = [weight for group in groups for weight in group["params"]]
    assert len(weights) == len(set(weights)) == len(list(model.parameters()))


def test_a_model_without_matrices_is_refused() -> None:
    recipe = load_recipe(DIGITS, ("optimizer={kind: muon}",))
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 10))
    with pytest.raises(RecipeError, match="optimizer.kind: muon: Sequential"):
        build_optimizer(recipe, model, SERIAL)
