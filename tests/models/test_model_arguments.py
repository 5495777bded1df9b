"""Arguments of models from recipes and checkpoints that may come from anywhere."""

import inspect
from pathlib import Path
from typing import Any

import pytest

from largebatch import load_recipe
from largebatch.errors import RecipeError
from largebatch.models import build
from largebatch.optional import require_timm
from largebatch.recipe.model import FACTORY_KEYS

DIGITS = str(Path(__file__).parents[2] / "recipes" / "quickstart" / "digits_96.yaml")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("{pretrained: true}", "pretrained: nothing is downloaded; initial weights are"),
        (
            "{checkpoint_path: theirs.pth}",
            "checkpoint_path: nothing is downloaded; initial weights",
        ),
        ("{cache_dir: theirs, pretrained_strict: false}", "; pretrained_strict: nothing is"),
        ("{weights: DEFAULT}", "model.arguments: weights: nothing is downloaded"),
        ("{weights_backbone: DEFAULT}", "weights_backbone: nothing is downloaded"),
        ("{num_classes: 3}", "num_classes: "),
        ("{act_layer: 'http://127.0.0.1/x'}", "act_layer: a word may hold letters, digits and"),
        ("{norm_layer: [batchnorm2d, hf-hub:a/b]}", "and _ . , + = -, got 'hf-hub:a/b'"),
        ("{block: {file: ../../secret}}", "+ = -, got '../../secret'"),
    ],
)
def test_arguments_that_download_or_load_are_refused_by_name(arguments: str, message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe(DIGITS, [f"model.arguments={arguments}"])
    assert message in str(caught.value)


def test_arguments_of_the_factories_themselves_are_refused() -> None:
    """A new release of timm or torchvision may add to it."""
    timm = require_timm()
    from timm.models._builder import build_model_with_cfg
    from torchvision.models import get_model, resnet18

    for factory in (timm.create_model, build_model_with_cfg, get_model, inspect.unwrap(resnet18)):
        named = {
            name
            for name, parameter in inspect.signature(factory).parameters.items()
            if parameter.kind is not inspect.Parameter.VAR_KEYWORD
        }
        assert named - FACTORY_KEYS == set(), factory


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("resnet18", {"pretrained": True}),
        ("resnet18", {"checkpoint_path": "theirs.pth"}),
        ("resnet18", {"pretrained_cfg": {"url": "http://127.0.0.1/"}}),
        ("torchvision/resnet18", {"weights": "DEFAULT"}),
        ("torchvision/resnet18", {"pretrained": True}),
    ],
)
def test_a_model_built_from_python_has_new_weights_for_any_arguments(
    name: str, arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr("socket.socket.connect", refuse)
    with pytest.raises(RecipeError, match="resnet18.*argument"):
        build(name, num_classes=10, arguments=arguments)
    assert list(tmp_path.iterdir()) == []


def refuse(*_: object) -> None:
    raise AssertionError("a connection was opened")
