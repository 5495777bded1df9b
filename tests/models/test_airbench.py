"""The network of airbench94 and its recipe, beside plain PyTorch."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from real_subsets import SAMPLES, write_subset
from schedules_of import schedule_of
from short_runs import content
from torch import Tensor, nn
from torch.nn import functional as F

from largebatch import load_recipe, run
from largebatch.data.pipeline import open_images
from largebatch.data.types import Batch
from largebatch.distributed.serial import Serial
from largebatch.errors import RecipeError
from largebatch.models import build
from largebatch.models.batchnorm import Spans
from largebatch.models.networks import Airbench, whitening_filters
from largebatch.models.of_recipe import build_model
from largebatch.recipe.arithmetic.plan import make_plan
from largebatch.recipe.recipe import Recipe
from largebatch.runs.state import build_criterion, build_state
from largebatch.training.loop import EagerStep, train

CPU = Serial(torch.device("cpu"))
BATCH, STEPS = 40, 4
SHORT = (
    *SAMPLES,
    *(f"batch={{global_batch: {BATCH}, bn_span: {BATCH}}}", f"duration={{steps: {STEPS}}}"),
    *("precision=fp32", "evaluation={}", "model.arguments.width=16"),
    *("model.early.until={steps: 2}", "execution.checkpoints={every_steps: 2}"),
)


@pytest.fixture(scope="module")
def folder(real_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_subset(real_data / "cifar10", tmp_path_factory.mktemp("cifar10"))


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def short(name: str = "cifar10_airbench_2000", *changes: str) -> Recipe:
    warmup = ("schedule.warmup={steps: 1}",) if name.endswith("nesterov") else ()
    return load_recipe(name, [*SHORT, *warmup, *changes])


def test_whitened_patches_are_uncorrelated_with_mean_squares_near_one() -> None:
    torch.manual_seed(0)
    mixing = torch.randn(3, 3, 3, 3)
    images = F.conv2d(torch.randn(64, 3, 14, 14), mixing)  # neighbouring pixels are correlated
    outputs = F.conv2d(images, whitening_filters(images.split(10)).float())
    columns = outputs.transpose(0, 1).flatten(1)
    torch.testing.assert_close(
        columns @ columns.T / columns.shape[1], torch.eye(12), rtol=0, atol=0.02
    )


def test_the_network_has_airbenchs_weights() -> None:
    """Six convolutions, two biases of every block, the bias of the first layer, the head."""
    model = build("airbench", num_classes=10)
    assert isinstance(model, Airbench)
    trained = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    filters = 9 * (24 * 64 + 64 * 64 + 64 * 256 + 3 * 256 * 256)
    assert trained == filters + 2 * (64 + 256 + 256) + 24 + 2560
    assert model.head.weight.std().item() == pytest.approx(1.0)
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, 10)
    with pytest.raises(RecipeError, match="width must be 1 or more"):
        build("airbench", num_classes=10, arguments={"width": 0})


def logits_of(weights: dict[str, Tensor], images: Tensor, divisor: int) -> Tensor:
    """Return the logits in training mode; the network written out."""

    def norm(name: str, maps: Tensor) -> Tensor:
        variance, mean = torch.var_mean(maps, (0, 2, 3), correction=0, keepdim=True)
        return (maps - mean) / (variance + 1e-12).sqrt() + weights[f"{name}.bias"][:, None, None]

    maps = F.gelu(F.conv2d(images, weights["whiten.weight"], weights["whiten.bias"]))
    for block in ("blocks.0", "blocks.1", "blocks.2"):
        maps = F.max_pool2d(F.conv2d(maps, weights[f"{block}.conv1.weight"], padding=1), 2)
        maps = F.gelu(norm(f"{block}.norm1", maps))
        maps = F.conv2d(maps, weights[f"{block}.conv2.weight"], padding=1)
        maps = F.gelu(norm(f"{block}.norm2", maps))
    pooled = F.max_pool2d(maps, 3).flatten(1)
    return F.linear(pooled, weights["head.weight"]) / divisor


def orthogonal(matrix: Tensor, steps: int) -> Tensor:
    """Newton and Schulz's iteration with the coefficients of Muon's author."""
    a, b, c = 3.4445, -4.7750, 2.0315
    matrix = matrix / matrix.norm()
    for _ in range(steps):
        square = matrix @ matrix.T
        matrix = a * matrix + (b * square + c * square @ square) @ matrix
    return matrix


def begin(recipe: Recipe, folder: Path) -> tuple[Airbench, dict[str, Tensor], list[Batch]]:
    """Return the initial model and its weights, and the batches of all updates, in float64.

    Rounding chooses between equal maxima of a pooling window, which float32 would tell apart.
    """
    pipeline = open_images(recipe, make_plan(recipe, workers=1), CPU, folder=folder)
    model = build_model(recipe, CPU.device)
    assert isinstance(model, Airbench)
    model.init_from_images(batch.images for batch in pipeline.statistics(240))
    model.double()
    weights: dict[str, Tensor] = {
        name: nn.Parameter(weight.clone())
        for name, weight in model.state_dict().items()
        if weight.is_floating_point()
    }
    batches = pipeline.training(range(STEPS), clean=False)
    return model, weights, [Batch(images.double(), labels) for images, labels in batches]


def trained(recipe: Recipe, model: nn.Module, batches: list[Batch]) -> dict[str, Tensor]:
    """Return the weights after the updates of the recipe."""
    plan = make_plan(recipe, workers=1)
    state = build_state(recipe, plan, model, CPU)
    step = EagerStep(
        model,
        state.updater.optimizer,
        build_criterion(recipe.loss),
        state.updater.reducer,
        Spans(model, CPU, sync_workers=1),
        scaler=state.scaler,
        global_batch=BATCH,
    )
    updates = train(
        step,
        iter(batches),
        state.updater.schedule,
        steps=range(len(batches)),
        accumulation=1,
        seed=lambda number: number,
    )
    assert len(list(updates)) == len(batches)
    return model.state_dict()


def test_muon_makes_the_weights_of_airbenchs_loop(folder: Path) -> None:
    """Its learning rates, decays and sum of losses, as in airbench94_muon.py."""
    model, weights, batches = begin(short(), folder)
    filters = [name for name in weights if "conv" in name]
    groups: list[dict[str, Any]] = [
        {"params": [weights["whiten.bias"]], "peak": 0.053, "end": 2},
        {"params": [v for k, v in weights.items() if "norm" in k and k.endswith("bias")]},
        {"params": [weights["head.weight"]], "peak": 0.67},
    ]
    sgd = torch.optim.SGD(groups, momentum=0.85, nesterov=True)
    per_sum = 2000 / BATCH  # airbench's rates are for sums over 2,000 samples
    momenta = {name: torch.zeros_like(weights[name]) for name in filters}
    for step, (images, labels) in enumerate(batches):
        loss = F.cross_entropy(
            logits_of(weights, images, 64), labels, label_smoothing=0.2, reduction="sum"
        )
        for weight in weights.values():
            weight.grad = None
        loss.backward()
        for group in sgd.param_groups:
            peak, end = group.get("peak", 0.053), group.get("end", STEPS)
            group["lr"] = peak * per_sum * max(0.0, 1 - step / end)
            group["weight_decay"] = 2e-6 * 2000 / peak / per_sum
        sgd.step()
        for name in filters:
            weight, grad, momentum = weights[name], weights[name].grad, momenta[name]
            assert grad is not None
            momentum.mul_(0.6).add_(grad)
            direction = (grad + 0.6 * momentum).flatten(1)
            with torch.no_grad():
                weight.mul_(math.sqrt(len(weight)) / weight.norm())
                moved = orthogonal(direction, 3).view_as(weight)
                weight.sub_(0.24 * (1 - step / STEPS) * moved)
    ours = trained(short(), model, batches)
    for name in ("whiten.weight", "whiten.bias", "head.weight", "blocks.1.norm1.bias", *filters):
        torch.testing.assert_close(ours[name], weights[name].detach(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["cifar10_airbench_2000", "cifar10_airbench_2000_nesterov"])
def test_a_resumed_run_has_the_same_weights(name: str, folder: Path, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run(short(name), data=folder, out=whole)
    run(short(name), data=folder, out=parts, max_steps=2)
    before = content(parts)["model"]
    run(short(name), data=folder, out=parts, resume=True)
    expected, ours = content(whole)["model"], content(parts)["model"]
    for key, tensor in expected.items():
        torch.testing.assert_close(ours[key], tensor, rtol=0, atol=0)
    torch.testing.assert_close(ours["whiten.bias"], before["whiten.bias"], rtol=0, atol=0)
    assert not torch.equal(ours["blocks.0.norm1.bias"], before["blocks.0.norm1.bias"])
    assert torch.equal(ours["blocks.0.norm1.weight"], torch.ones(16))


def test_nesterov_makes_the_weights_of_airbenchs_loop(folder: Path) -> None:
    """Its learning rates and decays for a sum over 1,024 samples, as in legacy/airbench94.py."""
    recipe = short("cifar10_airbench_2000_nesterov")
    model, weights, batches = begin(recipe, folder)
    scale = 1024 * (1 + 1 / (1 - 0.85))
    lr, decay = 11.5 / scale * 2000 / BATCH, 0.0153 / scale * 2000
    biases = [v for k, v in weights.items() if k.endswith(("norm1.bias", "norm2.bias"))]
    others = [v for k, v in weights.items() if "conv" in k or "head" in k]
    early = weights["whiten.bias"]
    groups = [(biases, 64.0, STEPS), ([early], 64.0, 2), (others, 1.0, STEPS)]
    sgd = torch.optim.SGD(
        [{"params": some, "factor": factor, "end": end} for some, factor, end in groups],
        momentum=0.85,
        nesterov=True,
    )
    rates = [schedule_of(recipe)(step) / recipe.schedule.peak_lr for step in range(STEPS)]
    for step, (images, labels) in enumerate(batches):
        sgd.zero_grad()
        logits = logits_of(weights, images, 9)
        F.cross_entropy(logits, labels, label_smoothing=0.2, reduction="sum").backward()
        for group in sgd.param_groups:
            peak = lr * group["factor"]
            rate = max(0.0, 1 - step / 2) if group["end"] == 2 else rates[step]
            group["lr"], group["weight_decay"] = peak * rate, decay / peak
        sgd.step()
    ours = trained(recipe, model, batches)
    for name, weight in weights.items():
        if "running" not in name:
            torch.testing.assert_close(ours[name], weight.detach(), rtol=1e-5, atol=1e-6)
