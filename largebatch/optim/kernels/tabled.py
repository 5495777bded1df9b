"""Optimizers whose tensors on a GPU are updated together, by `table`."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, _global_optimizer_pre_hooks

from largebatch.optim.kernels import GroupRule, works

SHORT = (torch.float16, torch.bfloat16)
"""Types that are too short to accumulate small steps."""

SAVED = {"momentum_buffer", "master"}
"""Keys of a parameter's state; `master` only for short parameters."""

_KEYS = ("adapt", "kernels", "dampening", "maximize")
"""Keys of a group that decide what is in a table."""


class Tabled(Optimizer):
    """Base of LARS and SGD: momentum with a buffer for each parameter."""

    _takes_sparse = False
    """True if `step` updates parameters outside the tables by sparse gradients too."""

    def __init__(self, *args: Any, **settings: Any) -> None:  # noqa: ANN401 -- an optimizer's
        self._drop_tables()
        super().__init__(*args, **settings)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take groups and state: a copy of an optimizer has nothing else, and loading calls it."""
        super().__setstate__(state)
        self._drop_tables()

    def _drop_tables(self) -> None:
        self._tables: list[DeviceTable] = []
        """Tables of the last step, one per GPU."""

        self._made_for: _Inputs | None = None
        """The tensors that the tables were made for; None to make tables in every step."""

        self._others = True
        """True if there may be parameters outside the tables."""

    def _update_tables(
        self, rules: Sequence[GroupRule], scale: Tensor | None, found_inf: Tensor | None
    ) -> list[tuple[list[Tensor], Tensor]]:
        """Update all parameters in tables, and return adapted ones with their ratios.

        `rules` are those of the groups; `scale` and `found_inf` are those of a GradScaler.
        """
        if not self._are_current():
            self._make_tables()
        adapted = []
        for table in self._tables:
            its_scale = None if scale is None else scale.to(table.device)
            its_found_inf = None if found_inf is None else found_inf.to(table.device)
            adapted.append((table.adapted, table.step(rules, its_scale, its_found_inf)))
        return adapted

    def examine(self, weights: Iterable[Tensor]) -> Tensor | None:
        """Compute the norms of the next step, and return True if all gradients are finite.

        That is 0-d, bool, on the device. Until that step no weight and no gradient may change. None
        is returned, and nothing computed, if not all weights are in one table that needs norms, or
        if hooks or the step of another package's subclass may change them first.
        """
        # The norms would then be those of other gradients than the step reads.
        # A step of another package may change gradients by `.data` before it calls ours.
        hooks = self._optimizer_step_pre_hooks or _global_optimizer_pre_hooks
        is_ours = type(self).step.__module__.startswith("largebatch.")
        if hooks or not is_ours or len(self._tables) != 1 or not self._are_current():
            return None
        (table,) = self._tables
        outside = set(weights).difference(table.parameters)
        if not table.adapted or any(weight.numel() for weight in outside):
            return None
        return table.examine()

    def refusal(self) -> str | None:
        """Return why a graph cannot repeat the last step; None if it can."""
        if self._others or not self._are_current():
            return f"{type(self).__name__} updates some weights by PyTorch's operations"
        return None

    def reads(self) -> object:
        """Return what a graph of the last step has fixed: the tables, which hold addresses."""
        return list(self._tables)

    def refresh(self) -> None:
        """Send the hyper-parameters to the tables: before a replay."""
        for table in self._tables:
            table.send(self._rules())

    def _rules(self) -> list[GroupRule]:
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

    def _are_current(self) -> bool:
        """Return True if the tables hold for this step, with the gradients wherever they are now.

        The gradients of a `Reducer` stay, but those of a loop with zero_grad() move in every step.
        """
        if self._made_for is None or self._made_for != self._inputs():
            return False
        for table in self._tables:
            table.find_grads()
        return True

    def _inputs(self) -> "_Inputs":
        groups = self.param_groups
        states = self.state.values()
        weights = [weight for group in groups for weight in group["params"]]
        masters = [state["master"] for state in states if "master" in state]
        buffers = [state.get("momentum_buffer") for state in states]
        tensors = [*weights, *masters, *buffers]
        return _Inputs(
            settings=[
                (*map(group.get, _KEYS), group["momentum"] == 0, len(group["params"]))
                for group in groups
            ],
            weights=[id(weight) for weight in weights],
            addresses=[tensor.data_ptr() for tensor in tensors if tensor is not None],
            gradients=[_layout(weight.grad) for weight in weights],
            tensors=tensors,
        )

    def _make_tables(self) -> None:
        """Make the table of each GPU, for later steps too unless tensors must be copied."""
        self._drop_tables()
        weights = [weight for group in self.param_groups for weight in group["params"]]
        if not any(works(device) for device in {weight.device for weight in weights}):
            return
        parts: dict[torch.device, list[tuple[int, bool, TensorLists]]] = {}
        for number, group in enumerate(self.param_groups):
            for (device, _), lists in self._gather(group, tabled=True).items():
                parts.setdefault(device, []).append((number, group.get("adapt", False), lists))
        self._tables = [DeviceTable(device, its_parts) for device, its_parts in parts.items()]
        grads = [weight.grad for weight in weights if weight.grad is not None]
        trained = sum(grad.numel() > 0 for grad in grads)
        self._others = trained > sum(len(table.parameters) for table in self._tables)
        is_dense = all(grad.layout is torch.strided for grad in grads)
        # A gradient in another layout is copied, and its copy holds for this step only.
        if is_dense and all(table.is_lasting for table in self._tables):
            self._made_for = self._inputs()

    def _gather(
        self, group: dict[str, Any], *, tabled: bool = False
    ) -> "dict[tuple[torch.device, torch.dtype], TensorLists]":
        """Return the tensors of a group's update by device and type: in tables, or all others."""
        of_kinds: dict[tuple[torch.device, torch.dtype], TensorLists] = {}
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
            lists = of_kinds.setdefault((exact.device, exact.dtype), TensorLists())
            lists.weights.append(exact)
            lists.grads.append(weight.grad)
            lists.buffers.append(_buffer(exact, state))
            lists.parameters.append(weight)
            if exact is not weight:
                lists.exact.append(exact)
                lists.rounded.append(weight)
        return of_kinds


@dataclass(frozen=True, slots=True, kw_only=True)
class _Inputs:
    """What the tables of a step are made for. Equal inputs have equal tables."""

    settings: list[tuple[object, ...]]
    weights: list[int]
    addresses: list[int]
    """Addresses of weights, masters and momentum buffers, which a table holds."""

    gradients: list[object]
    tensors: list[Tensor | None] = field(compare=False)
    """The tensors with these addresses. As long as they live, no other tensor has one of them."""


@dataclass(frozen=True, slots=True)
class TensorLists:
    """The tensors of an update, each list in the order of the parameters."""

    weights: list[Tensor] = field(default_factory=list)
    grads: list[Tensor] = field(default_factory=list)
    buffers: list[Tensor] = field(default_factory=list)
    parameters: list[Tensor] = field(default_factory=list)
    exact: list[Tensor] = field(default_factory=list)
    rounded: list[Tensor] = field(default_factory=list)
    """Parameters that are copied from `exact` after the update of `exact`."""


class DeviceTable:
    """The table of a GPU: made of lists, adapted parameters first, whose ratios are computed."""

    def __init__(self, device: torch.device, parts: list[tuple[int, bool, TensorLists]]) -> None:
        from largebatch.optim.kernels.table import TensorTable

        # Adapted parameters first: the ratios of a step are then the first ones of the table.
        parts = sorted(parts, key=lambda part: not part[1])
        self.device = device
        self.adapted = [it for _, adapt, lists in parts if adapt for it in lists.parameters]
        weights, grads, buffers, parameters = (
            list(chain.from_iterable(getattr(lists, name) for _, _, lists in parts))
            for name in ("weights", "grads", "buffers", "parameters")
        )
        self.parameters = parameters
        pairs = list(zip(parameters, weights, strict=True))
        # The kernel writes the rounded weight in the layout of the exact one. A parameter in
        # another layout is copied from it afterwards.
        rounded = [it if it.stride() == exact.stride() else exact for it, exact in pairs]
        self._copies = [
            pair for pair, own in zip(pairs, rounded, strict=True) if own is not pair[0]
        ]
        fitted = as_models(grads, rounded)
        same = all(_is_same(ours, given) for ours, given in zip(fitted, grads, strict=True))
        self.is_lasting = same and not self._copies
        """True if the table holds for later steps too."""

        # Copies of gradients must live until the step; references to others would keep memory.
        self._grads = [] if self.is_lasting else fitted
        groups = [number for number, _, lists in parts for _ in lists.weights]
        self._table = TensorTable(weights, fitted, buffers, rounded, groups)
        self._has_norms = False

    def find_grads(self) -> None:
        """Read the gradients from where they are now."""
        addresses = [it.grad.data_ptr() for it in self.parameters if it.grad is not None]
        self._table.use_grads(addresses)

    def send(self, rules: Sequence[GroupRule]) -> None:
        """Send the numbers of these rules to the device."""
        self._table.use(rules)

    def examine(self) -> Tensor:
        """Compute the norms of the next step; return True if all gradients are finite."""
        self._has_norms = True
        return self._table.norms().amax() < math.inf  # in float64, which has every square

    def step(
        self, rules: Sequence[GroupRule], scale: Tensor | None, found_inf: Tensor | None
    ) -> Tensor:
        """Update the parameters; return the ratios of the adapted ones."""
        has_norms = self._has_norms and scale is None  # those are of gradients without a scale
        self._has_norms = False
        if self.adapted and not has_norms:
            self._table.norms(scale)
        ratios = self._table.update(rules, scale, found_inf)
        for parameter, exact in self._copies:
            parameter.copy_(exact)
        return ratios[: len(self.adapted)]


def _exact(weight: Tensor, state: dict[str, Any]) -> Tensor:
    """Return the tensor to update: the weight, its float32 master, or a contiguous copy."""
    if weight.dtype in SHORT and "master" in state:
        master: Tensor = state["master"].to(weight.device)
        state["master"] = master
        return master
    # The kernels go through memory in order, and know these two layouts.
    ordered = weight.is_contiguous() or weight.is_contiguous(memory_format=torch.channels_last)
    exact = weight if ordered else weight.contiguous()
    if weight.dtype in SHORT:
        exact = state["master"] = exact.float()
    return exact


def _form(tensor: Tensor) -> tuple[torch.dtype, torch.device, tuple[int, ...]]:
    return tensor.dtype, tensor.device, tensor.stride()


def _layout(gradient: Tensor | None) -> object:
    """Return what decides whether a table can read a gradient in place."""
    if gradient is None or gradient.layout is not torch.strided:
        return gradient if gradient is None else gradient.layout
    return gradient.dtype, gradient.stride()


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
