"""Records of a script's own updates: micro-batches, gradients before the update, clipping.

Hooks on the model and the optimizers see what the script does in its own way. The reference is
computed in the hook before the update, because the weights change right after it. If several
optimizers share the parameters, those of the first one in a call of the step are compared.
"""

import inspect
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._pytree import tree_leaves, tree_map_only

from largebatch.audit.replicas import settings_of
from largebatch.audit.restoring import generators_of
from largebatch.audit.subject import scores_in
from largebatch.models.wrappers import device_of
from largebatch.replacing import replaced


@dataclass(slots=True, eq=False)
class Micro:
    """One forward pass in training mode, with all that is needed to repeat it."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    batch: Any
    """The batch that the step was given; the pass may be on a part of it."""

    start: int
    """Number of samples that the model had seen before in this call of the step."""

    restore_random: Callable[[], None]
    buffers: list[Tensor]
    half: torch.dtype | None
    """Type of autocast; None without it."""

    output_gradient: Tensor | None = None
    """Gradient of the script's loss with respect to the logits; None if it was not seen."""


@dataclass(frozen=True, slots=True)
class Clip:
    """One call of a function of torch.nn.utils that clips."""

    lengths: dict[int, float]
    """Lengths of the gradients before clipping, by the identities of the parameters."""

    most: float

    norm: float | None
    """Norm before clipping; None for values."""

    factor: float
    """Factor by which clipping multiplied the length of the gradients."""


@dataclass(slots=True, eq=False)
class ScriptUpdate:
    """One update of the script."""

    gradients: list[Tensor | None]
    """Gradients that the optimizer got, by parameter."""

    reference: Any
    """Result of the function that computes the reference, or the exception it raised."""

    clips: list[Clip]
    loss_scale: float
    """Scale of the script's GradScaler; 1 without one."""

    may_be_float16: bool
    """True if gradients are computed or sent in float16."""

    rate: float
    """Largest learning rate of a group of parameters."""

    settings: dict[str, list[float]]
    """Learning rates, momentum and other numbers of the optimizers' groups at this update."""

    micros: int
    samples: int
    places: set[int]
    """Places of the parameters that the optimizer has."""

    held: set[int]
    """Places of the gradients that were not zero when the first backward pass began."""

    strangers: int
    """Number of tensors in the optimizers that are not the model's and have no gradient."""

    attempt: int
    """Number of updates before this one, with those that a GradScaler skipped."""


@dataclass(frozen=True, slots=True)
class ScheduleStep:
    """One call of a torch scheduler's `step`."""

    scheduler: LRScheduler
    updates: int
    """Number of updates before it, with those that a GradScaler skipped."""

    passes: int
    """Number of forward passes before it."""

    is_placed: bool
    """True if the call has an epoch or another argument, from which the place in the schedule
    follows, whatever the number of calls."""

    is_of_accelerate: bool
    """True if Accelerate made the call, which it repeats for each worker by design."""


@dataclass(slots=True, eq=False)
class Recorder:
    """Hooks on a script's model and optimizers, active within `recording`."""

    model: nn.Module
    """Model without wrappers, whose forward pass needs no other worker."""

    optimizer: Optimizer
    reference: Callable[[list[Micro]], object]
    sends_float16: bool
    """True if gradients are sent in float16, whatever their type."""

    averaged: Sequence[Tensor] = ()
    moves: Counter[int] = field(default_factory=Counter)
    """How often the averaged copy moved between forward passes, by update."""

    updates: list[ScriptUpdate] = field(default_factory=list)
    micros: list[Micro] = field(default_factory=list)
    """Micro-batches since the last update."""

    evaluated: set[str] = field(default_factory=set)
    """Names of the layers that were in evaluation mode in a forward pass with gradients."""

    passes: int = 0
    skipped: int = 0
    """Number of updates that a GradScaler skipped."""

    norm_samples: int = 0
    """Largest number of samples that a BatchNorm layer has normalised over; 0 if none. The last
    batch of an epoch may have fewer."""

    schedule_steps: list[ScheduleStep] = field(default_factory=list)

    elsewhere: int = 0
    """Number of steps of `optimizer` if it has no parameter of the model."""

    _batch: Any = None
    _seen: int = 0
    """Number of samples that the model saw in this call of the step."""

    _held: set[int] = field(default_factory=set)
    _hooked: set[Optimizer] = field(default_factory=set)
    _clips: list[Clip] = field(default_factory=list)
    _depth: int = 0
    _first: Optimizer | None = None
    """Optimizer that made the update of this call of the step."""

    _update: ScriptUpdate | None = None
    """The update that is being made."""

    _sums: list[float] = field(default_factory=list)
    _scale: float = 1.0
    _is_paused: bool = False
    _schedule_depth: int = 0

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Parameters of the model that are trained, each once."""
        return [it for it in self.model.parameters() if it.requires_grad]

    def give(self, batch: Any) -> None:  # noqa: ANN401 -- as the loader has it
        """Set the batch that the next call of the step gets."""
        self._batch = batch
        self._seen = 0
        self._first = None

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record within this block; hooks and replaced functions are removed on exit."""
        with ExitStack() as stack:
            handles = [
                self.model.register_forward_pre_hook(self._before_forward, with_kwargs=True),
                self.model.register_forward_hook(self._after_forward),
                register_optimizer_step_pre_hook(
                    lambda optimizer, *_: self._before_hooks(optimizer, stack)
                ),
                register_optimizer_step_post_hook(self._after_update),
            ]
            layers = [it for it in self.model.modules() if isinstance(it, _BatchNorm)]
            handles += [it.register_forward_pre_hook(self._in_norm) for it in layers]
            for handle in handles:
                stack.callback(handle.remove)
            for function in (nn.utils.clip_grads_with_norm_, nn.utils.clip_grad_value_):
                stack.enter_context(_replaced_everywhere(function, partial(self._clip, function)))
            own_step = torch.amp.GradScaler.step

            def step(scaler: Any, *args: Any, **words: Any) -> object:  # noqa: ANN401
                before = len(self.updates)
                self._scale = float(scaler.get_scale())
                result = own_step(scaler, *args, **words)
                # Without an update after micro-batches, their gradients were infinite.
                if len(self.updates) == before and self.micros:
                    self.skipped += 1
                    self._forget()
                return result

            stack.enter_context(replaced(torch.amp.GradScaler, "step", step))
            for kind in _with_step(LRScheduler):
                counted = self._counted(vars(kind)["step"])
                stack.enter_context(replaced(kind, "step", counted))
            yield

    def _counted(self, own_step: Callable[..., object]) -> Callable[..., object]:
        """Return the step of a class of schedulers that records its calls."""

        @wraps(own_step)
        def step(scheduler: LRScheduler, *args: Any, **words: Any) -> object:  # noqa: ANN401
            # SequentialLR calls the step of those within it, and a subclass that of its base.
            if not self._schedule_depth:
                caller = sys._getframe(1).f_globals.get("__name__")
                call = ScheduleStep(
                    scheduler,
                    len(self.updates) + self.skipped,
                    self.passes,
                    is_placed=bool(args or words),
                    is_of_accelerate=caller == "accelerate.scheduler",
                )
                self.schedule_steps.append(call)
            self._schedule_depth += 1
            try:
                return own_step(scheduler, *args, **words)
            finally:
                self._schedule_depth -= 1

        return step

    def _before_forward(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if self._is_paused or not torch.is_grad_enabled():
            return
        self.evaluated |= {name for name, it in model.named_modules() if not it.training}
        if not model.training:
            return
        self.passes += 1
        # An average that moves after each micro-batch was moved before the next pass.
        sums = [float(it.detach().double().sum()) for it in self.averaged]
        self.moves[len(self.updates) + self.skipped] += sums != (self._sums or sums)
        self._sums = sums
        kind = device_of(model).type
        # The model may change its arguments in place, and the pass is repeated from them.
        args, kwargs = tree_map_only(Tensor, torch.clone, (args, kwargs))
        self.micros.append(
            Micro(
                args,
                kwargs,
                self._batch,
                self._seen,
                generators_of(model),
                [buffer.clone() for buffer in model.buffers()],
                torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None,
            )
        )
        self._seen += samples_in(self.micros[-1])

    def _after_forward(self, model: nn.Module, _: object, output: object) -> None:
        if self._is_paused or not (model.training and self.micros):
            return
        logits = first_logits(output)
        micro = self.micros[-1]
        if logits is not None and logits.requires_grad:
            logits.register_hook(lambda grad: self._in_backward(micro, grad))

    def _in_backward(self, micro: Micro, gradient: Tensor) -> None:
        """Keep the gradient of the logits, and see what the update before has left."""
        # Autograd reaches the logits first, before any parameter's gradient is added to.
        if all(it.output_gradient is None for it in self.micros):
            left = enumerate(it.grad for it in self.parameters)
            self._held = {place for place, grad in left if grad is not None and bool(grad.any())}
        micro.output_gradient = gradient.detach()

    def _in_norm(self, layer: nn.Module, args: tuple[Tensor, ...]) -> None:
        if layer.training and not self._is_paused and args:
            self.norm_samples = max(self.norm_samples, len(args[0]))

    def _places_of(self, optimizer: Optimizer) -> set[int]:
        tensors = {id(it) for group in optimizer.param_groups for it in group["params"]}
        return {place for place, it in enumerate(self.parameters) if id(it) in tensors}

    def _is_second(self, optimizer: Optimizer) -> bool:
        """Return True for another optimizer after the first one, without a pass between them."""
        return not self.micros and self._first not in {None, optimizer}

    def _before_hooks(self, optimizer: Optimizer, stack: ExitStack) -> None:
        """Copy gradients behind the optimizer's own hooks, which may change them."""
        if optimizer not in self._hooked:
            self._hooked.add(optimizer)
            stack.callback(optimizer.register_step_pre_hook(self._before_update).remove)

    def _before_update(self, optimizer: Optimizer, *_: object) -> None:
        """Copy the gradients; Horovod's optimizer calls this again once they are summed."""
        places = self._places_of(optimizer)
        if not places or self._is_second(optimizer):
            return
        self._depth += 1
        # Only the innermost call has the gradients that the update is made with; the reference is
        # computed once, in the outermost.
        if self._depth == 1 or self._update is None:
            self._update = self._new_update(optimizer, places)
        divisor = getattr(optimizer, "grad_scale", None)  # a fused optimizer unscales in its kernel
        scale = 1.0 if divisor is None else float(divisor)  # sync: in an audit only
        gradients = (it.grad for it in self.parameters)
        self._update.gradients = [None if it is None else it.detach() / scale for it in gradients]

    def _new_update(self, optimizer: Optimizer, places: set[int]) -> ScriptUpdate:
        """Return an update before it is made, without its gradients."""
        # A pass without a backward pass, such as a second view that is only logged, is not part of
        # the update.
        used = [it for it in self.micros if it.output_gradient is not None] or self.micros
        reference = None
        self._first = optimizer
        self._is_paused = True  # the hooks must not record the passes of the reference
        try:
            reference = self.reference(used)
        except Exception as error:  # of the script's model or loss; reported by the audit
            reference = error
        finally:
            self._is_paused = False
        of_model = set(map(id, self.model.parameters()))
        tensors = [it for group in optimizer.param_groups for it in group["params"]]
        return ScriptUpdate(
            [],
            reference,
            self._clips,
            self._scale,
            self.sends_float16 or any(it.half == torch.float16 for it in self.micros),
            rate=max(float(group["lr"]) for group in self.optimizer.param_groups),
            settings=settings_of({optimizer: None, self.optimizer: None}),
            micros=len(used),
            samples=sum(map(samples_in, used)),
            places=places,
            held=self._held,
            strangers=sum(it.grad is None and id(it) not in of_model for it in tensors),
            attempt=len(self.updates) + self.skipped,
        )

    def _after_update(self, optimizer: Optimizer, *_: object) -> None:
        if not self._places_of(optimizer):
            self.elsewhere += optimizer is self.optimizer
            return
        if self._is_second(optimizer):
            self._forget()
            return
        self._depth -= 1
        if self._depth or getattr(optimizer, "found_inf", 0):  # sync: in an audit only
            return  # a fused optimizer skips the update itself
        assert self._update is not None  # the hook before it has seen the same tensors
        self.updates.append(self._update)
        self._forget()

    def _forget(self) -> None:
        self.micros = []
        self._clips = []
        self._scale = 1.0
        self._update = None
        self._held = set()

    def _clip(self, function: Callable[..., object], *args: Any, **words: Any) -> None:  # noqa: ANN401
        """Clip gradients, and record what that did to them; clip_grad_norm_ calls this too."""
        arguments = inspect.signature(function).bind(*args, **words).arguments
        tensors = arguments["parameters"]
        # A generator, as of model.parameters(), can be read once only.
        tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        arguments["parameters"] = tensors
        before = _lengths(tensors)
        function(**arguments)
        most = float([*arguments.values()][1])  # max_norm or clip_value
        norm = arguments.get("total_norm")
        if norm is None:
            length = math.hypot(*before.values())
            factor = math.hypot(*_lengths(tensors).values()) / length if length else 1.0
        else:
            norm = float(norm)  # sync: in an audit only
            factor = min(1.0, most / (norm + 1e-6))  # as torch computes it
        self._clips.append(Clip(before, most, norm, factor))


def _with_step(kind: type[LRScheduler]) -> Iterator[type[LRScheduler]]:
    """Yield the classes of schedulers that define `step`, also those of the script."""
    if "step" in vars(kind):
        yield kind
    for below in kind.__subclasses__():
        yield from _with_step(below)


def _lengths(tensors: Iterable[Tensor]) -> dict[int, float]:
    return {id(it): 0.0 if it.grad is None else float(it.grad.norm()) for it in tensors}


def first_logits(output: object) -> Tensor | None:
    """Return the logits of a model's output, the first of several; None if it has none."""
    logits: object = scores_in(output)
    if isinstance(logits, (tuple, list)) and logits:
        logits = logits[0]
    return logits if isinstance(logits, Tensor) else None


def samples_in(micro: Micro) -> int:
    """Return the number of samples of the first tensor in a model's arguments; 0 without one."""
    tensors = (it for it in tree_leaves((micro.args, micro.kwargs)) if isinstance(it, Tensor))
    return next((len(it) for it in tensors if it.ndim), 0)


@contextmanager
def _replaced_everywhere(function: object, replacement: object) -> Iterator[None]:
    """Replace a function in all modules that have it, under any name."""
    # A script that imports the function by name refers to it, not to torch's module.
    contents = [getattr(module, "__dict__", {}) for module in list(sys.modules.values())]
    places = [
        (content, name)
        for content in contents
        for name, value in list(content.items())
        if value is function
    ]
    try:
        for content, name in places:
            content[name] = replacement
        yield
    finally:
        for content, name in places:
            content[name] = function
