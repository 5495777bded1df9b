import math

import pytest
from short_runs import DIGITS

from largebatch import load_recipe
from largebatch.lab.measure.estimate import Estimate, estimate
from largebatch.models import build
from largebatch.recipe.arithmetic.plan import make_plan

SMALL = ["model={name: lenet5}", "batch.bn_span=null", "polish=null", "data.image_size=28"]


def measured(*changes: str) -> Estimate:
    recipe = load_recipe(DIGITS, [*SMALL, *changes])
    return estimate(recipe, make_plan(recipe, workers=1))


def test_memory_is_that_of_the_weights_and_of_a_device_batch() -> None:
    """Twice as many samples keep twice as much for backward, beside as many weights."""
    model = build("lenet5", num_classes=10, arguments={}, head_std=None)
    weights = 4 * sum(weight.numel() for weight in model.parameters())
    one, two = (measured(f"execution.device_batch={size}") for size in (24, 48))
    kept = [found.memory_bytes - 3 * weights for found in (one, two)]
    assert kept[1] == pytest.approx(2 * kept[0], abs=100)  # and a few numbers of the loss
    assert kept[0] > 24 * 4 * 3 * 28 * 28  # the images are part of it
    assert 2 <= one.samples <= 24
    assert (one.device, one.precision) == ("cpu", "fp32")


@pytest.fixture
def as_many_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine that is slow for a moment an estimate would take fewer of them."""
    monkeypatch.setattr("largebatch.lab.measure.estimate._ENOUGH_SECONDS", math.inf)


@pytest.mark.usefixtures("as_many_samples")
def test_an_ema_is_one_more_copy_of_the_model() -> None:
    model = build("cifar_resnet8", num_classes=10, arguments={}, head_std=None)
    size = sum(tensor.nbytes for tensor in model.state_dict().values())
    changes = ["model={name: cifar_resnet8}", "batch.bn_span=48", "data.image_size=16"]
    plain, ema = (
        measured(*changes, f"polish={{{words}}}") for words in ("ema: 0.9", "clean: {steps: 1}")
    )
    assert plain.memory_bytes == ema.memory_bytes + size


@pytest.mark.usefixtures("as_many_samples")
@pytest.mark.parametrize(
    ("changes", "copies"),
    [
        (["optimizer.kind=lamb"], 2),
        (["optimizer.kind=adamw"], 2),
        (["optimizer={kind: muon, others: {kind: sgd, lr: 0.1}}"], 1),
        (["optimizer.kind=shampoo"], 6),
        (["optimizer.kind=schedule-free", "schedule.decay.kind=constant"], 1),
    ],
)
def test_what_an_optimizer_keeps_is_counted(changes: list[str], copies: int) -> None:
    """Two moments; two momenta and about four matrices a block; the other set of weights.

    AdamW counts its updates for each tensor, in 4 bytes.
    """
    model = build("lenet5", num_classes=10, arguments={}, head_std=None)
    weights = 4 * sum(weight.numel() for weight in model.parameters())
    plain = measured().memory_bytes - weights  # without its momentum
    found = measured(*changes).memory_bytes - plain
    assert found == pytest.approx(copies * weights, rel=0.1 if copies == 6 else 1e-4)


@pytest.mark.parametrize(("workers", "span", "size"), [(48, 48, 1), (1, 3, 48)])
def test_no_span_of_one_sample_is_measured(
    monkeypatch: pytest.MonkeyPatch, workers: int, span: int, size: int
) -> None:
    """Several workers may hold a sample each of a span; the last maps here are one pixel."""
    monkeypatch.setattr("largebatch.lab.measure.estimate._ENOUGH_SECONDS", 1e9)
    changes = ["model={name: resnet10t, arguments: {stem_width: 16}}", "data.image_size=16"]
    changes += ["batch.global_batch=48", f"batch.bn_span={span}", "polish=null"]
    recipe = load_recipe(DIGITS, [*changes, f"execution.device_batch={size}"])
    assert estimate(recipe, make_plan(recipe, workers=workers)).samples == max(2, size)
