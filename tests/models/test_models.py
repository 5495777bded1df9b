from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from largebatch.errors import RecipeError
from largebatch.models import build, param_groups
from largebatch.models.batchnorm import SpanBatchNorm
from largebatch.models.of_recipe import build_model, require_trainable
from largebatch.recipe.loading import load_recipe
from largebatch.recipe.recipe import Recipe

RECIPES = Path(__file__).parents[2] / "recipes"
CPU = torch.device("cpu")


def digits(*overrides: str) -> Recipe:
    return load_recipe(RECIPES / "quickstart" / "digits_96.yaml", overrides)


def test_resnet50_has_161_tensors_of_which_54_are_adapted() -> None:
    model = build("resnet50", num_classes=1000)
    adapted, plain = param_groups(model, weight_decay=5e-5)
    assert len(adapted["params"]) == 54  # 53 convolutions and the classifier
    assert len(plain["params"]) == 107  # 53 BatchNorms, weight and bias, and the classifier's bias
    assert sum(p.numel() for group in (adapted, plain) for p in group["params"]) == 25_557_032
    assert (adapted["weight_decay"], plain["weight_decay"]) == (5e-5, 0.0)
    assert (adapted["adapt"], plain["adapt"]) == (True, False)


def plain_names(model: nn.Module) -> set[str]:
    """Return the names of what is neither decayed nor adapted."""
    plain = set(param_groups(model, weight_decay=0.1)[1]["params"])
    return {name for name, parameter in model.named_parameters() if parameter in plain}


class Table(nn.Module):
    """One parameter under a name that says what it is."""

    def __init__(self, name: str, *shape: int) -> None:
        super().__init__()
        self.register_parameter(name, nn.Parameter(torch.ones(shape)))


class Excluding(nn.Module):
    """A model that names what it does not decay, as those of timm and of Swin's authors."""

    def __init__(self) -> None:
        super().__init__()
        self.freqs, self.cpb_mlp = nn.Parameter(torch.ones(4, 4)), nn.Linear(2, 8, bias=False)
        self.block, self.head = nn.ModuleList([nn.Linear(8, 8)]), nn.Linear(8, 8, bias=False)

    def no_weight_decay(self) -> set[str]:
        return {"freqs", "block.*"}

    def no_weight_decay_keywords(self) -> set[str]:
        return {"cpb_mlp"}


@pytest.mark.parametrize(
    ("model", "adapted"),
    [
        pytest.param(Table("class_token", 1, 1, 8), set(), id="class token"),
        pytest.param(Table("register_tokens", 1, 4, 8), set(), id="register tokens"),
        pytest.param(Table("grid", 1, 8, 3, 3), set(), id="one value an element"),
        pytest.param(Table("relative_position_bias_table", 169, 3), set(), id="Swin's table"),
        pytest.param(Table("weight", 8, 1, 1, 1), set(), id="gains named weight"),
        pytest.param(
            nn.ModuleDict({"position_embedding": nn.Embedding(9, 8), "tokens": nn.Embedding(9, 8)}),
            {"tokens.weight"},
            id="positions in an nn.Embedding",
        ),
        pytest.param(
            nn.ModuleDict({"pos_embed": nn.Conv2d(8, 8, 3, groups=8, bias=False)}),
            {"pos_embed.weight"},
            id="a convolution of positions",
        ),
        pytest.param(Table("proj", 8, 4), {"proj"}, id="a matrix without a layer"),
        pytest.param(
            nn.utils.parametrizations.weight_norm(nn.Conv2d(4, 8, 3)),
            {"parametrizations.weight.original1"},
            id="weight_norm",
        ),
        pytest.param(nn.LSTM(4, 8), {"weight_ih_l0", "weight_hh_l0"}, id="LSTM"),
        pytest.param(
            nn.MultiheadAttention(8, 2), {"in_proj_weight", "out_proj.weight"}, id="attention"
        ),
        pytest.param(Excluding(), {"head.weight"}, id="no_weight_decay"),
    ],
)
def test_only_weights_that_multiply_are_adapted(model: nn.Module, adapted: set[str]) -> None:
    assert {name for name, _ in model.named_parameters()} - plain_names(model) == adapted


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("vit_tiny_patch16_224", {"depth": 1}, {"cls_token", "pos_embed"}),
        (
            "swinv2_tiny_window8_256",
            {"depths": [1], "num_heads": [3]},
            {
                f"layers.0.blocks.0.attn.{name}"
                for name in ("logit_scale", "cpb_mlp.0.weight", "cpb_mlp.2.weight")
            },
        ),
        ("edgenext_xx_small", {}, {"stages.1.blocks.1.xca.temperature"}),
        ("torchvision/swin_t", {}, {"features.1.0.attn.relative_position_bias_table"}),
        ("torchvision/convnext_tiny", {}, {"features.1.0.layer_scale"}),
    ],
)
def test_libraries_tables_tokens_and_gains_are_neither_decayed_nor_adapted(
    name: str, arguments: dict[str, Any], expected: set[str]
) -> None:
    """Besides normalisation layers and biases, of which at least one is looked for."""
    with torch.device("meta"):
        model = build(name, num_classes=10, arguments=arguments)
    shapes = {key: parameter.shape for key, parameter in model.named_parameters()}
    found = {key for key in plain_names(model) if len(shapes[key]) > 1}
    assert expected <= found
    layers = {
        f"{key}.weight" for key, m in model.named_modules() if isinstance(m, nn.Linear | nn.Conv2d)
    }
    assert {key for key in found & layers if "cpb_mlp" not in key} == set()


def test_lenet5_has_lecuns_five_layers_where_they_are_asked_for() -> None:
    """61,706 parameters for one colour, as usual, and 300 more for the first layer's others."""
    model = build("lenet5", num_classes=10, arguments={"layers": 5})
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    assert sum(p.numel() for p in model.parameters()) == 61_706 + 2 * 6 * 25
    assert sum(p.ndim > 1 for p in model.parameters()) == 5
    with pytest.raises(RecipeError, match=r"layers \(3\)"):
        build("lenet5", num_classes=10, arguments={"layers": 3})


def test_an_affine_stage_without_a_classifier_is_refused_before_training(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recipe = load_recipe(
        RECIPES / "quickstart" / "digits_96.yaml", ["polish={affine: {steps: 1, lr: 0.1}}"]
    )
    headless = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
    monkeypatch.setattr("largebatch.models.of_recipe.build", lambda *_, **__: headless)
    with pytest.raises(RecipeError, match="polish.affine: Sequential"):
        build_model(recipe, CPU)


def test_a_model_with_auxiliary_classifiers_is_measured_but_not_trained() -> None:
    """It returns more than logits in training mode."""
    words = ("data.image_size=64", "polish=null", "model.name=torchvision/googlenet")
    recipe = digits(*words, "model.arguments={init_weights: false}")
    model = build_model(recipe, CPU)
    with pytest.raises(RecipeError, match="torchvision/googlenet"):
        require_trainable(model, recipe.model.name)
    assert isinstance(model(torch.zeros(2, 3, 64, 64)), tuple)
    without = digits(*words, "model.arguments={init_weights: false, aux_logits: false}")
    require_trainable(build_model(without, CPU), without.model.name)


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("resnet5", {}, "'resnet5'.*'resnet50"),
        ("cifar_resnet21", {}, "'cifar_resnet21'.*'cifar_resnet20'"),
        ("xyzzy", {}, "'xyzzy'.*timm.list_models"),
        ("resnet18", {"depth": 3}, "model.arguments.*depth"),
        (
            "resnet18",
            {"base_width": 32},
            "resnet18.*BasicBlock",
        ),
        ("lenet5", {"width": 2}, "model.arguments: lenet5.*'width'"),
    ],
)
def test_an_unknown_model_is_named(name: str, arguments: dict[str, int], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        build(name, num_classes=10, arguments=arguments)


def test_the_recipes_model_has_its_span_and_the_seeds_weights() -> None:
    one, two = (build_model(digits(), CPU) for _ in "ab")
    torch.testing.assert_close(one.state_dict(), two.state_dict(), rtol=0, atol=0)
    spans = [module.span for module in one.modules() if isinstance(module, SpanBatchNorm)]
    assert spans == [48] * 13
    other = build_model(digits("seed=2"), CPU)
    assert not other.get_parameter("conv1.weight").equal(one.get_parameter("conv1.weight"))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["polish=null", "batch.bn_span=null"], "batch.bn_span: resnet18"),
        (["model={name: lenet5}"], "batch.bn_span: lenet5.*null"),
    ],
)
def test_a_span_that_does_not_fit_a_model_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        build_model(digits(*overrides), CPU)


def test_cifar_quick_has_the_parameters_of_caffes_network() -> None:
    """Caffe's cifar10_quick: 3 convolutions of 5 x 5 with 32, 32 and 64 maps, one layer of ten."""
    model = build("cifar_quick", num_classes=10)
    sizes = [(3 * 25 + 1) * 32, (32 * 25 + 1) * 32, (32 * 25 + 1) * 64, (64 * 16 + 1) * 10]
    assert sum(parameter.numel() for parameter in model.parameters()) == sum(sizes) == 89_578
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    normed = build("cifar_quick", num_classes=10, arguments={"batch_norm": True})
    assert sum(isinstance(layer, nn.BatchNorm2d) for layer in normed.modules()) == 3
