"""What a graph must know of an optimizer, of this package or any other (see training/graph.py)."""

from torch import Tensor
from torch.optim.optimizer import (
    Optimizer,
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
)

from largebatch.accelerator import Replayable


def refusal(optimizer: Optimizer) -> str | None:
    """Return why a graph cannot repeat an optimizer's step as things are; None if it can."""
    name = type(optimizer).__name__
    hooks = (
        optimizer._optimizer_step_pre_hooks,
        optimizer._optimizer_step_post_hooks,
        _global_optimizer_pre_hooks,
        _global_optimizer_post_hooks,
    )
    if any(hooks):
        return f"{name} has hooks, which may decide on the host"
    if not isinstance(optimizer, Replayable):
        return f"{name} needs the host here"
    return optimizer.refusal()


def reads(optimizer: Optimizer) -> object:
    """Return what a graph of an optimizer's step has fixed: if it changes, the graph is of no use.

    Addresses of its state, and what it names itself.
    """
    tensors = [it for state in optimizer.state.values() for it in state.values()]
    addresses = [tensor.data_ptr() for tensor in tensors if isinstance(tensor, Tensor)]
    return addresses, optimizer.reads() if isinstance(optimizer, Replayable) else None
