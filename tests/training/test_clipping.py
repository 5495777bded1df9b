"""Clipping by the norm, layers with rates of their own, and losses of mixed labels, in one update.

The references are plain PyTorch and timm, one process and the whole batch at once.
"""

import copy
import math
from collections.abc import Iterator

import crown
import pytest
import torch
from layered import BATCH, CLASSES, PEAK, STEPS, data, net, recipe_of
from threads import on_threads
from torch import Tensor, nn
from torch.amp import GradScaler

from largebatch import load_recipe
from largebatch.data.types import Batch
from largebatch.distributed.backend import Group
from largebatch.distributed.reducer import Reducer
from largebatch.distributed.serial import Serial
from largebatch.errors import RecipeError
from largebatch.models.batchnorm import Spans
from largebatch.optim.clipping import clip_factor
from largebatch.optim.rates import set_rates
from largebatch.optional import require_timm
from largebatch.recipe.recipe import Recipe
from largebatch.runs.optimizer_of_recipe import build_optimizer
from largebatch.runs.state import build_criterion
from largebatch.training.averages import EMA
from largebatch.training.loop import EagerStep, train

require_timm()
from timm.loss import BinaryCrossEntropy  # noqa: E402 -- timm needs torchvision's operators
from timm.optim import create_optimizer_v2  # noqa: E402

CPU = Serial(torch.device("cpu"))
LIMIT, DECAY, EMA_DECAY = 0.23, 0.5, 0.9
FIRST_SCALE = 2.0**17


def solve(
    recipe: Recipe, model: nn.Module, group: Group, *, accumulation: int, scaled: bool = False
) -> tuple[dict[str, Tensor], list[float]]:
    """Train with a recipe's optimizer and loss; return averaged weights and all norms."""
    images, labels = data()
    average = EMA(model, decay=EMA_DECAY)
    size = BATCH // group.world_size // accumulation

    def batches() -> Iterator[Batch]:
        for step in range(STEPS):
            for micro in range(accumulation):
                start = step * BATCH + (micro * group.world_size + group.rank) * size
                yield Batch(images[start : start + size], labels[start : start + size])

    norms = []
    with Reducer(model.named_parameters(), group, divisor=1.0) as reducer:
        step = EagerStep(
            model,
            build_optimizer(recipe, model, group),
            build_criterion(recipe.loss),
            reducer,
            Spans(model, CPU),  # which it has none of
            global_batch=BATCH,
            scaler=GradScaler("cpu", init_scale=FIRST_SCALE, enabled=scaled),
            clip_norm=recipe.optimizer.clip_norm,
            follow=average.move,
        )
        updates = train(
            step,
            batches(),
            lambda number: PEAK / (number + 1),
            steps=range(STEPS),
            accumulation=accumulation,
            seed=lambda number: number,
        )
        for number, update in enumerate(updates):
            average.count(number)
            assert update.gradient_norm is not None
            norms.append(float(update.gradient_norm / update.scaled_by))
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    average.store()
    averages = {f"average {name}": value for name, value in model.state_dict().items()}
    return {**weights, **averages}, norms


def plain_pytorch(drop_path: float) -> tuple[dict[str, Tensor], list[float]]:
    """Train with timm's loss, groups of layers and AdamW, and PyTorch's clipping."""
    model = net(drop_path)
    averages = copy.deepcopy(model.state_dict())
    optimizer = create_optimizer_v2(model, "adamw", lr=PEAK, weight_decay=0.1, layer_decay=DECAY)
    criterion = BinaryCrossEntropy(target_threshold=0.2)
    images, labels = data()
    norms = []
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = PEAK / (step + 1) * group["lr_scale"]
        optimizer.zero_grad()
        torch.manual_seed(step)
        part = slice(step * BATCH, (step + 1) * BATCH)
        # timm's loss takes labels that its Mixup has smoothed.
        targets = 0.9 * labels[part] + 0.1 / CLASSES
        criterion(model(images[part]), targets).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), LIMIT).item())
        optimizer.step()
        for name, value in model.state_dict().items():
            share = EMA_DECAY if step else 0.0  # the first model is copied
            averages[name] = share * averages[name] + (1 - share) * value
    found = {f"average {name}": value for name, value in averages.items()}
    return {**model.state_dict(), **found}, norms


ADAMW = f"kind: adamw, weight_decay: 0.1, clip_norm: {LIMIT}, layer_decay: {DECAY}"


@pytest.mark.parametrize("scaled", [False, True], ids=["", "with a loss scale"])
@pytest.mark.parametrize(
    ("workers", "accumulation", "drop_path"), [(1, 1, 0.3), (1, 4, 0.0), (2, 1, 0.0), (2, 2, 0.0)]
)
def test_all_of_it_together_is_plain_pytorchs(
    workers: int, accumulation: int, drop_path: float, scaled: bool
) -> None:
    def work(group: Group) -> tuple[dict[str, Tensor], list[float]]:
        model = models[group.rank]
        return solve(recipe, model, group, accumulation=accumulation, scaled=scaled)

    recipe = recipe_of(ADAMW)
    models = [net(drop_path) for _ in range(workers)]
    found = [work(CPU)] if workers == 1 else on_threads(work, workers=workers)
    wanted, norms = plain_pytorch(drop_path)
    assert min(norms) < LIMIT < max(norms)  # some updates are clipped, others are not
    for ours, lengths in found:
        torch.testing.assert_close(ours, wanted, rtol=1e-10, atol=1e-12)
        assert lengths == pytest.approx(norms, rel=1e-10)


@pytest.mark.parametrize("kind", ["sgd", "lars", *crown.SECTIONS])
def test_every_optimizer_gets_the_gradient_that_pytorch_clips(kind: str) -> None:
    section = crown.SECTIONS.get(kind, f"kind: {kind}").replace(", max_grad_norm: 0.5", "")
    recipe = recipe_of(f"{section}, clip_norm: {LIMIT}, layer_decay: {DECAY}")
    model, reference = net(), net()
    ours, norms = solve(recipe, model, CPU, accumulation=2)
    assert max(norms) > LIMIT
    optimizer = build_optimizer(recipe, reference, CPU)
    criterion = build_criterion(recipe.loss)
    images, labels = data()
    for step in range(STEPS):
        set_rates(optimizer, PEAK / (step + 1), step=step)
        optimizer.zero_grad()
        part = slice(step * BATCH, (step + 1) * BATCH)
        (criterion(reference(images[part]), labels[part]) / BATCH).backward()
        nn.utils.clip_grad_norm_(reference.parameters(), LIMIT)
        optimizer.step()
    wanted = reference.state_dict()
    torch.testing.assert_close({name: ours[name] for name in wanted}, wanted, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("limit", [1e-3, 1.0, 1e3])
def test_the_factor_is_pytorchs(limit: float) -> None:
    gradient = torch.randn(7, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    weight = nn.Parameter(torch.zeros_like(gradient))
    weight.grad = gradient.clone()
    norm = nn.utils.clip_grad_norm_([weight], limit)
    clipped = gradient * clip_factor(norm, limit)
    torch.testing.assert_close(clipped, weight.grad, rtol=1e-12, atol=0)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_gradients_that_are_not_finite_stay_as_they_are(bad: float) -> None:
    """So an update is skipped, or the run stopped, exactly as without clipping."""
    model = nn.Linear(2, 1, bias=False)
    with Reducer(model.named_parameters(), CPU) as reducer:
        step = EagerStep(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            lambda logits, _: (logits * torch.tensor([bad])).sum(),
            reducer,
            Spans(model, CPU),
            global_batch=1,
            skip_nonfinite=True,
            clip_norm=0.1,
        )
        before = model.weight.clone()
        step.accumulate(Batch(torch.ones(1, 2), torch.zeros(1)), first=True, last=True)
        result = step.finish()
        assert not result.finite
        assert result.skipped
        assert model.weight.equal(before)


def test_frozen_weights_do_not_count() -> None:
    def norm(frozen: list[nn.Parameter]) -> float:
        step.accumulate(batch, first=True, last=True)
        step.frozen = frozen
        length = step.finish().gradient_norm
        assert length is not None
        return length.item()

    inner, outer = nn.Linear(3, 2, bias=False), nn.Linear(2, 1, bias=False)
    model = nn.Sequential(inner, outer).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    batch = Batch(torch.ones(1, 3, dtype=torch.float64), torch.zeros(1))
    with Reducer(model.named_parameters(), CPU) as reducer:
        step = EagerStep(
            model,
            optimizer,
            lambda logits, _: logits.sum(),
            reducer,
            Spans(model, CPU),
            global_batch=1,
            clip_norm=1e-3,
        )
        of_outer = (inner.weight @ batch.images[0]).norm().item()
        of_inner = outer.weight.norm().item() * math.sqrt(3)
        assert norm([]) == pytest.approx(math.hypot(of_inner, of_outer), rel=1e-12)
        assert norm(list(inner.parameters())) == pytest.approx(of_outer, rel=1e-12)
        assert outer.weight.grad is not None
        clipped = 1e-3 * of_outer / (of_outer + 1e-6)
        assert outer.weight.grad.norm().item() == pytest.approx(clipped, rel=1e-12)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        (["optimizer={kind: lamb, clip_norm: 1, max_grad_norm: 1}"], "max_grad_norm"),
        (["optimizer.layer_decay=1.5"], "optimizer.layer_decay"),
        (["optimizer.clip_norm=0"], "optimizer.clip_norm"),
        (["loss.target_threshold=0.2"], "loss.target_threshold: .*kind: bce"),
        (["loss={kind: bce, off_target: others}"], "loss.off_target: .*kind: cross_entropy"),
        (["loss={kind: bce, target_threshold: 0.95, label_smoothing: 0.1}"], "target_threshold"),
        (["loss.class_weights=[1, 2]"], "loss.class_weights .* 10 classes, got 2"),
        (["loss.class_weights=[1, 0]"], "loss.class_weights"),
        (
            ["optimizer.clip_norm=1", "protocol={kind: hardsync, learners: 2}"],
            "optimizer.clip_norm",
        ),
    ],
)
def test_what_has_no_meaning_is_refused(changes: list[str], key: str) -> None:
    with pytest.raises(RecipeError, match=key):
        load_recipe(crown.DIGITS, changes)
