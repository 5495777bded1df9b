"""polish() with types of half precision: which images are converted, and what fp16 cannot hold."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from largebatch.distributed.serial import Serial
from largebatch.errors import DataError
from largebatch.polish import polish
from largebatch.training import evaluate

CPU = Serial(torch.device("cpu"))


def images(num: int, *, std: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return std * torch.randn(num, 3, 8, 8, generator=generator)


def test_a_variance_beyond_fp16_is_refused_and_changes_nothing() -> None:
    model = nn.Sequential(nn.Identity(), nn.BatchNorm2d(3)).half()
    with pytest.raises(DataError, match="layer 1 "):
        polish(model, [images(8, std=300.0)], CPU)
    assert model[1].get_buffer("running_var").eq(1).all()
    polish(model.bfloat16(), [images(8, std=300.0)], CPU)
    assert model[1].get_buffer("running_var").isfinite().all()
    assert model[1].get_buffer("running_var").max() > 65_504


def test_a_batch_beyond_fp16_is_refused_if_only_all_batches_together_fit() -> None:
    """The layer would normalise this batch to zero, so that the next layer measures zeros."""
    model = nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)).half()
    with pytest.raises(DataError, match="layer 0 "):
        polish(model, [images(8, std=300.0), images(24)], CPU)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("given", [torch.float32, None])
def test_statistics_of_half_precision_are_rounded_once(
    dtype: torch.dtype, given: torch.dtype | None
) -> None:
    """Images are float32, or of the model's type; each layer is run here by hand."""
    torch.manual_seed(0)
    body = [nn.BatchNorm2d(3), nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Tanh(), nn.BatchNorm2d(4)]
    model = nn.Sequential(*body).to(dtype)
    before, batches = copy.deepcopy(model), [images(4), images(7, std=2.0)]
    polish(model, [it.to(given or dtype) for it in batches], CPU)
    values = [it.to(dtype) for it in batches]
    for name, layer in before.eval().named_children():
        if not isinstance(layer, nn.BatchNorm2d):
            values = [layer(it).detach() for it in values]
            continue
        rows = [it.double().transpose(0, 1).flatten(1) for it in values]
        found = model.get_submodule(name)
        assert found.get_buffer("running_mean").equal(torch.cat(rows, 1).mean(1).to(dtype))
        assert found.get_buffer("running_var").equal(torch.cat(rows, 1).var(1).to(dtype))
        for n, (own, row) in enumerate(zip(values, rows, strict=True)):
            batch = row.mean(1).to(dtype), row.var(1, correction=0).to(dtype)
            values[n] = F.batch_norm(own, *batch, layer.weight, layer.bias, eps=layer.eps).detach()


class Mixed(nn.Module):
    """A convolution and a linear layer of two types, registered in either order."""

    def __init__(self, *, conv: torch.dtype, linear: torch.dtype, linear_first: bool) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))  # of float32 in every model
        if linear_first:
            self.head = nn.Linear(4, 10, dtype=linear)
        self.conv, self.norm = nn.Conv2d(3, 4, 3, dtype=conv), nn.BatchNorm2d(4)
        if not linear_first:
            self.head = nn.Linear(4, 10, dtype=linear)

    def forward(self, values: Tensor) -> Tensor:
        values = self.norm(self.conv(values).float()).mean((2, 3))
        scores: Tensor = self.head(values.to(self.head.weight.dtype))
        return scores


@pytest.mark.parametrize("linear_first", [False, True])
@pytest.mark.parametrize(
    ("conv", "linear", "given"),
    [
        (torch.float32, torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.bfloat16, torch.float32),
        (torch.float16, torch.float16, torch.float32),
    ],
)
def test_images_are_converted_if_all_convolutions_and_linear_layers_are_of_one_half_type(
    conv: torch.dtype, linear: torch.dtype, given: torch.dtype, *, linear_first: bool
) -> None:
    """Other models get the images as they are."""
    model = Mixed(conv=conv, linear=linear, linear_first=linear_first)
    if linear_first:
        del model.scale  # the first weights are those of the linear layer
    batch = images(8).to(given)
    polish(model, [batch], CPU)
    expected = model.conv(batch.to(conv)).double().mean((0, 2, 3))
    torch.testing.assert_close(model.norm.running_mean, expected.float())
    assert evaluate(model, [(batch, torch.zeros(8, dtype=torch.long))], CPU).samples == 8
