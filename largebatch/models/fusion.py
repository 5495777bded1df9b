"""BatchNorm paired with the sum and the ReLU behind it, for the kernels that compute all three.

`pair` reads the forward pass of each block with torch.fx, and gives the block one in which a pair
is a single call. The call uses the kernels where they take the batch, in training and without hooks
on the modules; otherwise it calls the modules, as before. Modules, names and `state_dict` stay.
"""

import operator
from collections.abc import Iterator
from types import MethodType

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from largebatch.models import kernels
from largebatch.models.batchnorm import SpanBatchNorm, has_hooks
from largebatch.models.wrappers import device_of, mode

_RELU = {F.relu, F.relu_, torch.relu, torch.relu_, "relu", "relu_"}
_ADD = {operator.add, operator.iadd, torch.add, "add", "add_"}
"""Functions, and methods by name."""

_PAIRS = "num_pairs"
"""Attribute of a block with pairs: their number."""


def pair(model: nn.Module) -> tuple[int, int]:
    """Pair layers in place; return the number of BatchNorm layers in pairs, and of all.

    A layer stays as it is if its block cannot be traced, or depends on the mode it is in, or if its
    input or result is used elsewhere. Call this last: a traced block keeps the attributes that its
    forward pass reads (drop rates, gradient checkpointing).
    """
    for block in model.modules():
        if not isinstance(block, SpanBatchNorm):
            _pair_in(block)
    return count_pairs(model)


def count_pairs(model: nn.Module) -> tuple[int, int]:
    """Return the number of BatchNorm layers in pairs, and of all that have a span."""
    layers = [layer for layer in model.modules() if isinstance(layer, SpanBatchNorm)]
    inside = sum(layer.ends_in_relu() for layer in layers)
    return inside + sum(vars(block).get(_PAIRS, 0) for block in model.modules()), len(layers)


def describe_pairs(model: nn.Module) -> Iterator[str]:
    """Yield a sentence for the log if pairs run in the kernels."""
    found, num = count_pairs(model)
    if found and kernels.take(torch.empty(1, 1, device=device_of(model))):
        yield f"{found} of {num} BatchNorm layers run in one kernel with the ReLU behind them"


def norm_relu(
    norm: nn.Module, relu: nn.Module | None, images: Tensor, other: Tensor | None = None
) -> Tensor:
    """Normalise N x C x ... images, add `other` if any, and apply ReLU (the module, if any)."""
    own = isinstance(norm, SpanBatchNorm) and norm.training and not has_hooks(norm)
    fits = relu is None or (type(relu) is nn.ReLU and not has_hooks(relu))  # also after `pair`
    if own and fits and kernels.take(images, other):
        return norm.normalise(images, other, relu=True)  # type: ignore[no-any-return, operator]  # as `own` says
    out = norm(images)
    if other is not None:
        out = out + other
    result: Tensor = F.relu(out) if relu is None else relu(out)
    return result


class _Tracer(fx.Tracer):
    """Reads the forward pass of one module, with its children as they are."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:  # noqa: ARG002 -- torch's signature
        return True


def _pair_in(block: nn.Module) -> None:
    if "forward" in vars(block) or not any(isinstance(m, SpanBatchNorm) for m in block.modules()):
        return
    graphs = [_trace(block, training=training) for training in (True, False)]
    graph = graphs[0]
    if graph is None or str(graph) != str(graphs[1]):
        return
    num = sum(_replace(block, graph, node) for node in list(graph.nodes) if _norm(block, node))
    if num:
        graph.lint()
        made = fx.GraphModule(block, graph)
        block.forward = MethodType(type(made).forward, block)
        setattr(block, _PAIRS, num)


def _trace(block: nn.Module, *, training: bool) -> fx.Graph | None:
    """Return the calls of the forward pass; None if they depend on values or change the module."""
    before = dict(vars(block))
    try:
        with mode(block, training=training):
            graph = _Tracer().trace(block)
        return graph if vars(block) == before else None  # raises for tensors
    except Exception:
        return None


def _replace(block: nn.Module, graph: fx.Graph, norm: fx.Node) -> bool:
    """Replace a BatchNorm and the ReLU behind it, and a sum between them, by one call."""
    gone, end, other = [norm], _only_user(norm), None
    while end is not None and _is(block, end, set(), nn.Identity):  # timm's for what is left out
        gone, end = [*gone, end], _only_user(end)
    if end is not None and _is(block, end, _ADD, None) and not end.kwargs:
        others = [each for each in end.args if each is not gone[-1] and isinstance(each, fx.Node)]
        in_place = end.target in {operator.iadd, "add_"}
        if len(others) != 1 or (in_place and end.args[0] is not gone[-1]):
            return False
        other, gone, end = others[0], [*gone, end], _only_user(end)
    if end is None or not _is(block, end, _RELU, nn.ReLU):
        return False
    with graph.inserting_before(end):
        layer = graph.get_attr(str(norm.target))
        relu = graph.get_attr(str(end.target)) if end.op == "call_module" else None
        call = graph.call_function(norm_relu, (layer, relu, norm.args[0], other))
    end.replace_all_uses_with(call)
    for node in (end, *reversed(gone)):
        graph.erase_node(node)
    return True


def _norm(block: nn.Module, node: fx.Node) -> bool:
    """Return True for a call of a BatchNorm without an activation inside, on a value of its own."""
    if node.op != "call_module":
        return False
    layer = block.get_submodule(str(node.target))
    alone = isinstance(layer, SpanBatchNorm) and not list(layer.children())
    inputs = node.all_input_nodes
    return alone and len(inputs) == len(node.args) == 1 and len(inputs[0].users) == 1


def _only_user(node: fx.Node) -> fx.Node | None:
    users = list(node.users)
    return users[0] if len(users) == 1 else None


def _is(block: nn.Module, node: fx.Node, functions: set[object], kind: type | None) -> bool:
    """Return True for a call of one of the functions or methods, or of a module of this class."""
    if node.op == "call_module":
        return type(block.get_submodule(str(node.target))) is kind
    return node.op in {"call_function", "call_method"} and node.target in functions
