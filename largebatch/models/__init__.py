"""Models by name, and the parameter groups that are decayed and adapted."""

import re
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from largebatch import registry
from largebatch.errors import RecipeError
from largebatch.models import networks, zoo
from largebatch.models.batchnorm import Spans as Spans
from largebatch.models.batchnorm import with_span as with_span
from largebatch.models.blurred import resnet50_blurred
from largebatch.optional import require_timm

_DEPTHS = (8, 20, 32, 44, 56, 110)


def _big_vision_vit(num_classes: int, **arguments: Any) -> nn.Module:  # noqa: ANN401 -- passed on
    from largebatch.models.vision_transformer import BigVisionViT  # its blocks are timm's

    return BigVisionViT(num_classes, **arguments)


_OURS: dict[str, tuple[Callable[..., nn.Module], dict[str, int]]] = {
    "lenet5": (networks.LeNet5, {}),
    "cifar_quick": (networks.CifarQuick, {}),
    "cifar_resnet9": (networks.CifarResNet9, {}),
    "airbench": (networks.Airbench, {}),
    "big_vision_vit_s16": (_big_vision_vit, {}),
    "resnet50_blurred": (resnet50_blurred, {}),
    **{f"cifar_resnet{depth}": (networks.CifarResNet, {"depth": depth}) for depth in _DEPTHS},
}
"""Class by name, and the arguments that a recipe cannot change."""

_POSITIONS = re.compile(r"(?:^|_)(?:pos(?:_|emb|ition|\d|$)|rel(?:_|ative|$))")
"""Names of tables of positions, absolute or relative."""

_TABLES = re.compile(rf"{_POSITIONS.pattern}|bias|tokens?_?\d*$")

_NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.LocalResponseNorm, nn.RMSNorm)


def build(
    name: str,
    *,
    num_classes: int,
    arguments: Mapping[str, Any] | None = None,
    head_std: float | None = None,
) -> nn.Module:
    """Build a model of this package, an installed one, timm or torchvision.

    It maps N x 3 x H x W to N x num_classes.

    The weights are newly initialised. `arguments` are passed to the model's constructor; `head_std`
    draws the classifier from N(0, head_std) with zero bias. Raises RecipeError for an unknown name
    or argument.

    >>> classifier(build("cifar_resnet8", num_classes=10))
    Linear(in_features=64, out_features=10, bias=True)
    """
    construct, fixed = _own(name)
    if construct is not None:
        try:
            model = construct(num_classes, **fixed, **(arguments or {}))
        except (TypeError, ValueError) as error:
            raise RecipeError(f"model.arguments: {name}: {error}") from None
    else:
        require_known(name)
        model = zoo.build(name, num_classes=num_classes, arguments=arguments or {})
    if head_std is not None:
        head = classifier(model)
        nn.init.normal_(head.weight, std=head_std)  # type: ignore[arg-type]  # a layer has both
        if head.bias is not None:
            nn.init.zeros_(head.bias)  # type: ignore[arg-type]  # as above
    return model


def _own(name: str) -> tuple[Callable[..., nn.Module] | None, dict[str, int]]:
    """Return the class of a network that is ours or of an installed package, and our arguments."""
    if name not in registry.installed("networks"):
        return _OURS.get(name, (None, {}))
    construct: Callable[..., nn.Module] = registry.load("networks", name, ours=_OURS)
    if zoo.is_timms(name):
        raise RecipeError(
            f"model.name: {name!r} is in timm and in an installed package: uninstall that"
        )
    return construct, {}


def require_known(name: str) -> None:
    """Raise RecipeError with the nearest names if there is no model of this name."""
    others = (*_OURS, *registry.installed("networks"))
    if name not in others:
        zoo.require_known(name, others=others)


def is_timms(name: str) -> bool:
    """Return True if the model of this name is built by timm."""
    others = (*_OURS, *registry.installed("networks"))
    return name not in others and not name.startswith(zoo.TORCHVISION)


def param_groups(model: nn.Module, *, weight_decay: float) -> list[dict[str, Any]]:
    """Split the parameters into a group that is decayed and adapted, and one that is neither.

    Neither are normalisation layers, by their type (ResNet's `downsample.1.weight` belongs to a
    BatchNorm); tensors with at most one side above 1, such as biases, class tokens and gains; what
    the model or a part of it names in `no_weight_decay()`, as timm's do, or with a word of Swin's
    `no_weight_decay_keywords()`; and tables of positions, tokens or biases, which the libraries
    without these methods hold as parameters of their own.

    >>> model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    >>> [(len(it["params"]), it["adapt"]) for it in param_groups(model, weight_decay=1e-4)]
    [(1, True), (3, False)]
    """
    plain = norm_parameters(model) | _named_by_models(model)
    plain |= {weight for path, weight in model.named_parameters() if _holds_values(path, weight)}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    adapted = [weight for weight in trained if weight not in plain]
    return [
        {"params": adapted, "weight_decay": weight_decay, "adapt": True},
        {"params": [p for p in trained if p in plain], "weight_decay": 0.0, "adapt": False},
    ]


def _holds_values(path: str, parameter: nn.Parameter) -> bool:
    """Return True for vectors, and for tables, known by their shape or name.

    Layers call `weight` what multiplies their input. A first side of 1 in another parameter means
    that it is added to every sample of a batch.
    """
    if sum(side > 1 for side in parameter.shape) <= 1:
        return True
    name = path.replace("parametrizations.weight.", "weight_").rpartition(".")[2]
    of_batch = parameter.ndim > 2 and len(parameter) == 1
    return "weight" not in name and (of_batch or _TABLES.search(name) is not None)


def _named_by_models(model: nn.Module) -> set[nn.Parameter]:
    """Return what models exclude from weight decay: by names, which may have wildcards, or words.

    A model may be a part of another, such as a wrapper. Embeddings of positions are added.
    """
    excluded: set[nn.Parameter] = set()
    for path, part in model.named_modules():
        if isinstance(part, nn.Embedding) and _POSITIONS.search(path.rpartition(".")[2]):
            excluded |= set(part.parameters())
        patterns: list[str] = [*getattr(part, "no_weight_decay", list)()]
        patterns += [f"*{word}*" for word in getattr(part, "no_weight_decay_keywords", list)()]
        excluded |= {
            parameter
            for name, parameter in (part.named_parameters() if patterns else ())
            if any(fnmatchcase(name, pattern) for pattern in patterns)
        }
    return excluded


def norm_parameters(model: nn.Module) -> set[nn.Parameter]:
    """Return the scales and shifts of the normalisation layers, identified by layer type."""
    return _parameters_of(model, _NORMS)


def affine_parameters(model: nn.Module) -> set[nn.Parameter]:
    """Return the scales and shifts of BatchNorm layers and all parameters of the classifier.

    InstanceNorm's are included, if any: like BatchNorm it normalises by moments, of one image
    instead of many.
    """
    return _parameters_of(model, (_NormBase,)) | set(classifier(model).parameters())


def layer_depths(model: nn.Module) -> dict[nn.Parameter, int]:
    """Return for each parameter the number of layers after its own: 0 in the last layer.

    The layers are those of timm's `group_matcher`: a stem, each block, and a head with the last
    normalisation layer, the same as in timm's param_groups_layer_decay. Raises ValueError if the
    model has no such method, or only one layer by it.
    """
    name = type(model).__name__
    matcher = getattr(model, "group_matcher", None)
    if matcher is None:
        raise ValueError(f"{name} does not divide its weights into layers, as timm's models do")
    require_timm()
    from timm.models import group_parameters

    layers = group_parameters(model, matcher(coarse=False), reverse=True)
    last = max(layers.values())
    if not last:
        raise ValueError(f"group_matcher of {name} has one layer for all weights")
    return {weight: last - layers[path] for path, weight in model.named_parameters()}


def _parameters_of(model: nn.Module, kinds: tuple[type[nn.Module], ...]) -> set[nn.Parameter]:
    layers = (module for module in model.modules() if isinstance(module, kinds))
    return {parameter for layer in layers for parameter in layer.parameters(recurse=False)}


def classifier(model: nn.Module) -> nn.Module:
    """Return the layer of the logits: `get_classifier` of the model, else its last nn.Linear.

    Raises ValueError if there is neither.
    """
    if hasattr(model, "get_classifier"):  # timm's models
        layer = model.get_classifier()  # type: ignore[operator]  # nn.Module has no such method
        head = layer if isinstance(layer, nn.Module) else nn.ModuleList(layer)  # LeViT has two
        if any(True for _ in head.parameters()):
            return head
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no classifier: neither get_classifier nor an nn.Linear"
        )
    return layers[-1]


def hidden_matrices(model: nn.Module) -> list[nn.Parameter]:
    """Return the weights that Muon takes, in the order of the model.

    These are weights that `param_groups` decays, but neither the first layer nor classifiers or
    embeddings. As in timm, the first two sides must exceed 1: those of depthwise convolutions do
    not. Parameters that are not a layer's weight are left out by their name.

    >>> [tuple(it.shape) for it in hidden_matrices(build("lenet5", num_classes=10))]
    [(50, 20, 5, 5), (500, 800)]
    """
    weights = [getattr(module, "weight", None) for module in model.modules()]
    first = next((id(weight) for weight in weights if weight is not None and weight.ndim > 1), None)
    tables = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
    skipped = {first, *map(id, [*classifier_weights(model), *tables])}
    decayed = set(param_groups(model, weight_decay=0.0)[0]["params"])
    return [
        weight
        for name, weight in model.named_parameters()
        if weight in decayed
        and id(weight) not in skipped
        and min(weight.shape[:2]) > 1
        and "weight" in name.rpartition(".")[2]
    ]


def classifier_weights(model: nn.Module) -> set[nn.Parameter]:
    """Return the weights of the classifier and of those for training only, known by their names."""
    own = set(classifier(model).parameters())
    classes = {len(weight) for weight in own if weight.ndim > 1}
    return own | {
        weight
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear)
        and layer.out_features in classes
        and any(word in name.lower() for word in ("head", "aux"))
        for weight in layer.parameters()
    }
