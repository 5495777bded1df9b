"""Optimizers whose tensors on a GPU are updated together, by `table`."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, StateDict

from largebatch import accelerator
from largebatch.optim.kernels import Rule, works

SHORT = (torch.float16, torch.bfloat16)
"""Types that are too short to accumulate small steps."""

SAVED = {"momentum_buffer", "master"}
"""Keys of a parameter's state; `master` only for short parameters."""


class Tabled(Optimizer):
    """Base of LARS and SGD: momentum with a buffer for each parameter.

    The attributes are of the class, because a copy of an optimizer has only its groups and state.
    """

    _tables: Sequence["_Tabled"] = ()
    """Tables of the last step, one per GPU."""

    _made_for: object = None
    """`_layout` for which the tables were made; None to make them in every step."""

    _grads: Sequence[int] = ()
    """Addresses of the gradients of the last step."""

    _others = True
    """True if there may be parameters outside the tables."""

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load hyper-parameters and momentum."""
        super().load_state_dict(state_dict)
        self._made_for = None

    def _update_tables(
        self, rules: Sequence[Rule], scale: Tensor | None, found_inf: Tensor | None
    ) -> list[tuple[list[Tensor], Tensor]]:
        """Update all parameters in tables, and return adapted ones with their ratios.

        `rules` are those of the groups; `scale` and `found_inf` are those of a GradScaler.
        """
        layout, addresses = self._layout()
        if layout is None or layout != self._made_for:
            self._make_tables(layout)
            self._grads = addresses
        else:
            self._find_grads(addresses)
        found = []
        for tabled in self._tables:
            scales = [it if it is None else it.to(tabled.device) for it in (scale, found_inf)]
            ratios = tabled.table.update(rules, *scales)
            found.append((tabled.adapted, ratios[: len(tabled.adapted)]))
            for target, source in tabled.copies:
                target.copy_(source)
        return found

    def can_replay(self) -> bool:
        """Return True if a graph may repeat the last step: it reads all numbers from tables."""
        return self._made_for is not None and not self._others

    def refresh(self) -> None:
        """Copy hyper-parameters and addresses of gradients to the tables: before a replay."""
        self._find_grads(self._layout()[1])
        for tabled in self._tables:
            tabled.table.use(self._rules())

    def _rules(self) -> list[Rule]:
        """Return the rule of each group."""
        raise NotImplementedError

    def _find_grads(self, addresses: Sequence[int]) -> None:
        if addresses == self._grads:
            return
        for tabled in self._tables:
            tabled.table.move_grads([it.grad for it in tabled.parameters])
        self._grads = [] if accelerator.is_recording() else addresses  # [] is sent again

    def _layout(self) -> tuple[object, list[int]]:
        """Return what the tables depend on, and the addresses of gradients.

        The first is None without a GPU that has the kernels of tables. This runs in every step.
        """
        weights = [weight for group in self.param_groups for weight in group["params"]]
        if not any(works(device) for device in {weight.device for weight in weights}):
            return None, []
        kinds = [
            (it.get("adapt"), it.get("kernels"), len(it["params"])) for it in self.param_groups
        ]
        states = [
            value.data_ptr()
            for state in self.state.values()
            for key, value in state.items()
            if key in SAVED
        ]
        grads = [weight.grad for weight in weights]
        if any(grad is not None and grad.layout is not torch.strided for grad in grads):
            return object(), []  # `_gather` refuses it
        kept = [
            None if grad is None else (grad.stride(), grad.numel(), grad.dtype) for grad in grads
        ]
        layout = kinds, states, kept, [weight.data_ptr() for weight in weights]
        return layout, [grad.data_ptr() for grad in grads if grad is not None]

    def _make_tables(self, layout: object) -> None:
        """Make the table of each GPU, for later steps too unless tensors must be copied."""
        self._tables, self._others, self._made_for = [], layout is None, None
        if layout is None:
            return
        found: dict[torch.device, list[tuple[int, bool, _Lists]]] = {}
        for number, group in enumerate(self.param_groups):
            for (device, _), lists in self._gather(group, tabled=True).items():
                found.setdefault(device, []).append((number, group.get("adapt", False), lists))
        self._tables = [_Tabled(device, parts) for device, parts in found.items()]
        self._others = any(self._gather(group) for group in self.param_groups)
        if all(tabled.is_lasting for tabled in self._tables):
            self._made_for, _ = self._layout()  # again, because the state may have been created

    def _gather(
        self, group: dict[str, Any], *, tabled: bool = False
    ) -> "dict[tuple[torch.device, torch.dtype], _Lists]":
        """Return the tensors of a group's update by device and type: in tables, or all others."""
        found: dict[tuple[torch.device, torch.dtype], _Lists] = {}
        for weight in group["params"]:
            if weight.grad is None or weight.numel() == 0 or _in_table(weight, group) != tabled:
                continue
            if weight.grad.layout is not torch.strided:
                raise ValueError(
                    f"{type(self).__name__} needs dense gradients, got {weight.grad.layout} for a "
                    f"parameter of shape {tuple(weight.shape)}; an embedding gives them with "
                    "sparse=False"
                )
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


def _in_table(weight: Tensor, group: dict[str, Any]) -> bool:
    return (
        works(weight.device)
        and group.get("kernels", "torch") == "torch"
        and weight.dtype in {torch.float32, *SHORT}
        and weight.data_ptr() != 0  # 0: a subclass that holds other tensors, such as DTensor
    )


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
