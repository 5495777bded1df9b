"""optimizer.layer_decay: the layers are timm's, and every optimizer follows them."""

from typing import Any

import crown
import pytest
import torch
from layered import PEAK, Layers, data, net, recipe_of

from largebatch import load_recipe
from largebatch.distributed.serial import Serial
from largebatch.errors import RecipeError
from largebatch.models import build, layer_depths, param_groups
from largebatch.optim.rates import set_rates
from largebatch.optional import require_timm
from largebatch.recipe.arithmetic.plan import make_plan
from largebatch.runs.optimizer_of_recipe import build_optimizer
from largebatch.runs.state import build_criterion, build_state

require_timm()
from timm.optim import param_groups_layer_decay  # noqa: E402 -- timm needs torchvision's operators

CPU = Serial(torch.device("cpu"))
DECAY = 0.65
KINDS = {"sgd": "kind: sgd", **{key: f"kind: lars, convention: {key}" for key in crown.CONVENTIONS}}
KINDS |= crown.SECTIONS


@pytest.mark.parametrize("name", ["vit_small_patch16_224", "resnet50", "convnext_tiny"])
def test_layers_scales_and_decayed_weights_are_timms(name: str) -> None:
    with torch.device("meta"):
        model = build(name, num_classes=10)
    theirs = param_groups_layer_decay(
        model,
        weight_decay=0.05,
        no_weight_decay_list=getattr(model, "no_weight_decay", set)(),
        layer_decay=DECAY,
    )
    depths = layer_depths(model)
    decayed = set(param_groups(model, weight_decay=0.05)[0]["params"])
    for group in theirs:
        for weight in group["params"]:
            assert DECAY ** depths[weight] == pytest.approx(group["lr_scale"], rel=1e-12)
            assert (weight in decayed) == (group["weight_decay"] > 0)
    assert sum(len(group["params"]) for group in theirs) == len(depths)
    assert len(set(depths.values())) > 5


def moves(section: str) -> dict[str, torch.Tensor]:
    """Return the change of every weight in the first update."""
    model = net()
    recipe = recipe_of(section)
    optimizer = build_optimizer(recipe, model, CPU)
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    images, labels = data()
    build_criterion(recipe.loss)(model(images), labels).backward()
    set_rates(optimizer, PEAK, step=0)
    optimizer.step()
    return {name: weight - before[name] for name, weight in model.named_parameters()}


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "fujitsu"])
def test_every_optimizer_moves_a_layer_by_the_share_of_its_depth(kind: str) -> None:
    depths = {"stem": 3, "blocks.0": 2, "blocks.1": 1, "head": 0}
    # Schedule-free moves y by lr (1 - momentum) after its first update.
    section = KINDS[kind].replace(", max_grad_norm: 0.5", "")
    section = section.replace("normalize_weights: true", "normalize_weights: false")
    whole = moves(section)
    for name, moved in moves(f"{section}, layer_decay: {DECAY}").items():
        share = DECAY ** depths[name.rpartition(".")[0]]
        torch.testing.assert_close(moved, share * whole[name], rtol=1e-9, atol=1e-15)


def test_the_peak_of_a_layer_is_that_of_its_own_rate() -> None:
    """`fujitsu` scales the weight decay of the trust ratio by the peak rate."""
    model = net()
    section = f"kind: lars, convention: fujitsu, layer_decay: {DECAY}"
    optimizer = build_optimizer(recipe_of(section), model, CPU)
    rates = {id(w): group["base_lr"] for group in optimizer.param_groups for w in group["params"]}
    for weight, depth in layer_depths(model).items():
        assert rates[id(weight)] == pytest.approx(PEAK * DECAY**depth)


def test_rates_of_biases_and_of_the_backbone_multiply() -> None:
    model = net()
    changes = ["model.backbone={lr_factor: 0.1}", "polish=null", "batch.bn_span=null"]
    recipe = recipe_of(f"kind: sgd, bias_lr: {2 * PEAK}, layer_decay: {DECAY}", *changes)
    state = build_state(recipe, make_plan(recipe), model, CPU)
    set_rates(state.updater.optimizer, 1.0, step=0)
    groups = state.updater.optimizer.param_groups
    rates = {id(weight): group["lr"] for group in groups for weight in group["params"]}
    for name, weight in model.named_parameters():
        expected = DECAY ** layer_depths(model)[weight]
        expected *= 2 if "bias" in name else 1
        expected *= 1 if "head" in name else 0.1
        assert rates[id(weight)] == pytest.approx(expected)
    state.close()


def test_a_model_without_layers_is_refused_by_name() -> None:
    recipe = load_recipe(crown.DIGITS, ["optimizer.layer_decay=0.75", "model.name=lenet5"])
    with torch.device("meta"):
        model = build("lenet5", num_classes=10)
    with pytest.raises(RecipeError, match=r"layer_decay.*lenet5"):
        build_optimizer(recipe, model, CPU)

    class OneLayer(Layers):
        def group_matcher(self, *, coarse: bool = False) -> dict[str, Any]:
            return {"all": "."}

    with pytest.raises(ValueError, match="one layer"):
        layer_depths(OneLayer(drop_path=0.0))
