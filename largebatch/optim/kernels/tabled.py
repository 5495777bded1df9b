"""Optimizers whose tensors on a GPU are updated together, by `table`."""

import math
import operator
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from types import NoneType
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, _global_optimizer_pre_hooks

from largebatch import accelerator
from largebatch.optim.kernels import Rule, works

SHORT = (torch.float16, torch.bfloat16)
"""Types that are too short to accumulate small steps."""

SAVED = {"momentum_buffer", "master"}
"""Keys of a parameter's state; `master` only for short parameters."""

_KEYS = ("adapt", "kernels", "dampening", "maximize")
"""Keys of a group that decide what is in a table."""


class Tabled(Optimizer):
    """Base of LARS and SGD: momentum with a buffer for each parameter.

    The attributes are of the class, because a copy of an optimizer has only its groups and state.
    """

    _tables: Sequence["_Tabled"] = ()
    """Tables of the last step, one per GPU."""

    _made_for: "_Made | None" = None
    """What the tables were made for; None to make them in every step."""

    _addresses: Sequence[int] = ()
    """Addresses of the gradients of the last step."""

    _normed: Sequence[int] | None = None
    """Versions of the tensors whose norms a table has; None to compute norms in the next step."""

    _others = True
    """True if there may be parameters outside the tables."""

    _takes_sparse = False
    """True if `step` updates parameters outside the tables by sparse gradients too."""

    def _update_tables(
        self, rules: Sequence[Rule], scale: Tensor | None, found_inf: Tensor | None
    ) -> list[tuple[list[Tensor], Tensor]]:
        """Update all parameters in tables, and return adapted ones with their ratios.

        `rules` are those of the groups; `scale` and `found_inf` are those of a GradScaler.
        """
        if not self._find_grads():
            self._make_tables()
        normed, self._normed, found = self._normed, None, []
        has_norms = normed is not None and scale is None and normed == self._versions()
        for tabled in self._tables:
            scales = [it if it is None else it.to(tabled.device) for it in (scale, found_inf)]
            if tabled.adapted and not has_norms:
                tabled.table.norms(scales[0])
            ratios = tabled.table.update(rules, *scales)
            found.append((tabled.adapted, ratios[: len(tabled.adapted)]))
            for target, source in tabled.copies:
                target.copy_(source)
        return found

    def examine(self, weights: Iterable[Tensor]) -> Tensor | None:
        """Compute the norms of the next step, and return True if all gradients are finite.

        That is 0-d, bool, on the device. None, with nothing computed, if not all weights are in one
        table that needs norms, or hooks or the step of another package's subclass may change them
        first. If PyTorch's operations change a weight or a gradient, but not those on its `.data`,
        the step computes norms again.
        """
        self._normed = None
        hooks = self._optimizer_step_pre_hooks or _global_optimizer_pre_hooks
        is_ours = type(self).step.__module__.startswith("largebatch.")
        tabled = self._tables[0] if len(self._tables) == 1 else None
        if hooks or not is_ours or tabled is None or not tabled.adapted or not self._find_grads():
            return None
        if any(it.numel() for it in set(weights).difference(tabled.parameters)):
            return None
        self._normed = self._versions()
        return tabled.table.norms().amax() < math.inf  # in float64, which has every square

    def _versions(self) -> list[int]:
        """Return how often each weight, its state and its gradient have been written to."""
        made = self._made_for
        tensors = [] if made is None else [*made.tensors, *(it.grad for it in made.weights)]
        return [it._version for it in tensors if it is not None]

    def can_replay(self) -> object:
        """Return what a graph of the last step reads; None if no graph may repeat it."""
        return self._tables if self._find_grads() and not self._others else None

    def refresh(self) -> None:
        """Copy hyper-parameters and addresses of gradients to the tables: before a replay."""
        is_current = self._find_grads()
        assert is_current
        for tabled in self._tables:
            tabled.table.use(self._rules())

    def _rules(self) -> list[Rule]:
        """Return the rule of each group."""
        raise NotImplementedError

    def _is_tabled(self, weight: Tensor, group: dict[str, Any]) -> bool:
        """Return True if a weight that has a gradient is updated by a table."""
        return (
            works(weight.device)
            and group.get("kernels", "auto") == "auto"
            and weight.dtype in {torch.float32, *SHORT}
            and weight.data_ptr() != 0  # 0: a subclass that holds other tensors, such as DTensor
        )

    def _find_grads(self) -> bool:
        """Send the addresses of gradients that have moved; return False if the tables are outdated.

        This runs in every step, so gradients that are the same objects are not read again.
        """
        made = self._made_for
        if made is None or self._fixed()[0] != made.fixed:
            return False
        grads = [weight.grad for weight in made.weights]
        try:
            addresses = _addresses(grads)
            is_same = all(map(operator.is_, grads, map(operator.call, made.grads)))
            if addresses == self._addresses and is_same:
                return True
            if _forms(grads) != made.forms:
                return False
        except RuntimeError:  # a sparse one has neither address nor strides
            return False
        made.grads = [NoneType if it is None else weakref.ref(it) for it in grads]
        self._normed = self._normed if is_same else None
        if addresses != self._addresses:
            for tabled in self._tables:
                tabled.table.move_grads(_addresses(it.grad for it in tabled.parameters))
            self._addresses = [] if accelerator.is_recording() else addresses  # [] is sent again
        return True

    def _fixed(self) -> tuple[object, list[Tensor | None]]:
        """Return what the tables depend on besides gradients, and parameters and state."""
        groups, states = self.param_groups, self.state.values()
        weights = list(chain.from_iterable(group["params"] for group in groups))
        masters = [state["master"] for state in states if "master" in state]
        tensors = [*weights, *masters, *[state.get("momentum_buffer") for state in states]]
        settings = [(*map(it.get, _KEYS), not it["momentum"], len(it["params"])) for it in groups]
        return (settings, list(map(id, weights)), _addresses(tensors)), tensors

    def _make_tables(self) -> None:
        """Make the table of each GPU, for later steps too unless tensors must be copied."""
        self._tables, self._others, self._made_for, self._normed = [], True, None, None
        weights = [weight for group in self.param_groups for weight in group["params"]]
        if not any(works(device) for device in {weight.device for weight in weights}):
            return
        found: dict[torch.device, list[tuple[int, bool, _Lists]]] = {}
        for number, group in enumerate(self.param_groups):
            for (device, _), lists in self._gather(group, tabled=True).items():
                found.setdefault(device, []).append((number, group.get("adapt", False), lists))
        self._tables = [_Tabled(device, parts) for device, parts in found.items()]
        grads = [weight.grad for weight in weights if weight.grad is not None]
        trained = sum(grad.numel() > 0 for grad in grads)
        self._others = trained > sum(len(tabled.parameters) for tabled in self._tables)
        is_dense = all(grad.layout is torch.strided for grad in grads)
        if is_dense and all(tabled.is_lasting for tabled in self._tables):
            self._addresses = _addresses(grads)
            self._made_for = _Made(weights, *self._fixed())

    def _gather(
        self, group: dict[str, Any], *, tabled: bool = False
    ) -> "dict[tuple[torch.device, torch.dtype], _Lists]":
        """Return the tensors of a group's update by device and type: in tables, or all others."""
        found: dict[tuple[torch.device, torch.dtype], _Lists] = {}
        for weight in group["params"]:
            if weight.grad is None or weight.numel() == 0:
                continue
            if weight.grad.layout is not torch.strided and not self._takes_sparse:
                raise ValueError(
                    f"{type(self).__name__} needs dense gradients, got {weight.grad.layout} for a "
                    f"parameter of shape {tuple(weight.shape)}; an embedding gives them with "
                    "sparse=False"
                )
            if self._is_tabled(weight, group) != tabled:
                continue
            state = self.state[weight]
            exact = _exact(weight, state)
            lists = found.setdefault((exact.device, exact.dtype), _Lists())
            lists.weights.append(exact)
            lists.grads.append(weight.grad)
            lists.buffers.append(_buffer(exact, state))
            lists.parameters.append(weight)
            if exact is not weight:
                lists.exact.append(exact)
                lists.rounded.append(weight)
        return found


class _Made:
    """What tables were made for. It keeps the state, whose memory no other tensor then gets."""

    def __init__(self, weights: list[Tensor], fixed: object, tensors: list[Tensor | None]) -> None:
        self.weights, self.fixed, self.tensors = weights, fixed, tensors
        self.forms = _forms([weight.grad for weight in weights])
        self.grads: list[Callable[[], object]] = [object]  # none is the same yet


@dataclass(frozen=True, slots=True)
class _Lists:
    weights: list[Tensor] = field(default_factory=list)
    grads: list[Tensor] = field(default_factory=list)
    buffers: list[Tensor] = field(default_factory=list)
    parameters: list[Tensor] = field(default_factory=list)
    exact: list[Tensor] = field(default_factory=list)
    rounded: list[Tensor] = field(default_factory=list)
    """Parameters that are copied from `exact` after the update of `exact`."""


class _Tabled:
    """The table of a GPU: made of lists, adapted parameters first, whose ratios are kept."""

    def __init__(self, device: torch.device, parts: list[tuple[int, bool, "_Lists"]]) -> None:
        from largebatch.optim.kernels.table import Table

        parts = sorted(parts, key=lambda part: not part[1])
        self.device = device
        self.adapted = [it for _, adapt, lists in parts if adapt for it in lists.parameters]
        weights, grads, buffers, parameters = (
            list(chain.from_iterable(getattr(lists, name) for _, _, lists in parts))
            for name in ("weights", "grads", "buffers", "parameters")
        )
        self.parameters = parameters
        pairs = list(zip(parameters, weights, strict=True))
        rounded = [it if it.stride() == exact.stride() else exact for it, exact in pairs]
        self._grads = as_models(grads, rounded)
        self.copies = [pair for pair, own in zip(pairs, rounded, strict=True) if own is not pair[0]]
        """Parameters in another layout, and what is copied to them after the update."""

        same = all(_is_same(ours, given) for ours, given in zip(self._grads, grads, strict=True))
        self.is_lasting = same and not self.copies
        """True if the table holds for later steps, with the same addresses."""

        groups = [number for number, _, lists in parts for _ in lists.weights]
        self.table = Table(weights, self._grads, buffers, rounded, groups)
        if self.is_lasting:
            self._grads = []  # the table needs only addresses; references would keep the memory


def _exact(weight: Tensor, state: dict[str, Any]) -> Tensor:
    """Return the tensor to update: the weight, its float32 master, or a contiguous copy."""
    if weight.dtype in SHORT and "master" in state:
        master: Tensor = state["master"].to(weight.device)
        state["master"] = master
        return master
    ordered = weight.is_contiguous() or weight.is_contiguous(memory_format=torch.channels_last)
    exact = weight if ordered else weight.contiguous()
    if weight.dtype in SHORT:
        exact = state["master"] = exact.float()
    return exact


def _form(tensor: Tensor) -> tuple[torch.dtype, torch.device, tuple[int, ...]]:
    return tensor.dtype, tensor.device, tensor.stride()


def _buffer(weight: Tensor, state: dict[str, Any]) -> Tensor:
    """Return the momentum buffer in the weight's type and memory layout, on its device."""
    buffer: Tensor | None = state.get("momentum_buffer")
    if buffer is None:
        buffer = torch.zeros_like(weight)
    elif _form(buffer) != _form(weight):  # possibly from a checkpoint
        buffer = torch.empty_like(weight).copy_(buffer)
    state["momentum_buffer"] = buffer
    return buffer


def _addresses(tensors: Iterable[Tensor | None]) -> list[int]:
    return [it.data_ptr() for it in tensors if it is not None]


def _forms(grads: Iterable[Tensor | None]) -> object:
    return [None if it is None else (it.stride(), it.numel(), it.dtype) for it in grads]


def _is_same(one: Tensor, other: Tensor) -> bool:
    return one is other or one.data_ptr() == other.data_ptr()


def _fitted(tensor: Tensor, model: Tensor) -> Tensor:
    """Return a tensor in the form of the model: itself, a view, or memory to copy it to."""
    if _form(tensor) == _form(model):
        return tensor
    strides = zip(model.shape, tensor.stride(), model.stride(), strict=True)
    if tensor.dtype == model.dtype and all(size == 1 or a == b for size, a, b in strides):
        return tensor.as_strided(model.shape, model.stride())  # as of a 1 x 1 convolution
    return torch.empty_like(model)


def as_models(tensors: Sequence[Tensor], models: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors in the type and layout of the models; copy those that differ."""
    fitted = [_fitted(tensor, model) for tensor, model in zip(tensors, models, strict=True)]
    pairs = [it for it in zip(fitted, tensors, strict=True) if not _is_same(*it)]
    if pairs:
        torch._foreach_copy_([copy for copy, _ in pairs], [tensor for _, tensor in pairs])
    return fitted
