"""The losses of a batch beside PyTorch's and timm's, of single labels and of mixed ones."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from largebatch import load_recipe
from largebatch.data.decoders.synthetic import synthetic_index
from largebatch.errors import RecipeError
from largebatch.optional import require_timm
from largebatch.runs.state import class_weights
from largebatch.training.losses import (
    Criterion,
    binary_cross_entropy,
    cross_entropy,
    scaled_weights,
)

require_timm()
from timm.data.mixup import mixup_target  # noqa: E402 -- timm needs torchvision's operators
from timm.loss import BinaryCrossEntropy  # noqa: E402

DIGITS = Path(__file__).parents[2] / "recipes" / "quickstart" / "digits_96.yaml"
K, MASS = 5, 0.1
N = 6
SHARE = 0.7
LABELS = torch.tensor([0, 1, 2, 3, 4, 0])
PARTNERS = torch.tensor([3, 1, 0, 2, 2, 4])
LOGITS = torch.randn(N, K, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
WEIGHTS = torch.tensor([0.5, 2.0, 1.0, 0.25, 3.0], dtype=torch.float64)
CRITERIA = {
    "cross-entropy": cross_entropy(smoothing=MASS, off_target="all"),
    "others": cross_entropy(smoothing=MASS, off_target="others"),
    "weighted": cross_entropy(smoothing=MASS, off_target="others", weights=WEIGHTS),
    "bce": binary_cross_entropy(smoothing=MASS),
    "bce weighted": binary_cross_entropy(smoothing=MASS, classes="sum", weights=WEIGHTS),
}


def close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=0)


def mixed(labels: Tensor = LABELS, partners: Tensor = PARTNERS) -> Tensor:
    """Return the shares of the classes, N x K."""
    own, other = F.one_hot(labels, K).double(), F.one_hot(partners, K).double()
    return SHARE * own + (1 - SHARE) * other


@pytest.mark.parametrize(
    ("off_target", "target", "other"),
    [
        pytest.param("all", 1 - MASS + MASS / K, MASS / K, id="PyTorch and TensorFlow"),
        pytest.param("others", 1 - MASS, MASS / (K - 1), id="MXNet"),
    ],
)
def test_the_mass_goes_where_the_convention_says(
    off_target: Literal["all", "others"], target: float, other: float
) -> None:
    logits = torch.randn(6, K, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([0, 1, 2, 3, 4, 0])
    wanted = torch.full((6, K), other, dtype=torch.float64)
    wanted[torch.arange(6), labels] = target
    expected = -(wanted * logits.log_softmax(1)).sum()
    loss = cross_entropy(smoothing=MASS, off_target=off_target)(logits, labels)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("smoothing", [-0.1, 1.0, 1.5, math.nan, math.inf])
def test_smoothing_that_is_no_part_of_the_mass_is_refused(smoothing: float) -> None:
    with pytest.raises(ValueError, match="smoothing"):
        cross_entropy(smoothing=smoothing, off_target="all")


def test_an_unknown_convention_is_refused() -> None:
    with pytest.raises(ValueError, match="off_target.*'none'"):
        cross_entropy(smoothing=0.1, off_target="none")  # type: ignore[arg-type]  # on purpose


@pytest.mark.parametrize("off_target", ["all", "others"])
@pytest.mark.parametrize("classes", [2, 3, 10, 1000])
def test_smoothing_may_make_all_classes_alike_and_no_more(
    off_target: Literal["all", "others"], classes: int
) -> None:
    """As in a recipe."""
    logits, labels = torch.zeros(2, classes), torch.zeros(2, dtype=torch.int64)
    most = 1 - 1 / classes
    loss = cross_entropy(smoothing=most, off_target=off_target)(logits, labels)
    assert loss.item() == pytest.approx(2 * math.log(classes))
    criterion = cross_entropy(smoothing=math.nextafter(most, 1), off_target=off_target)
    with pytest.raises(ValueError, match=f" {classes} classes"):
        criterion(logits, labels)


@pytest.mark.parametrize("off_target", ["all", "others"])
def test_one_class_is_not_smoothed(off_target: Literal["all", "others"]) -> None:
    logits, labels = torch.ones(2, 1), torch.zeros(2, dtype=torch.int64)
    assert cross_entropy(smoothing=0.0, off_target=off_target)(logits, labels).item() == 0


@pytest.mark.parametrize("criterion", CRITERIA.values(), ids=CRITERIA)
def test_the_loss_of_mixed_images_is_that_of_both_labels_by_their_shares(
    criterion: Criterion,
) -> None:
    wanted = SHARE * criterion(LOGITS, LABELS) + (1 - SHARE) * criterion(LOGITS, PARTNERS)
    close(criterion(LOGITS, mixed()), wanted)
    close(criterion(LOGITS, F.one_hot(LABELS, K).float()), criterion(LOGITS, LABELS))


def test_a_weight_is_a_factor_of_the_loss_of_an_image() -> None:
    """Also of its smoothed part, which PyTorch's weights treat class by class."""
    for name, plain in {"weighted": "others", "bce weighted": None}.items():
        single = CRITERIA[plain] if plain else binary_cross_entropy(smoothing=MASS, classes="sum")
        rows = zip(LOGITS, LABELS, strict=True)
        wanted = sum(WEIGHTS[label] * single(row[None], label[None]) for row, label in rows)
        close(CRITERIA[name](LOGITS, LABELS), torch.as_tensor(wanted))
    without = cross_entropy(smoothing=0.0, off_target="all", weights=WEIGHTS)
    close(without(LOGITS, LABELS), F.cross_entropy(LOGITS, LABELS, WEIGHTS, reduction="sum"))


@pytest.mark.parametrize("threshold", [None, 0.2, 0.5])
@pytest.mark.parametrize("smoothing", [0.0, MASS])
@pytest.mark.parametrize("is_sum", [False, True])
def test_binary_cross_entropy_is_timms(
    threshold: float | None, smoothing: float, is_sum: bool
) -> None:
    theirs = BinaryCrossEntropy(smoothing, threshold, sum_classes=is_sum)
    ours = binary_cross_entropy(
        smoothing=smoothing, target_threshold=threshold, classes="sum" if is_sum else "mean"
    )
    close(ours(LOGITS, LABELS) / N, theirs(LOGITS, LABELS))
    # timm mixes an image with the one at the mirrored place, and smooths both labels then.
    targets = mixup_target(LABELS, K, SHARE, smoothing).double()
    loss = ours(LOGITS, mixed(partners=LABELS.flip(0))) / N
    torch.testing.assert_close(loss, theirs(LOGITS, targets), rtol=1e-7, atol=0)  # in float32


def test_a_threshold_takes_the_weight_of_both_labels() -> None:
    weighted = binary_cross_entropy(smoothing=0.0, target_threshold=0.2, weights=WEIGHTS)
    targets = (mixed() > 0.2).double()
    losses = F.binary_cross_entropy_with_logits(LOGITS, targets, reduction="none").mean(1)
    factors = SHARE * WEIGHTS[LABELS] + (1 - SHARE) * WEIGHTS[PARTNERS]
    close(weighted(LOGITS, mixed()), losses @ factors)


@pytest.mark.parametrize("given", ["balanced", "[3, 1, 1, 6]"])
def test_weights_count_the_images_that_are_trained_on(given: str) -> None:
    changes = ["data.source=synthetic", "data.classes=4", f"loss.class_weights={given}"]
    recipe = load_recipe(DIGITS, changes)
    images = synthetic_index(40, 4, 8)
    trained = np.array([0, 4, 8, 12, 16, 20, 1, 5, 2, 3])  # six of class 0, two of class 1
    weights = class_weights(recipe, replace(images, trained=trained), torch.device("cpu"))
    assert weights is not None
    counts = np.array([6, 2, 1, 1])
    wanted = 1 / counts if given == "balanced" else np.array([3, 1, 1, 6])
    np.testing.assert_allclose(weights, wanted * 10 / (wanted * counts).sum(), rtol=1e-12)
    assert class_weights(load_recipe(DIGITS), images, torch.device("cpu")) is None


def test_a_class_without_training_images_cannot_be_balanced() -> None:
    recipe = load_recipe(DIGITS, ["loss.class_weights=balanced"])
    images = replace(synthetic_index(40, 10, 8), trained=np.arange(9))
    with pytest.raises(RecipeError, match=r"loss\.class_weights.* 9;"):
        class_weights(recipe, images, torch.device("cpu"))


def test_short_logits_are_summed_in_float32() -> None:
    half = LOGITS.bfloat16()
    for criterion in CRITERIA.values():
        for labels in (LABELS, mixed().float()):
            loss = criterion(half, labels)
            assert loss.dtype == torch.float32
            assert loss.item() == pytest.approx(criterion(half.double(), labels).item(), rel=1e-5)
            with torch.autocast("cpu", torch.bfloat16):
                assert criterion(half, labels).item() == pytest.approx(loss.item(), rel=1e-6)


def test_weights_have_a_mean_of_1_over_the_training_images() -> None:
    counts = np.array([100, 20, 4, 1])
    for given in (None, (1.0, 2.0, 3.0, 4.0), (1e30, 1e30, 1e30, 1e30)):
        weights = scaled_weights(given, counts)
        assert (weights * counts).sum() / counts.sum() == pytest.approx(1, rel=1e-12)
        wanted = 1 / counts if given is None else np.array(given)
        np.testing.assert_allclose(weights / weights[0], wanted / wanted[0], rtol=1e-12)
    with pytest.raises(ValueError, match="class 1"):
        scaled_weights(None, np.array([3, 0, 2]))
    assert scaled_weights((1.0, 2.0, 1.0), np.array([3, 0, 2])).tolist() == [1.0, 2.0, 1.0]
