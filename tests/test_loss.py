from typing import Literal

import pytest
import torch

from largebatch.loss import cross_entropy

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
