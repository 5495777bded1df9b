"""BatchNorm paired with the sum and the ReLU behind it, for the kernels that compute all three.

`pair` reads the forward pass of each block with torch.fx, and gives the block one in which a pair
is a single call. The call uses the kernels where they take the batch, in training and without hooks
on the modules; otherwise it calls the modules, as before. Modules, names and `state_dict` stay.

torch.fx records one path through Python's branches. So a block is read only if modules and plain
attributes of its own decide every call, which its compiled code shows (`_names`), and its own
forward pass is used again as soon as one of them differs.
"""

import dis
import inspect
import operator
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.modules.conv import _ConvNd

from largebatch.models import kernels
from largebatch.models.batchnorm import SpanBatchNorm, has_hooks, relu_is_torchs
from largebatch.models.wrappers import mode, set_forward

_RELU = {F.relu, F.relu_, torch.relu, torch.relu_, "relu", "relu_"}
_ADD = {operator.add, operator.iadd, torch.add, "add", "add_"}
"""Functions, and methods by name."""

_CALLS = {*_RELU, *_ADD, "dropout", "flatten", "is_scripting", "jit", "mean", "pad"}
"""Functions and methods of torch that a forward pass may call; others are not known here."""

_PLACES = (F, torch, Tensor)
_FUNCTIONS = (
    "relu",
    "relu_",
    "add",
    "add_",
    "dropout",
    "flatten",
    "mean",
    "pad",
)
"""Where those that may be called are, and under which names."""

_NUM_PAIRS = "_num_paired_layers"
"""Attribute of the class of a block with pairs: the number of BatchNorm layers in them."""

_REFUSED = {"FOR_ITER", "MAKE_FUNCTION", "STORE_ATTR"}
"""Instructions of a forward pass that torch.fx runs only once, or that hide others."""


def pair(model: nn.Module) -> tuple[int, int]:
    """Pair layers in place; return the number of BatchNorm layers in pairs, and of all.

    A layer stays as it is if its input or result is used elsewhere, or if its block takes more than
    one argument, depends on the mode it is in or on anything but its modules and plain attributes,
    or changes itself. A pickled copy has no pairs; a deep copy has.
    """
    for block in model.modules():
        if any(isinstance(child, SpanBatchNorm) for child in block.children()):
            _pair_in(block)
    return count_pairs(model)


def count_pairs(model: nn.Module) -> tuple[int, int]:
    """Return the number of BatchNorm layers in pairs, and of all that have a span."""
    layers = [layer for layer in model.modules() if isinstance(layer, SpanBatchNorm)]
    inside = sum(layer.ends_in_relu() for layer in layers)
    return inside + sum(getattr(block, _NUM_PAIRS, 0) for block in model.modules()), len(layers)


def describe_pairs(model: nn.Module) -> Iterator[str]:
    """Yield a sentence for the log if pairs run in the kernels."""
    found, num = count_pairs(model)
    # Results of convolutions have the type and memory format of their weights.
    weights = [each.weight for each in model.modules() if isinstance(each, (_ConvNd, nn.Linear))]
    if found and all(map(kernels.take, weights)):
        yield f"{found} of {num} BatchNorm layers run in one kernel with the ReLU behind them"


def norm_relu(
    norm: nn.Module,
    relu: nn.Module | None,
    images: Tensor,
    other: Tensor | None = None,
    *between: nn.Module,
) -> Tensor:
    """Normalise N x C x ... images, add `other` if any, and apply ReLU (the module, if any).

    `between` are modules behind the BatchNorm that do nothing, unless they have hooks.
    """
    fits = relu is None or type(relu) is nn.ReLU  # also after `pair`
    if type(norm) is SpanBatchNorm and norm.training and fits and relu_is_torchs():
        modules = [norm, *between] if relu is None else [norm, *between, relu]
        if not any(map(has_hooks, modules)) and kernels.take(images, other, span=norm.span):
            return norm.normalise(images, other, relu=True)
    out = norm(images)
    for module in between:
        out = module(out)
    if other is not None:
        out = out + other
    result: Tensor = F.relu(out) if relu is None else relu(out)
    return result


def _pair_in(block: nn.Module) -> None:
    own: Any = type(block).forward
    if "forward" in vars(block) or hasattr(block, _NUM_PAIRS):
        return
    graphs, tracer = [], fx.Tracer()
    tracer.is_leaf_module = lambda *_: True  # type: ignore[method-assign]  # children stay
    try:
        names = sorted(_names(block, own) - {"training"})  # both modes are traced
        for training in (True, False):
            with mode(block, training=training):
                graphs.append(tracer.trace(block))
    except Exception:  # torch.fx raises all kinds
        return
    graph, nodes = graphs[0], list(graphs[0].nodes)
    inputs = [node.target for node in nodes if node.op == "placeholder" and not node.args]
    inside = any("." in str(node.target) for node in nodes if node.op == "call_module")
    if str(graph) != str(graphs[1]) or inside or len(inputs) != 1 or inputs[0][0] == "*":
        return
    num = sum(_replace(block, graph, node) for node in nodes if _norm(block, node))
    if not num:
        return
    paired: Any = type(fx.GraphModule(block, graph)).forward
    kind = type(block)
    before = _form(block, kind, names)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 -- the block's
        if _form(self, kind, names) == before:
            return paired(self, *args, **kwargs)
        return kind.forward(self, *args, **kwargs)  # its own, or one that was set later

    setattr(set_forward(block, forward), _NUM_PAIRS, num)


def _form(block: nn.Module, kind: type[nn.Module], names: list[str]) -> list[object]:
    """Return what decides the calls of a forward pass that reads these attributes.

    They are the modules, plain attributes and methods of the block, and the functions of torch,
    each of which may be replaced later.
    """
    modules = [(name, type(module)) for name, module in block._modules.items()]
    methods = [getattr(kind, name, None) for name in ("forward", *names)]
    functions = [getattr(place, name, None) for place in _PLACES for name in _FUNCTIONS]
    plain = ((type(it), it) for it in map(block.__dict__.get, names))
    return [*modules, *methods, *functions, *plain]


def _names(block: nn.Module, function: Any) -> set[str]:  # noqa: ANN401 -- a method
    """Return the attributes, besides modules, that decide the calls of a method.

    Raises ValueError if anything else may: other code, other objects, values that are None.
    """
    if function is nn.Sequential.forward:
        return set()
    used = inspect.getclosurevars(function)
    outside = [value for name, value in used.globals.items() if name != "checkpoint_seq"]  # timm's
    known = all(value in (torch, F, nn) for value in outside)
    for before, code in pairwise(dis.get_instructions(function)):
        if code.opname == "IS_OP" or "_NONE" in code.opname:
            known = known and before.opname == "LOAD_ATTR"  # a traced value is never None
        known = known and code.opname not in _REFUSED
    recomputes = vars(block).get("grad_checkpointing")
    if not known or recomputes or used.nonlocals or used.builtins.keys() - {"float"}:
        raise ValueError(function.__name__)
    found = set()
    for name in used.unbound - block._modules.keys():
        method = getattr(type(block), name, None)
        if inspect.isfunction(method):
            found |= {name, *_names(block, method)}
        elif isinstance(vars(block).get(name, ...), int | float | str | None):
            found.add(name)
        elif name in vars(block) or name not in _CALLS:
            raise ValueError(name)
    return found


def _replace(block: nn.Module, graph: fx.Graph, norm: fx.Node) -> bool:
    """Replace a BatchNorm and the ReLU behind it, and a sum between them, by one call."""
    gone, end, other = [norm], _only_user(norm), None
    while end is not None and _is(block, end, set(), nn.Identity):  # timm's for what is left out
        gone, end = [*gone, end], _only_user(end)
    between = [node.target for node in gone[1:]]
    if end is not None and _is(block, end, _ADD, None) and not end.kwargs:
        others = [each for each in end.args if each is not gone[-1] and isinstance(each, fx.Node)]
        in_place = end.target in {operator.iadd, "add_"}
        if len(others) != 1 or (in_place and end.args[0] is not gone[-1]):
            return False
        other, gone, end = others[0], [*gone, end], _only_user(end)
    if end is None or not _is(block, end, _RELU, nn.ReLU):
        return False
    with graph.inserting_before(gone[-1]):  # where the sum reads `other`, which may change later
        layer, *nothing = (graph.get_attr(str(target)) for target in [norm.target, *between])
        relu = graph.get_attr(str(end.target)) if end.op == "call_module" else None
        call = graph.call_function(norm_relu, (layer, relu, norm.args[0], other, *nothing))
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
