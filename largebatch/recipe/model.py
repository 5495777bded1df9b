"""The network of a recipe, and what a recipe may pass to its constructor."""

import re
from typing import Annotated

from pydantic import Field, JsonValue, field_validator

from largebatch.recipe.section import Duration, Positive, Section

_FACTORY = (
    "pretrained pretrained_cfg pretrained_cfg_overlay pretrained_strict pretrained_filter_fn "
    "pretrained_model_args pretrained_backbone weights weights_backbone checkpoint_path cache_dir "
    "progress name model_name variant model_cls num_classes dtype device features_only feature_cfg "
    "feature_cls out_indices kwargs_filter model_cfg scriptable exportable no_jit quantize"
)
FACTORY_KEYS = frozenset(_FACTORY.split())
"""Arguments of timm's and torchvision's factories: they download and read files, or a recipe has
another key for them. All others go to the constructor of the network."""

RESNET50 = ("resnet50", "torchvision/resnet50")
"""Names of ResNet-50 v1.5 in timm and torchvision; both are the same network."""

_WORD = re.compile(r"[\w.,+=-]*")
"""A choice such as `relu` or a block such as `ir_r1_k3_s2_e6_c24`; no path and no URL."""


class EarlyWeights(Section):
    """Weights that are trained only at the start."""

    names: Annotated[tuple[str, ...], Field(min_length=1)]
    """Names of the weights in the model, such as `whiten.bias`."""

    until: Duration
    """Their learning rate falls linearly from its peak to zero by then, and stays zero."""


class Backbone(Section):
    """All weights but the classifier's: they come from a file, and change less than it."""

    lr_factor: Positive = 1.0
    """Factor of their learning rates, such as 0.1. It also scales their weight decay."""

    frozen: Duration | None = None
    """Updates leave them and their momentum as they are until then, while the classifier alone is
    trained; BatchNorm's running statistics move. null: never."""


class Model(Section):
    """The network."""

    name: str
    """`lenet5`, `cifar_quick`, `cifar_resnet8` (or 20, 32, 44, 56, 110), `cifar_resnet9`,
    `airbench`, `big_vision_vit_s16`, `resnet50_blurred`, the name of any timm model, or
    `torchvision/` and that of one of torchvision's."""

    arguments: dict[str, JsonValue] = Field(default={})
    """Passed to the network's constructor in timm or torchvision as they are: numbers, true or
    false, words, and lists of them. `lenet5` takes {layers: 5} for LeCun's five layers with
    weights in place of Caffe's four. Arguments that make the libraries download or load weights are
    refused."""

    weights: Annotated[str, Field(min_length=1)] | None = None
    """File of the initial weights, .safetensors or .pth; null draws them from the seed. The path is
    relative to the current directory. Only worker 0 reads the file, and only when a run begins: a
    resumed or evaluated run has its weights in a checkpoint."""

    head_std: Positive | None = None
    """Draw the classifier's weights from N(0, head_std) with zero bias, even if all others come
    from `weights`; null keeps the model's own. MLPerf's ResNet-50 uses 0.01."""

    backbone: Backbone | None = None
    """Learning rates of all weights but the classifier's, for fine-tuning; null: the schedule's."""

    early: EarlyWeights | None = None
    """Weights that are trained only at the start of the run; null: none."""

    @field_validator("arguments")
    @classmethod
    def _arguments_shape_the_network(cls, arguments: dict[str, JsonValue]) -> dict[str, JsonValue]:
        """Refuse arguments that could download, read or write: a recipe may be untrusted."""
        refused = [
            f"{key}: nothing is downloaded; initial weights are model.weights; name, classes and "
            "precision have keys of their own"
            for key in arguments
            if key in FACTORY_KEYS
        ]
        refused += [
            f"{key}: a word may hold letters, digits and _ . , + = -, got {word!r}"
            for key, value in arguments.items()
            for word in _words(value)
            if not _WORD.fullmatch(word)
        ]
        if refused:
            raise ValueError("; ".join(refused))
        return arguments


def _words(value: JsonValue) -> list[str]:
    if isinstance(value, dict):
        return [word for pair in value.items() for each in pair for word in _words(each)]
    if isinstance(value, list):
        return [word for each in value for word in _words(each)]
    return [value] if isinstance(value, str) else []
