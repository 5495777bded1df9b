import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from largebatch.models import build, param_groups


@pytest.mark.parametrize(
    ("depth", "weights"),
    [
        pytest.param(20, 269_722, id="the paper's 0.27 M"),
        pytest.param(32, 464_154, id="the paper's 0.46 M"),
        pytest.param(44, 658_586, id="the paper's 0.66 M"),
        pytest.param(56, 853_018, id="the paper's 0.85 M"),
        pytest.param(110, 1_727_962, id="the paper's 1.7 M"),
    ],
)
def test_the_networks_have_the_papers_number_of_parameters(depth: int, weights: int) -> None:
    """Table 6 of arXiv:1512.03385; the full numbers are those of the usual reimplementation."""
    model = build(f"cifar_resnet{depth}", num_classes=10)
    assert sum(parameter.numel() for parameter in model.parameters()) == weights
    adapted, _ = param_groups(model, weight_decay=1e-4)
    assert len(adapted["params"]) == depth


def norm(state: dict[str, Tensor], name: str, maps: Tensor) -> Tensor:
    return F.batch_norm(
        maps,
        state[f"{name}.running_mean"],
        state[f"{name}.running_var"],
        state[f"{name}.weight"],
        state[f"{name}.bias"],
    )


def eight_layers(state: dict[str, Tensor], images: Tensor) -> Tensor:
    """The paper's network with one block per stage, written out."""
    maps = F.relu(norm(state, "bn1", F.conv2d(images, state["conv1.weight"], padding=1)))
    for stage, stride in enumerate([1, 2, 2]):
        block = f"stages.{stage}.0"
        inner = F.conv2d(maps, state[f"{block}.conv1.weight"], stride=stride, padding=1)
        inner = F.relu(norm(state, f"{block}.bn1", inner))
        inner = norm(
            state, f"{block}.bn2", F.conv2d(inner, state[f"{block}.conv2.weight"], padding=1)
        )
        if stride == 2:
            shortcut = torch.zeros_like(inner)
            shortcut[:, : maps.shape[1]] = F.max_pool2d(maps, kernel_size=1, stride=2)
            maps = shortcut
        maps = F.relu(maps + inner)
    pooled = F.adaptive_avg_pool2d(maps, 1).flatten(1)
    return F.linear(pooled, state["head.weight"], state["head.bias"])


@pytest.mark.parametrize("size", [28, 32])
def test_eight_layers_match_the_paper(size: int) -> None:
    torch.manual_seed(0)
    model = build("cifar_resnet8", num_classes=10).double().eval()
    state = {name: tensor.double() for name, tensor in model.state_dict().items()}
    images = torch.randn(3, 3, size, size, dtype=torch.float64)
    torch.testing.assert_close(model(images), eight_layers(state, images), rtol=1e-12, atol=1e-12)


def nine_layers(state: dict[str, Tensor], images: Tensor) -> Tensor:
    """Page's network, written out."""

    def unit(maps: Tensor, name: str, pool: int = 1) -> Tensor:
        maps = F.conv2d(maps, state[f"{name}.conv.weight"], padding=1)
        return F.relu(norm(state, f"{name}.bn", F.max_pool2d(maps, pool)))

    maps = unit(images, "prep")
    for stage, first in (("layer1", "layer1.0"), ("layer2", "layer2"), ("layer3", "layer3.0")):
        maps = unit(maps, first, pool=2)
        if stage != "layer2":
            maps = maps + unit(unit(maps, f"{stage}.1.unit1"), f"{stage}.1.unit2")
    pooled = F.max_pool2d(maps, 4).flatten(1)
    return F.linear(pooled, state["head.weight"], state["head.bias"]) / 8


def test_nine_layers_match_the_published_code() -> None:
    torch.manual_seed(0)
    model = build("cifar_resnet9", num_classes=10, arguments={"width": 4}).double().eval()
    state = {name: tensor.double() for name, tensor in model.state_dict().items()}
    images = torch.randn(3, 3, 32, 32, dtype=torch.float64)
    torch.testing.assert_close(model(images), nine_layers(state, images), rtol=1e-12, atol=1e-12)
    whole = build("cifar_resnet9", num_classes=10)
    assert sum(weight.numel() for weight in whole.parameters()) == 6_573_130
