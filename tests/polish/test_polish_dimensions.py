"""polish() refuses inputs whose dimensions would be misread, and names layers of no name."""

import pytest
import torch
from torch import nn

from largebatch.distributed.serial import Serial
from largebatch.errors import DataError
from largebatch.polish import polish

CPU = Serial(torch.device("cpu"))


@pytest.mark.parametrize(
    ("layer", "shape", "expected"),
    [
        (nn.InstanceNorm1d, (4, 4), "N x 4 x L"),
        (nn.InstanceNorm2d, (4, 4, 7), "N x 4 x H x W"),
        (nn.InstanceNorm3d, (4, 4, 7, 5), "N x 4 x D x H x W"),
    ],
)
@pytest.mark.parametrize("sequential", [False, True])
def test_instance_norm_without_a_batch_dimension_is_refused(
    layer: type[nn.InstanceNorm2d], shape: tuple[int, ...], expected: str, *, sequential: bool
) -> None:
    """PyTorch takes such an input; here its channels could be read as samples."""
    model = layer(4, track_running_stats=True)
    found = " x ".join(map(str, shape))
    with pytest.raises(
        ValueError, match=f"^the input of the model is {found}; expected {expected}$"
    ):
        polish(model, [torch.randn(shape)], CPU, sequential=sequential)
    assert model.get_buffer("running_var").eq(1).all()
    polish(nn.Sequential(model), [torch.randn(3, *shape)], CPU, sequential=sequential)
    assert not model.get_buffer("running_var").eq(1).any()


def test_a_model_of_one_layer_is_called_the_model() -> None:
    with pytest.raises(DataError, match="^the model got a single value per channel"):
        polish(nn.BatchNorm1d(3), [torch.ones(1, 3)], CPU)
    with pytest.raises(ValueError, match="^the model is not initialised"):
        polish(nn.LazyBatchNorm2d(), [torch.ones(1, 3, 2, 2)], CPU)
