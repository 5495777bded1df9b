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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_images_are_converted_to_the_type_of_the_model(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 10))
    model.to(dtype)
    expected = model[0](images(8).to(dtype)).double().mean((0, 2, 3))
    polish(model, [images(8)], CPU)
    torch.testing.assert_close(model[1].running_mean, expected.to(dtype))
    assert evaluate(model, [(images(8), torch.zeros(8, dtype=torch.long))], CPU).samples == 8
