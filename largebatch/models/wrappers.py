"""Models as they are held in a training loop: parallel, compiled, averaged.

A forward pass of DistributedDataParallel broadcasts buffers, one of FSDP gathers weights: workers
that hold different numbers of batches, or none, would wait for each other. Measuring needs only the
module inside, which every worker has whole under DistributedDataParallel.
"""

import sys
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn

_PARALLEL = {"DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "FSDPModule"}
"""Classes whose forward pass is no matter of one worker and device: torch's, and apex's."""

_INSIDE = {
    "AveragedModel": "module",
    "DataParallel": "module",
    "DistributedDataParallel": "module",
    "ModelEmaV3": "module",
    "OptimizedModule": "_orig_mod",
}
"""Where wrappers keep the module that they call, by class: torch's, and timm's (ModelEma)."""


def local_model(model: nn.Module) -> nn.Module:
    """Return the model, or the outermost module inside it whose forward pass is this worker's own.

    Raises ValueError where the model is sharded, or parallel somewhere inside.
    """
    while parallel := [(name, m) for name, m in model.named_modules() if _kinds(m) & _PARALLEL]:
        attribute = next((_INSIDE[kind] for kind in _kinds(model) & _INSIDE.keys()), None)
        if attribute is None:
            name, module = parallel[0]
            raise ValueError(
                f"{f'layer {name}' if name else 'the model'} is a {type(module).__name__}, whose "
                "forward pass waits for other workers or devices; pass the module inside, or a "
                "copy of it that this worker holds whole"
            )
        model = model.get_submodule(attribute)
    return model


def device_of(model: nn.Module) -> torch.device:
    """Return where the first of the model's tensors lives; the CPU for a model that has none."""
    for tensors in (model.parameters(), model.buffers()):
        for tensor in tensors:
            return tensor.device
    return torch.device("cpu")


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put every module into evaluation mode, and each back into its own on exit.

    Flags are set one by one: a module may do more than that in its own train() and eval().
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
    """Let compiled modules run as they are written: hooks on their layers are no part of a graph.

    The compiler takes seconds to import; where nothing has done that, nothing is compiled.
    """
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    eager: AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
    return eager


def keep_in_place(tensors: Iterable[Tensor]) -> None:
    """Declare that tensors stay where they are, so that CUDA graphs may write to them.

    As `uncompiled`, it does nothing where nothing has imported the compiler.
    """
    if "torch._dynamo" in sys.modules:
        for tensor in tensors:
            torch._dynamo.mark_static_address(tensor, guard=False)


def _kinds(module: nn.Module) -> set[str]:
    """Return the names of the module's class and of all that it inherits from.

    By name, because importing FSDP takes seconds and apex and timm may not be installed.
    """
    return {kind.__name__ for kind in type(module).__mro__}
