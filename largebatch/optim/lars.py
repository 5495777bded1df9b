"""LARS: momentum SGD with a step length per tensor.

For a weight w with gradient g, averaged over the global batch (You et al. 2017, arXiv:1708.03888):

    ratio = eta |w| / (|g| + weight_decay |w| + eps)        1 where |w| or |g| is 0

Published codes disagree on where the learning rate enters the momentum buffer b (m is the
momentum). At a constant rate three of the conventions are the same method; over a schedule their
steps differ by up to an order of magnitude, so the convention is a parameter and saved in every
checkpoint:

    reference        b = m b + lr ratio (g + weight_decay w)   w -= b            MLPerf TF2
    scaled-momentum  b = m b + ratio (g + weight_decay w)      w -= lr b         timm, MXNet
    outside          b = m b + (g + weight_decay w)            w -= lr ratio b   Intel's PyTorch
    fujitsu          b = m b + ratio lr (g + weight_decay w)   w -= b            MLPerf v0.6, with
                      ratio = eta |w| / (|g| + weight_decay base_lr |w| + eps)

(`fujitsu` writes lr as s_t base_lr, with the schedule s_t in [0, 1].)

optax equals `reference` only without weight decay: with it, optax divides by |g + weight_decay w|.
MLPerf's TF2 code replaces eps 0 with 1e-7; eps=1e-7 is that code, eps=0 its rules.

Two limits are off by default: `clip_ratio` is the maximum ratio, and every element of
g + weight_decay w is clipped to [-clip_gradient, clip_gradient], in adapted groups and others.
LARS-ImageNet-PyTorch (NUS) has both in its code, 50 and 10.

Warning: `outside` can diverge. Its ratio is from the newest gradient but its buffer from older
ones, so a single tiny gradient causes a step of lr eta |w| |b| / |g|. For the quadratic
|w - c|^2 / 2 with initial w = (1, 1) and c = (1.4, 0.6), at lr 1, eta 0.1 and momentum 0.9, the
loss grows from 0.16 to 533 in 83 steps; in the other conventions it never exceeds 0.16.

Norms are correct for all weights and gradients that are normal float32 numbers, although squares of
numbers above 1e19 or below 1e-19 are not. The ratio must be a normal number too: |w| and |g| may
differ by about 35 orders of magnitude.

The modules of `kernels` do the arithmetic; this one selects a kernel and owns the state.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, Literal, assert_never, get_args

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT, StateDict

from largebatch.errors import RecipeError
from largebatch.optim.building import Weights
from largebatch.optim.kernels import GroupRule, UpdateFunction
from largebatch.optim.kernels.tabled import SAVED, SHORT, Tabled, TensorLists, as_models
from largebatch.recipe import optimizers as sections
from largebatch.recipe.choices import Convention, Kernels

Number = float | Tensor
"""A number, or a tensor with one element that every step reads and never changes."""

_NUMBERS = ("lr", "base_lr", "momentum", "weight_decay", "eta", "eps")
_LIMITS = ("clip_ratio", "clip_gradient")


class LARS(Tabled):
    """Layer-wise adaptive rate scaling over momentum SGD.

    A group with `adapt=False` (biases, normalisation layers) takes plain momentum steps. All
    hyper-parameters are in the parameter groups, not on `self`, and have defaults: Horovod rebuilds
    an optimizer from its groups only. `base_lr` is the peak of the schedule; only `fujitsu` uses
    it, and its default is `lr`.

    Gradients must be averaged and unscaled before `step`: with weight decay the ratio is not
    scale-free, and non-adapted groups never are. A GradScaler unscales them and sets `grad_scale`
    and `found_inf` during its step, as for torch's fused optimizers: on an accelerator the host
    does not wait to know whether a step is skipped, except with `kernels="apex"`.

    `kernels="auto"` takes ours on a GPU where they were proven (see `agree_on_kernels` for several
    workers), `"torch"` PyTorch's operations, `"apex"` those of NVIDIA's apex.

    A float16 or bfloat16 weight is a rounded copy of a float32 master in the optimizer's state.
    Create a new optimizer after changing such a weight from outside.

    >>> weight = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
    >>> weight.grad = torch.tensor([0.0, 2.0])
    >>> optimizer = LARS([weight], lr=1.0, eta=0.1)
    >>> optimizer.step()
    >>> weight.data  # less 0.25 g: eta |w| / |g| = 0.1 * 5 / 2
    tensor([3.0000, 3.5000])
    """

    def __init__(  # noqa: PLR0913 -- the hyper-parameters of the method
        self,
        params: ParamsT,
        lr: Number = 1.0,
        *,
        momentum: Number = 0.9,
        weight_decay: Number = 0.0,
        eta: Number = 1e-3,
        eps: Number = 0.0,
        clip_ratio: Number | None = None,
        clip_gradient: Number | None = None,
        convention: Convention = "reference",
        kernels: Kernels = "auto",
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "eta": eta,
            "eps": eps,
            "clip_ratio": clip_ratio,
            "clip_gradient": clip_gradient,
            "convention": convention,
            "adapt": True,
            "kernels": kernels,
        }
        super().__init__(params, defaults)

    def _drop_tables(self) -> None:
        super()._drop_tables()
        self._ratios: list[tuple[list[Tensor], Tensor]] = []
        """Ratios of the last step with the parameters of each kernel call."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; raise ValueError for an invalid hyper-parameter or parameter.

        Raises MissingPackageError if `kernels` needs a package that is not installed.
        """
        super().add_param_group(param_group)
        try:
            _check(param_group)
        except Exception:
            self.param_groups.pop()
            raise
        param_group.setdefault("base_lr", _number(param_group, "lr"))

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load hyper-parameters and momentum; masters stay in float32, and `kernels` unchanged.

        Raises ValueError, before any change, if this is not a complete state of LARS for parameters
        of these shapes; the message names what is missing. A state without masters is valid: it is
        that of a float32 model.
        """
        loaded: StateDict = {}

        def check(_: Optimizer, state: StateDict) -> None:
            _check_state(state, self.param_groups)
            loaded.update(state)

        def finish(_: Optimizer) -> None:
            for group, choice in zip(self.param_groups, kernels, strict=True):
                group["kernels"] = choice
            self._keep_exact(loaded)

        kernels = [group["kernels"] for group in self.param_groups]
        hooks = [  # after other hooks that change the state, before hooks that use it
            self.register_load_state_dict_pre_hook(check),
            self.register_load_state_dict_post_hook(finish, prepend=True),
        ]
        try:
            super().load_state_dict(state_dict)
        finally:
            for hook in hooks:
                hook.remove()

    def _keep_exact(self, loaded: StateDict) -> None:
        """Restore masters and their momentum exactly; torch rounds them to the weight's type."""
        for name, weight in _pairs(loaded, self.param_groups):
            if weight not in self.state:
                continue
            if weight.dtype in SHORT:
                for key in SAVED & loaded["state"][name].keys():
                    value = loaded["state"][name][key]
                    self.state[weight][key] = value.to(weight.device, torch.float32, copy=True)
            else:
                self.state[weight].pop("master", None)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """True if GradScaler leaves unscaling and skipping to `step`; not needed on a CPU."""
        weights = (weight for group in self.param_groups for weight in group["params"])
        kernels = {group["kernels"] for group in self.param_groups}
        return "apex" not in kernels and all(weight.device.type != "cpu" for weight in weights)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]  # torch's overloads
        """Update every parameter that has a gradient."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        # GradScaler sets both for the time of a step.
        scale: Tensor | None = getattr(self, "grad_scale", None)
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        rules = self._rules()
        self._ratios = self._update_tables(rules, scale, found_inf)
        if self._others:
            # All of them first: a gradient that is refused then leaves every weight as it was.
            gathered = [self._gather(group) for group in self.param_groups]
            for group, rule, lists in zip(self.param_groups, rules, gathered, strict=True):
                self._update_others(group, rule, lists, scale, found_inf)
        return loss

    def _update_others(
        self,
        group: dict[str, Any],
        rule: GroupRule,
        gathered: dict[tuple[torch.device, torch.dtype], TensorLists],
        scale: Tensor | None,
        found_inf: Tensor | None,
    ) -> None:
        """Update the parameters of a group that are in no table, by device and type."""
        for (device, _), lists in gathered.items():
            grads = as_models(lists.grads, lists.weights)
            if scale is not None:
                torch._foreach_div_(grads, scale.to(device))
            if found_inf is not None:
                # GradScaler's is a sum over devices, so it may be above 1.
                rule = replace(rule, found_inf=found_inf.to(device).clamp(max=1))
            update = _kernel(device, group["kernels"])
            ratios = update(lists.weights, grads, lists.buffers, rule)
            if ratios is not None:
                self._ratios.append((lists.parameters, ratios))
            if lists.rounded:
                torch._foreach_copy_(lists.rounded, lists.exact)

    def _rules(self) -> list[GroupRule]:
        return [_rule(group) for group in self.param_groups]

    def trust_ratios(self) -> dict[Tensor, Tensor]:
        """Return the ratios of the last step, by adapted parameter.

        They include eta, eps and clip_ratio, but not the learning rate. The ratios are 0-d tensors
        on the parameters' devices, which later steps do not change; reading them waits for a GPU.
        They are meaningless after a step that a GradScaler skipped.
        """
        return {
            parameter: ratio
            for parameters, ratios in self._ratios
            for parameter, ratio in zip(parameters, ratios.clone().unbind(), strict=True)
        }


def _kernel(device: torch.device, kernels: Kernels) -> UpdateFunction:
    match kernels:
        case "apex":
            from largebatch.optim.kernels import apex

            return apex.update
        case "auto" | "torch" if device.type == "cpu":
            from largebatch.optim.kernels import fused

            return fused.update
        case "auto" | "torch":
            from largebatch.optim.kernels import batched

            return batched.update
        case _:
            assert_never(kernels)


def _rule(group: dict[str, Any]) -> GroupRule:
    lr = _number(group, "lr")
    decay = _number(group, "weight_decay")
    convention = group["convention"]
    rate_inside = convention in {"reference", "fujitsu"}
    place: Literal["inside", "outside"] = "outside" if convention == "outside" else "inside"
    return GroupRule(
        momentum=_number(group, "momentum"),
        decay=decay,
        ratio_decay=decay * (_number(group, "base_lr") if convention == "fujitsu" else 1),
        eta=_number(group, "eta"),
        eps=_number(group, "eps"),
        into=lr if rate_inside else 1.0,
        out=1.0 if rate_inside else lr,
        ratio=place if group["adapt"] else "none",
        clip_ratio=_limit(group, "clip_ratio"),
        clip_gradient=_limit(group, "clip_gradient"),
    )


def _number(group: dict[str, Any], key: str) -> float:
    return float(group[key])  # sync: only if the user keeps the number on a GPU


def _limit(group: dict[str, Any], key: str) -> float | None:
    return None if group.get(key) is None else _number(group, key)


def _check(group: dict[str, Any]) -> None:
    _check_word(group, "convention", get_args(Convention))
    _check_word(group, "kernels", get_args(Kernels))
    _check_numbers(group)
    for weight in group["params"]:
        if not weight.is_floating_point():
            raise ValueError(f"LARS updates real floating-point parameters, got {weight.dtype}")
    if group["kernels"] == "apex":
        from largebatch.optim.kernels import apex

        apex.check(group["params"], clip_gradient=group["clip_gradient"])


def _check_word(group: dict[str, Any], key: str, known: Sequence[str]) -> None:
    if group[key] not in known:
        raise ValueError(f"{key} must be one of {', '.join(known)}, got {group[key]!r}")


def _check_numbers(group: dict[str, Any]) -> None:
    numbers = {key: _number(group, key) for key in _NUMBERS if key in group}
    if not 0 <= numbers.pop("momentum") < 1:
        raise ValueError(f"momentum must be in [0, 1), got {group['momentum']}")
    if not 0 < numbers.pop("eta") < math.inf:
        raise ValueError(f"eta must be above 0 and finite, got {group['eta']}")
    for key, number in numbers.items():
        if not 0 <= number < math.inf:
            raise ValueError(f"{key} must be 0 or above and finite, got {number}")
    for key in _LIMITS:
        limit = _limit(group, key)
        if limit is not None and not 0 < limit < math.inf:
            raise ValueError(f"{key} must be above 0 and finite, or None, got {limit}")


def _check_state(state: StateDict, groups: list[dict[str, Any]]) -> None:
    """Raise ValueError if a state to load is not a complete state of these groups."""
    _require(state, ("state", "param_groups"), "the state")
    for number, group in enumerate(state["param_groups"]):
        _require(group, ("params", "convention", "adapt", *_NUMBERS), f"group {number}")
        _check_word(group, "convention", get_args(Convention))
        _check_numbers(group)
    sizes = ([len(group["params"]) for group in every] for every in (state["param_groups"], groups))
    if next(sizes) != next(sizes):
        return  # torch raises an error
    for name, weight in _pairs(state, groups):
        saved = state["state"].get(name)
        if saved is None:
            continue
        _require(saved, ("momentum_buffer",), f"parameter {name}")
        for key in SAVED & saved.keys():
            shape = tuple(saved[key].shape) if isinstance(saved[key], Tensor) else saved[key]
            if shape != weight.shape:
                raise ValueError(
                    f"{key} of parameter {name} must have its shape {tuple(weight.shape)}, got "
                    f"{shape}"
                )


def _require(holder: dict[str, Any], keys: Sequence[str], name: str) -> None:
    missing = [key for key in keys if key not in holder]
    if missing:
        raise ValueError(
            f"{name} has no {', '.join(missing)}: this is not a whole state that LARS has saved"
        )


def _pairs(state: StateDict, groups: list[dict[str, Any]]) -> Iterator[tuple[Any, Tensor]]:
    names, weights = (
        chain.from_iterable(group["params"] for group in every)
        for every in (state["param_groups"], groups)
    )
    return zip(names, weights, strict=True)


def build_lars(section: sections.LARS, weights: Weights) -> LARS:
    """Build LARS; raise RecipeError where its kernels cannot update these weights."""
    groups = weights.adapted_groups(weight_decay=section.weight_decay)
    settings = section.model_dump(exclude={*sections.OF_EVERY_KIND, "weight_decay"})
    try:
        return LARS(groups, lr=weights.lr, kernels=weights.kernels, **settings)
    except ValueError as error:
        raise RecipeError(f"execution.kernels: {error}") from None
