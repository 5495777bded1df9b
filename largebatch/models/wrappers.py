"""Wrapped models: parallel, sharded, compiled, averaged, or called for several views of an image.

A forward pass of DistributedDataParallel broadcasts buffers, and one of FSDP gathers weights:
workers with different numbers of batches, or none, would wait for each other. Evaluation and
polishing need only the inner module, which is complete on every worker under
DistributedDataParallel.
"""

import copy
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import islice
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules import module as torch_module
from torch.nn.modules.conv import _ConvNd

from largebatch.distributed.agreement import checksum
from largebatch.errors import RecipeError
from largebatch.models.inputs import logits_of

_PARALLEL = {"DistributedDataParallel", "DataParallel", "FullyShardedDataParallel"}
"""Classes whose forward pass needs other workers or devices: torch's, and apex's."""

_INSIDE = {
    "AveragedModel": "module",
    "DataParallel": "module",
    "DistributedDataParallel": "module",
    "ModelEmaV3": "module",
    "OptimizedModule": "_orig_mod",
}
"""Attribute of the inner module, by class of the wrapper: torch's, and timm's (ModelEma)."""


def local_model(model: nn.Module) -> nn.Module:
    """Return the outermost module of a model whose forward pass needs only this worker.

    Raises ValueError if the model is sharded (FSDP, tensor parallelism), or has a parallel module
    inside.
    """
    if has_divided_weights(model):
        raise ValueError(
            "the weights are divided over workers (FSDP2, tensor parallelism); pass a copy "
            "with the whole weights, of torch's get_model_state_dict"
        )
    while parallel := [(name, m) for name, m in model.named_modules() if _kinds(m) & _PARALLEL]:
        attribute = next((_INSIDE[kind] for kind in _kinds(model) & _INSIDE.keys()), None)
        if attribute is None:
            name, module = parallel[0]
            raise ValueError(
                f"{describe_layer(name)} is a {type(module).__name__}, whose forward pass waits "
                "for other workers or devices; pass the inner module, or a complete copy of it"
            )
        model = model.get_submodule(attribute)
    return model


_WRAPPERS = {"module", "_orig_mod"}  # parts of names, of DataParallel and torch.compile


def without_wrappers(name: str) -> str:
    """Return the name of a layer or a tensor without those of DataParallel and torch.compile.

    >>> without_wrappers("module._orig_mod.layer1.weight")
    'layer1.weight'
    """
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def describe_layer(name: str) -> str:
    """Return the words for a layer in a message; the model itself has no name."""
    return f"layer {name}" if name else "the model"


def device_of(model: nn.Module) -> torch.device:
    """Return the device of the model's first tensor; the CPU for a model without tensors."""
    for tensors in (model.parameters(), model.buffers()):
        for tensor in tensors:
            return tensor.device
    return torch.device("cpu")


def input_of(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """Return a function that moves images to the model's device, floating ones in its type.

    PyTorch's layers refuse images of another type than their weights, such as the float32 of
    loaders in a model of bf16 or float64. A model is in the type of its convolutions and linear
    layers, or of its first weights if it has none of these. Images are not converted for layers of
    several types: which one is the first is not known.
    """
    device = device_of(model)
    layers = [layer for layer in model.modules() if isinstance(layer, (_ConvNd, nn.Linear))]
    weights = [weight for layer in layers for weight in layer.parameters()]
    weights = weights or list(islice(model.parameters(), 1))
    dtypes = {weight.dtype for weight in weights if weight.is_floating_point()}
    model_type = dtypes.pop() if len(dtypes) == 1 else None
    if model_type is not None and model_type.itemsize == 1:
        model_type = None  # weights in fp8 take images of other types

    def as_input(images: Tensor) -> Tensor:
        dtype = images.dtype
        if model_type is not None and images.is_floating_point():
            dtype = model_type
        return images.to(device, dtype, non_blocking=True)

    return as_input


def has_divided_weights(model: nn.Module) -> bool:
    """Return True if a worker has only a part of some weight (FSDP2, tensor parallelism)."""
    tensors = (*model.parameters(), *model.buffers())
    return any("DTensor" in _kinds(tensor) for tensor in tensors)


@contextmanager
def mode(model: nn.Module, *, training: bool) -> Iterator[None]:
    """Set every module to training or evaluation mode, and restore each module's mode on exit.

    The flags are set directly, because a module's train() and eval() may do more than that.
    """
    modes = {module: module.training for module in model.modules()}
    try:
        for module in modes:
            module.training = training
        yield
    finally:
        for module, before in modes.items():
            module.training = before


_EAGER = ExitStack()
_EAGER_LOCK = Lock()
_EAGER_BLOCKS: list[None] = []
"""An entry for each block of `uncompiled` in any thread; the last one restores what was before."""


@contextmanager
def uncompiled() -> Iterator[None]:
    """Run compiled modules uncompiled, because graphs do not include hooks added later.

    Importing the compiler takes seconds; if it was not imported, nothing is compiled.
    """
    if "torch._dynamo" not in sys.modules:
        yield
        return
    with _EAGER_LOCK:
        if not _EAGER_BLOCKS:
            _EAGER.enter_context(torch.compiler.set_stance("force_eager"))
        _EAGER_BLOCKS.append(None)
    try:
        yield
    finally:
        with _EAGER_LOCK:
            _EAGER_BLOCKS.pop()
            if not _EAGER_BLOCKS:
                _EAGER.close()


@contextmanager
def failures_named() -> Iterator[None]:
    """Convert errors of the compiler to RecipeError.

    They are raised by the first forward or backward pass with a shape.
    """
    try:
        yield
    except Exception as error:
        dynamo = sys.modules.get("torch._dynamo.exc")  # loaded if anything was compiled
        if dynamo is None or not isinstance(error, dynamo.TorchDynamoException):
            raise
        cause = getattr(error, "inner_exception", error)
        reason = next(filter(None, str(cause).splitlines()), "no reason given").strip()
        raise RecipeError(
            f"execution.compile: the model cannot be compiled: {type(cause).__name__}: "
            f"{reason}; remove compile"
        ) from error


def has_own_hooks(module: nn.Module) -> bool:
    """Return True if hooks run when a module is called."""
    kinds = ("forward", "forward_pre", "backward", "backward_pre")
    has_hooks = any(getattr(module, f"_{kind}_hooks") for kind in kinds)
    return has_hooks or torch_module._has_any_global_hook()


def set_forward(
    module: nn.Module, forward: Callable[..., Any], *, method: str = "forward"
) -> type[nn.Module]:
    """Give a module, in place, a forward pass (a function of it too) and return its new class.

    `method` is the one that computes it, if the class's `forward` calls another.

    An attribute `forward` would be bound to this module, so that a copy of it, or DataParallel's
    replica, would compute with the weights of the original. The new class is that of the module
    with this forward pass. Copies are of it too, but pickled ones of the class before.
    """
    base = type(module)

    def reduced(self: nn.Module, protocol: Any) -> Any:  # noqa: ANN401 -- as object's
        return _new, (base,), *base.__reduce_ex__(self, protocol)[2:]

    def copied(self: nn.Module, memo: dict[int, Any] | None = None) -> nn.Module:
        function, arguments, state, *_ = reduced(self, 4)
        twin: nn.Module = function(*arguments)
        if memo is not None:
            # Before the state is copied: modules may refer to each other in a circle.
            memo[id(self)] = twin
            state = copy.deepcopy(state, memo)
        twin.__setstate__(state)
        twin.__class__ = type(self)
        return twin

    # The class looks like the one before: `print(model)` and errors show no difference.
    names = ("__module__", "__qualname__", "__doc__")
    content = {name: getattr(base, name) for name in names}
    content |= {method: forward, "__reduce_ex__": reduced}
    content |= {"__copy__": copied, "__deepcopy__": copied}
    kind = type(base.__name__, (base,), content)
    module.__class__ = kind
    return kind


def _new(kind: type[nn.Module]) -> nn.Module:
    """Return a module without attributes, which a pickled one is read into."""
    return kind.__new__(kind)


def watch_host(model: nn.Module) -> Callable[[], str | None]:
    """Return a function that names what has changed since in the modules; None if nothing.

    Compared is what a replay does not change: numbers, words, containers, random generators and
    tensors of the host by their values, and tensors of a device by their addresses.
    """

    def read(seen: dict[int, tuple[int, object]]) -> dict[str, object]:
        seen |= {id(module): (place, module) for place, module in enumerate(model.modules())}
        return {
            f"{name} of {place or 'the model'}": _state_of(value, seen)
            for place, module in model.named_modules()
            for name, value in {**vars(module), **module._parameters, **module._buffers}.items()
            if name not in {"num_spans", "_parameters", "_buffers"}  # spans are counted anyway
        }

    alive: dict[int, tuple[int, object]] = {}
    kept = read(alive), alive  # so that no new tensor gets the address of an old one

    def changed() -> str | None:
        before, now = kept[0], read({})
        return next((it for it in {**before, **now} if before.get(it) != now.get(it)), None)

    return changed


def _state_of(value: object, seen: dict[int, tuple[int, object]]) -> object:
    """Return the numbers, words and addresses of a value; add to `seen` what was looked into."""
    if isinstance(value, int | float | str | bytes | None):
        return value
    if id(value) in seen:
        return seen[id(value)][0]
    seen[id(value)] = len(seen), value
    content = vars(value) if isinstance(value, nn.Module) else value
    if isinstance(content, dict):
        content = list(content.items())
    if isinstance(content, list | tuple | set | frozenset | deque):
        return [_state_of(it, seen) for it in content]
    if isinstance(content, torch.Generator):
        content = content.get_state()
    with suppress(Exception):  # objects that cannot be pickled raise all kinds
        if isinstance(content, Tensor):
            on_host = content.device.type == "cpu"
            return checksum({"": content}) if on_host else (id(content), content.data_ptr())
        if type(content).__module__.partition(".")[0] not in {"torch", "triton", "largebatch"}:
            return _state_of(content.__reduce_ex__(4), seen)
    return repr(content)  # objects of these libraries hold no numbers that passes decide by


def needs_host(model: nn.Module) -> str | None:
    """Return why a graph cannot replay a model's passes; None if nothing is known against it."""
    hooked = [type(layer).__name__ for layer in model.modules() if has_own_hooks(layer)]
    for name, weight in model.named_parameters():
        if weight._backward_hooks or len(weight._post_accumulate_grad_hooks or ()) > 1:
            hooked.append(name)  # besides the hook of a Reducer
    if hooked:
        return f"{hooked[0]} has hooks, which may decide on the host"
    return "the model is on several devices" if is_on_several_devices(model) else None


def is_on_several_devices(model: nn.Module) -> bool:
    """Return True if the tensors of a model are on several devices."""
    return len({tensor.device for tensor in (*model.parameters(), *model.buffers())}) > 1


def _kinds(value: nn.Module | Tensor) -> set[str]:
    """Return the names of the class of a module or tensor and of its base classes.

    Names are compared, because importing FSDP takes seconds and apex and timm may be missing.
    """
    return {kind.__name__ for kind in type(value).__mro__}


class MeanOfViews(nn.Module):
    """Average a model's logits over 2 or 6 views of each image, N x C x H x W, H and W 2 or more.

    2 views: the image and its mirror image. 6: these count half, and the same two moved by one
    pixel up and left, and down and right, a quarter each; reflection fills the borders, as in
    airbench (arXiv:2404.00498, section 3.5).
    """

    def __init__(self, model: nn.Module, *, views: int) -> None:
        super().__init__()
        self.model = model
        self.moves = views > 2

    def forward(self, images: Tensor) -> Tensor:
        """Return the mean logits, N x K."""
        logits = self._mirrored(images)
        if not self.moves:
            return logits
        height, width = images.shape[2:]
        larger = F.pad(images, (1, 1, 1, 1), "reflect")
        # The padding is one pixel on each side, so offset 1 would be the image itself.
        moved = [larger[..., y : y + height, y : y + width] for y in (0, 2)]
        logits_of_moved = torch.stack([self._mirrored(views) for views in moved])
        return torch.lerp(logits, logits_of_moved.mean(0), 0.5)

    def _mirrored(self, images: Tensor) -> Tensor:
        views = (images, images.flip(-1))
        return torch.stack([logits_of(self.model(view)) for view in views]).mean(0)
