"""Wrapped models: parallel, compiled or averaged.

A forward pass of DistributedDataParallel broadcasts buffers, and one of FSDP gathers weights:
workers with different numbers of batches, or none, would wait for each other. Evaluation and
polishing need only the inner module, which is complete on every worker under
DistributedDataParallel.
"""

import sys
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn

_PARALLEL = {"DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "FSDPModule"}
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

    Raises ValueError if the model is sharded, or has a parallel module inside.
    """
    while parallel := [(name, m) for name, m in model.named_modules() if _kinds(m) & _PARALLEL]:
        attribute = next((_INSIDE[kind] for kind in _kinds(model) & _INSIDE.keys()), None)
        if attribute is None:
            name, module = parallel[0]
            raise ValueError(
                f"{f'layer {name}' if name else 'the model'} is a {type(module).__name__}, whose "
                "forward pass waits for other workers or devices; pass the inner module, or a "
                "complete copy of it"
            )
        model = model.get_submodule(attribute)
    return model


def device_of(model: nn.Module) -> torch.device:
    """Return the device of the model's first tensor; the CPU for a model without tensors."""
    for tensors in (model.parameters(), model.buffers()):
        for tensor in tensors:
            return tensor.device
    return torch.device("cpu")


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Set every module to evaluation mode, and restore each module's mode on exit.

    The flags are set directly, because a module's train() and eval() may do more than that.
    """
    modes = {module: module.training for module in model.modules()}
    try:
        for module in modes:
            module.training = False
        yield
    finally:
        for module, training in modes.items():
            module.training = training


def uncompiled() -> AbstractContextManager[object]:
    """Run compiled modules uncompiled, because graphs do not include hooks added later.

    Importing the compiler takes seconds; if it was not imported, nothing is compiled.
    """
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    eager: AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
    return eager


def keep_in_place(tensors: Iterable[Tensor]) -> None:
    """Declare that the tensors' addresses do not change, so that CUDA graphs may write to them.

    Does nothing if the compiler was not imported, like `uncompiled`.
    """
    if "torch._dynamo" in sys.modules:
        for tensor in tensors:
            torch._dynamo.mark_static_address(tensor, guard=False)


def _kinds(module: nn.Module) -> set[str]:
    """Return the names of the module's class and its base classes.

    Names are compared, because importing FSDP takes seconds and apex and timm may be missing.
    """
    return {kind.__name__ for kind in type(module).__mro__}
