"""BatchNorm, the sum and the ReLU behind it in one call, for kernels that compute all three.

`norm_relu` is this call. The networks of this package make it in their own forward passes. `pair`
brings it into models of other libraries: where BatchNorm and ReLU are neighbours in an
nn.Sequential, and into the residual blocks of torchvision and timm, whose forward passes are
written here a second time. Every other module keeps its forward pass. Modules, names and
`state_dict` stay.

A second forward pass would be wrong without a sign as soon as a library changes the first one. So
a block is paired only if its class is exactly the known one and its method has exactly the
statements that were rewritten (`_Rewrite.digest`).
"""

import ast
import hashlib
import inspect
import textwrap
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from largebatch.models import kernels
from largebatch.models.batchnorm import SpanBatchNorm, has_hooks, relu_is_torchs
from largebatch.models.wrappers import set_forward

Names = tuple[tuple[str, ...], ...]
"""Attributes of a block for each call of `norm_relu`: BatchNorm, what is behind it, and the ReLU
(none if it is a function)."""


def norm_relu(
    norm: nn.Module,
    images: Tensor,
    other: Tensor | None = None,
    *,
    relu: nn.Module | None = None,
    between: Sequence[nn.Module] = (),
) -> Tensor:
    """Normalise N x C x ... images, call the layers `between`, add `other`, and apply ReLU.

    `relu` is the layer that does so; None: torch's function. A kernel computes the whole in
    training where it takes the images, if the layers are those that `_fits` and have no hooks;
    otherwise each layer is called.
    """
    layers = [norm, *between] if relu is None else [norm, *between, relu]
    if (
        isinstance(norm, SpanBatchNorm)
        and norm.training
        # First of the checks that take time: on a CPU it ends them.
        and kernels.take(images, other, span=norm.span)
        and _fits(layers)
        and relu_is_torchs()
        and not any(map(has_hooks, layers))
    ):
        return norm.normalise(images, other, relu=True)
    maps = norm(images)
    for layer in between:
        maps = layer(maps)
    if other is not None:
        # In place as in torchvision and timm: the sum has the type of the BatchNorm's result.
        maps += other
    result: Tensor = F.relu(maps) if relu is None else relu(maps)
    return result


def _fits(layers: Sequence[nn.Module]) -> bool:
    """Return True if layers are a BatchNorm with a span, and behind it at most a ReLU.

    Layers in between may be nn.Identity, which timm has in place of those that are left out.
    """
    norm = layers[0]
    behind = layers[1:]
    if behind and type(behind[-1]) is nn.ReLU:
        behind = behind[:-1]
    # A BatchNorm with modules inside applies an activation, or computes its weights.
    is_plain = type(norm) is SpanBatchNorm and not norm._modules
    return is_plain and all(type(layer) is nn.Identity for layer in behind)


def pair(model: nn.Module) -> tuple[int, int]:
    """Bring `norm_relu` into a model, in place; return what `count_pairs` does.

    A block stays as it is if its class is not known, is derived from a known one or has another
    forward pass than the known one, or if a forward pass was set on the block itself. A pickled
    copy has the forward passes of before; a deep copy has the new ones.
    """
    for block in list(model.modules()):
        if hasattr(block, "norm_relu_layers"):  # a second call, or a network of this package
            continue
        rewrite = _rewrite_of(block)
        if rewrite is not None and _has_known_method(block, rewrite):
            _set(block, rewrite.method, rewrite.function, rewrite.layers)
        elif type(block).forward is nn.Sequential.forward and "forward" not in vars(block):
            _set(block, "forward", _sequential, ())
    return count_pairs(model)


def count_pairs(model: nn.Module) -> tuple[int, int]:
    """Return the number of BatchNorm layers in pairs with a ReLU, and of all that have a span."""
    norms = [layer for layer in model.modules() if isinstance(layer, SpanBatchNorm)]
    num = sum(norm.ends_in_relu() for norm in norms)
    for block in model.modules():
        num += sum(map(_fits, _calls(block)))
    return num, len(norms)


def describe_pairs(model: nn.Module) -> Iterator[str]:
    """Yield sentences for the log about layers whose pairs run in the kernels, or might."""
    layers = [layer for layer in model.modules() if isinstance(layer, (_ConvNd, nn.Linear))]
    # Results of convolutions have the type and memory format of their weights.
    if not layers or not all(kernels.take(layer.weight) for layer in layers):
        return
    num, total = count_pairs(model)
    if num:
        yield f"{num} of {total} BatchNorm layers run in one kernel with the ReLU behind them"
    for name in sorted(_unknown_versions(model)):
        yield (
            f"{name} has another forward pass here than the one that is known: its BatchNorm and "
            "ReLU run in kernels of their own"
        )


def _unknown_versions(model: nn.Module) -> set[str]:
    """Return the names of known classes whose blocks were not paired."""
    return {
        _full_name(block)
        for block in model.modules()
        if _rewrite_of(block) is not None and not hasattr(block, "norm_relu_layers")
    }


def _calls(block: nn.Module) -> list[list[nn.Module]]:
    """Return the layers of each call of `norm_relu` that a block makes."""
    names: Names | None = getattr(block, "norm_relu_layers", None)
    if names is not None and isinstance(block, nn.Sequential):
        return [group for group in _neighbours(block) if len(group) > 1]
    calls = [[getattr(block, name) for name in call] for call in names or ()]
    return [[layer for layer in call if layer is not None] for call in calls]


def _set(block: nn.Module, method: str, function: Callable[..., Any], layers: Names) -> None:
    base = type(block)
    known = getattr(base, method)

    def call(self: nn.Module, images: Any) -> Any:  # noqa: ANN401 -- an nn.Sequential takes anything
        current = getattr(base, method)
        # A method that was set on the class since is the one that the caller wants.
        return function(self, images) if current is known else current(self, images)

    kind: Any = set_forward(block, call, method=method)
    kind.norm_relu_layers = layers


def _sequential(block: nn.Sequential, images: Any) -> Any:  # noqa: ANN401 -- as above
    for layers in _neighbours(block):
        if len(layers) > 1:
            images = norm_relu(layers[0], images, relu=layers[-1], between=layers[1:-1])
        else:
            images = layers[0](images)
    return images


def _neighbours(block: nn.Sequential) -> list[list[nn.Module]]:
    """Divide layers into groups from a BatchNorm to a ReLU; every other layer is alone.

    They are divided in each pass: layers may have been added or replaced.
    """
    layers = list(block)
    groups = []
    while layers:
        end = 1
        while end < len(layers) and type(layers[end]) is nn.Identity:
            end += 1
        is_pair = end < len(layers) and type(layers[end]) is nn.ReLU and _fits(layers[: end + 1])
        size = end + 1 if is_pair else 1
        groups.append(layers[:size])
        layers = layers[size:]
    return groups


# The forward passes of other libraries. Attributes are those of the original; every statement of it
# is here, in its order, but for one thing: where the last BatchNorm is in a call with the sum, the
# shortcut is computed before it. Neither draws random numbers.


def _shortcut(block: Any, images: Tensor) -> Tensor:  # noqa: ANN401 -- attributes of a known class
    if block.downsample is None:
        return images
    shortcut: Tensor = block.downsample(images)
    return shortcut


def _torchvision_basic(block: Any, images: Tensor) -> Tensor:  # noqa: ANN401 -- as above
    maps = norm_relu(block.bn1, block.conv1(images), relu=block.relu)
    maps = block.conv2(maps)
    return norm_relu(block.bn2, maps, _shortcut(block, images), relu=block.relu)


def _torchvision_bottleneck(block: Any, images: Tensor) -> Tensor:  # noqa: ANN401 -- as above
    maps = norm_relu(block.bn1, block.conv1(images), relu=block.relu)
    maps = norm_relu(block.bn2, block.conv2(maps), relu=block.relu)
    maps = block.conv3(maps)
    return norm_relu(block.bn3, maps, _shortcut(block, images), relu=block.relu)


def _torchvision_resnet(network: Any, images: Tensor) -> Tensor:  # noqa: ANN401 -- as above
    maps = norm_relu(network.bn1, network.conv1(images), relu=network.relu)
    maps = network.maxpool(maps)
    for stage in (network.layer1, network.layer2, network.layer3, network.layer4):
        maps = stage(maps)
    logits: Tensor = network.fc(network.avgpool(maps).flatten(1))
    return logits


def _timm_basic(block: Any, images: Tensor) -> Tensor:  # noqa: ANN401 -- as above
    maps = block.conv1(images)
    maps = norm_relu(block.bn1, maps, relu=block.act1, between=[block.drop_block])
    maps = block.conv2(block.aa(maps))
    return _timm_sum(block, maps, block.bn2, block.act2, images)


def _timm_bottleneck(block: Any, images: Tensor) -> Tensor:  # noqa: ANN401 -- as above
    maps = norm_relu(block.bn1, block.conv1(images), relu=block.act1)
    maps = block.conv2(maps)
    maps = norm_relu(block.bn2, maps, relu=block.act2, between=[block.drop_block])
    maps = block.conv3(block.aa(maps))
    return _timm_sum(block, maps, block.bn3, block.act3, images)


def _timm_sum(
    block: Any,  # noqa: ANN401 -- as above
    maps: Tensor,
    norm: nn.Module,
    relu: nn.Module,
    images: Tensor,
) -> Tensor:
    """Return the end of timm's blocks, behind their last convolution."""
    if block.se is None and block.drop_path is None:
        return norm_relu(norm, maps, _shortcut(block, images), relu=relu)
    maps = norm(maps)
    if block.se is not None:
        maps = block.se(maps)
    if block.drop_path is not None:
        maps = block.drop_path(maps)
    maps += _shortcut(block, images)
    result: Tensor = relu(maps)
    return result


def _timm_resnet(network: Any, images: Tensor) -> Tensor:  # noqa: ANN401 -- as above
    """Return the maps behind the last stage, as timm's `forward_features`."""
    maps: Tensor = network.maxpool(norm_relu(network.bn1, network.conv1(images), relu=network.act1))
    stages = [network.layer1, network.layer2, network.layer3, network.layer4]
    if network.grad_checkpointing:
        from timm.models import checkpoint_seq

        maps = checkpoint_seq(stages, maps, flatten=True)
    else:
        for stage in stages:
            maps = stage(maps)
    return maps


class _Rewrite(NamedTuple):
    """A method of another library, and the function that does the same by `norm_relu`."""

    method: str
    function: Callable[[Any, Tensor], Tensor]
    digest: str
    """`_digest` of the method. A new one means that the library has changed it: compare it with the
    function before the digest is replaced here."""

    layers: Names


_REWRITES = {
    "torchvision.models.resnet.BasicBlock": _Rewrite(
        "forward", _torchvision_basic, "526c00339e0341fc", (("bn1", "relu"), ("bn2", "relu"))
    ),
    "torchvision.models.resnet.Bottleneck": _Rewrite(
        "forward",
        _torchvision_bottleneck,
        "69ff145d4433fa78",
        (("bn1", "relu"), ("bn2", "relu"), ("bn3", "relu")),
    ),
    "torchvision.models.resnet.ResNet": _Rewrite(
        "_forward_impl", _torchvision_resnet, "cf452043a2333a9b", (("bn1", "relu"),)
    ),
    "timm.models.resnet.BasicBlock": _Rewrite(
        "forward",
        _timm_basic,
        "24d1455c841b1658",
        (("bn1", "drop_block", "act1"), ("bn2", "se", "drop_path", "act2")),
    ),
    "timm.models.resnet.Bottleneck": _Rewrite(
        "forward",
        _timm_bottleneck,
        "45e56d6e40f2a252",
        (("bn1", "act1"), ("bn2", "drop_block", "act2"), ("bn3", "se", "drop_path", "act3")),
    ),
    "timm.models.resnet.ResNet": _Rewrite(
        "forward_features", _timm_resnet, "5221fbb9f9a6f03e", (("bn1", "act1"),)
    ),
}
"""By the full name of a class, so that nothing is imported that the model does not use. The
statements are the same in timm 1.0.3 to 1.0.31, and in torchvision since 0.9."""


def _full_name(block: nn.Module) -> str:
    return f"{type(block).__module__}.{type(block).__qualname__}"


def _rewrite_of(block: nn.Module) -> _Rewrite | None:
    return _REWRITES.get(_full_name(block))


def _has_known_method(block: nn.Module, rewrite: _Rewrite) -> bool:
    if "forward" in vars(block) or rewrite.method in vars(block):
        return False
    return _digest(getattr(type(block), rewrite.method)) == rewrite.digest


@cache
def _digest(method: Callable[..., Any]) -> str | None:
    """Return a digest of a method's statements; None if they are not known.

    Comments, docstrings and annotations of arguments do not count.
    """
    # A decorator would run too, and inspect shows only the method inside.
    if not inspect.isfunction(method) or hasattr(method, "__wrapped__"):
        return None
    try:
        module = ast.parse(textwrap.dedent(inspect.getsource(method)))
    except (OSError, SyntaxError):  # a library without its sources; a part of a longer line
        return None
    definition = module.body[0]
    if not isinstance(definition, ast.FunctionDef):
        return None
    statements = [
        ast.unparse(statement)
        for statement in definition.body
        if not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant))
    ]
    return hashlib.sha256("\n".join(statements).encode()).hexdigest()[:16]
