import math
from typing import Literal

import pytest
import torch

from largebatch.training.loop import cross_entropy

K, MASS = 5, 0.1


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
