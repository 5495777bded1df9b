"""What a process does in each of its updates, seen through torch's own hooks.

Nothing here draws a random number, changes an order or runs a forward pass: a training that is
observed is the same bit for bit. Records are made in the hook before an optimizer's step, behind
all other hooks, when gradients are final; with a closure right after it.
"""

import gc
import random
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import wraps
from inspect import signature
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from largebatch import accelerator
from largebatch.audit.resume.averages import AverageWatch
from largebatch.audit.resume.batches import BatchWatch
from largebatch.audit.resume.record import Trace, Update, Worker
from largebatch.audit.resume.traces import digest_of, digest_of_bytes, trace_of
from largebatch.replacing import replaced

T = TypeVar("T")

_DROPOUTS = (
    *("dropout", "dropout1d", "dropout2d", "dropout3d"),
    *("alpha_dropout", "feature_alpha_dropout"),
)
"""Functions of torch.nn.functional, which its layers call."""

_WRAPPERS = {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
"""Parts of names that wrappers of modules add."""


@dataclass(slots=True, eq=False)
class Since:
    """What happened since the update before."""

    schedule_moves: int = 0
    loss: float | None = None
    generators: Mapping[str, str] = field(default_factory=dict)
    buffers: dict[tuple[int, str], Trace] = field(default_factory=dict)
    """Buffers before the first forward pass, which moves statistics, by layer and name.

    They are read when the layer is called: DistributedDataParallel sends worker 0's before, and
    functional_call replaces them.
    """

    masks: list[str] = field(default_factory=list)
    saved: list[str] = field(default_factory=list)


class Watch:
    """Hooks that see a process train, active within `installed`.

    `emit` gets each update; `progress` is called at each update and forward pass.
    """

    def __init__(
        self, emit: Callable[[Update], object], progress: Callable[[], object] = lambda: None
    ) -> None:
        self.progress = progress
        self.batches = BatchWatch()
        self.averages = AverageWatch()
        self.number = 0
        """Number of updates that were made."""

        self.resumed_from: list[str] = []
        self.saved_aside: list[str] = []
        self.missing_keys: list[str] = []
        self.unexpected_keys: list[str] = []

        self._emit = emit
        self._since = Since()
        self._at_start = _digests_of_generators()
        """A generator that is still in this state is not used, and not recorded: without a seed it
        differs from run to run."""

        self._called: list[nn.Module] = []
        """Outermost modules that the loop has called with gradients since the update before."""

        self._models: dict[int, list[nn.Module]] = {}
        """Models of the update before, by the identity of its optimizer."""

        self._optimizers: list[Optimizer] = []
        self._schedulers: list[LRScheduler] = []
        self._scaler: Any = None
        self._scaled: tuple[object, object] = (None, None)
        """Last loss that a GradScaler returned, and what it was given."""

        self._epoch: int | None = None
        self._thread = threading.get_ident()
        self._depth = 0
        self._step_depth = 0
        self._schedule_depth = 0
        self._is_eager = False
        self._last: Optimizer
        self._update: Update | None = None
        """The update that is being made."""

        self._observed: set[tuple[object, str]] = set()
        self._stack = ExitStack()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Observe this process within this block."""
        with self._stack, self.batches.installed(), self.averages.installed():
            for handle in (
                register_optimizer_step_pre_hook(self._before_hooks),
                register_optimizer_step_post_hook(self._after_update),
            ):
                self._stack.callback(handle.remove)
            for name in _DROPOUTS:
                self._around(F, name, self._drop)
            self._around(F, "scaled_dot_product_attention", self._attend)
            self._around(Tensor, "backward", self._backward)
            self._around(torch, "save", self._save)
            self._around(torch, "load", self._load)
            self._around(torch, "compile", self._compile)
            # A hook of torch before a module's forward pass does not get keyword arguments.
            self._around(nn.Module, "__call__", self._call)
            self._around(nn.Module, "load_state_dict", self._load_weights)
            self._around(torch.amp.GradScaler, "scale", self._scale)
            self._around(DataLoader, "__init__", self._new_loader)
            for kind in _with_subclasses(LRScheduler):
                if "__init__" in vars(kind):
                    self._around(kind, "__init__", self._new_scheduler)
                self._observe_steps(kind)
            yield

    def add_existing(self) -> None:
        """Observe the loaders, schedulers and modules that the process already has."""
        self.averages.add_existing()
        for value in gc.get_objects():
            # Not isinstance: reading the class of a lazy object may import a package.
            kind = type(value)
            if issubclass(kind, LRScheduler):
                self._add_scheduler(value)
            elif issubclass(kind, DataLoader):
                self._observe_epochs(value)

    def summary(self, rank: int, size: int, *, with_end: bool) -> dict[str, Any]:
        """Return the fields of this process's Worker without its updates, as `worker_from` reads.

        `with_end` adds the state after the last update.
        """
        source = self.batches.training
        worker = Worker(
            rank=rank,
            size=size,
            workers_of_loader=0 if source is None else source.processes,
            resumed_from=tuple(self.resumed_from),
            saved_aside=tuple(dict.fromkeys(self.saved_aside)),
            missing_keys=tuple(self.missing_keys),
            unexpected_keys=tuple(self.unexpected_keys),
            end=self._end() if with_end else None,
        )
        fields = asdict(worker) | {"averages": sorted(self.averages.changed)}
        del fields["updates"]
        return fields

    def _end(self) -> Update | None:
        """Return the state after the last update; None if there was none."""
        if not self._optimizers:
            return None
        state = self._state_before(self._last)
        return replace(self._completed(state), generators=self._used_generators())

    def _around(self, owner: Any, name: str, hook: Callable[..., Any]) -> None:  # noqa: ANN401
        """Replace a function or method by a hook, which gets it as its first argument."""
        if (owner, name) in self._observed:
            return
        self._observed.add((owner, name))
        own = vars(owner)[name]

        @wraps(own)
        def observed(*args: Any, **words: Any) -> Any:  # noqa: ANN401 -- of any function
            return hook(own, *args, **words)

        self._stack.enter_context(replaced(owner, name, observed))

    # Forward passes and losses

    def _call(self, own: Callable[..., Any], module: Any, *args: Any, **words: Any) -> Any:  # noqa: ANN401
        if threading.get_ident() != self._thread:
            return own(module, *args, **words)
        if not self._depth:
            self.progress()
            self._before_forward(module, (args, words))
        self._see_buffers(module)
        self._depth += 1
        try:
            return own(module, *args, **words)
        finally:
            self._depth -= 1

    def _before_forward(self, module: nn.Module, arguments: object) -> None:
        # A checkpointed part of a model is called again in the backward pass.
        if not torch.is_grad_enabled() or _is_in_backward():
            return
        if not any(it.requires_grad for it in module.parameters()):
            return
        if not self._since.generators:
            self._since.generators = self._used_generators()
        if all(it is not module for it in self._called):
            self._called.append(module)
        self.batches.enter_forward(arguments, training=module.training)

    def _see_buffers(self, layer: nn.Module) -> None:
        """Record a layer's own buffers before its first forward pass since an update."""
        if not torch.is_grad_enabled() or _is_in_backward():
            return
        for name, buffer in layer.named_buffers(recurse=False):
            key = id(layer), name
            if key not in self._since.buffers:
                self._since.buffers[key] = trace_of(buffer)

    def _buffers_of(self, model: nn.Module) -> Iterator[tuple[str, Trace]]:
        for path, layer in model.named_modules():
            prefix = f"{path}." if path else ""
            for name, buffer in layer.named_buffers(recurse=False):
                seen = self._since.buffers.get((id(layer), name))
                yield prefix + name, seen or trace_of(buffer)

    def _backward(self, own: Callable[..., Any], loss: Tensor, *args: Any, **words: Any) -> Any:  # noqa: ANN401
        scaled, unscaled = self._scaled
        value = unscaled if loss is scaled else loss
        if isinstance(value, Tensor) and value.numel() == 1:
            self._since.loss = float(value.detach())
        self._scaled = None, None  # they hold the graph
        return own(loss, *args, **words)

    def _scale(self, own: Callable[..., Any], scaler: Any, outputs: Any) -> Any:  # noqa: ANN401
        result = own(scaler, outputs)
        if scaler.is_enabled():
            self._scaler = scaler
            self._scaled = result, outputs
        return result

    def _drop(self, own: Callable[..., Any], *args: Any, **words: Any) -> Any:  # noqa: ANN401
        arguments = signature(own).bind(*args, **words)
        arguments.apply_defaults()
        values = arguments.arguments
        if values["training"] and values["p"]:
            self._see_mask(values["input"], values["p"])
        return own(*args, **words)

    def _attend(self, own: Callable[..., Any], *args: Any, **words: Any) -> Any:  # noqa: ANN401
        dropout = args[4] if len(args) > 4 else words.get("dropout_p", 0.0)
        if dropout:
            self._see_mask(args[0] if args else words["query"], dropout)
        return own(*args, **words)

    def _see_mask(self, values: Tensor, probability: float) -> None:
        """Record what decides a mask, before it is drawn: generator, shape and probability."""
        if not _is_in_backward():
            kind = values.device.type
            state = _generator_states()["torch" if kind == "cpu" else str(values.device)]
            words = f"{state} {tuple(values.shape)} {probability}"
            self._since.masks.append(digest_of_bytes(words.encode()))

    def _compile(self, own: Callable[..., Any], *args: Any, **words: Any) -> Any:  # noqa: ANN401
        """Make compiled modules run uncompiled: graphs do not include hooks."""
        if not self._is_eager:
            self._is_eager = True
            self._stack.enter_context(torch.compiler.set_stance("force_eager"))
            warnings.filterwarnings("ignore", message="Using `torch.compile")
        return own(*args, **words)

    # Loaders, schedules and files

    def _new_loader(self, own: Callable[..., Any], loader: Any, *args: Any, **words: Any) -> None:  # noqa: ANN401
        own(loader, *args, **words)
        self._observe_epochs(loader)

    def _observe_epochs(self, loader: DataLoader[Any]) -> None:
        inner = getattr(loader.batch_sampler, "sampler", None)
        for part in (loader.dataset, loader.sampler, loader.batch_sampler, inner):
            for kind in type(part).__mro__:
                if "set_epoch" in vars(kind):
                    self._around(kind, "set_epoch", self._set_epoch)

    def _set_epoch(self, own: Callable[..., Any], part: Any, epoch: Any, *rest: Any) -> Any:  # noqa: ANN401
        self._epoch = int(epoch)
        return own(part, epoch, *rest)

    def _new_scheduler(
        self,
        own: Callable[..., Any],
        scheduler: LRScheduler,
        *args: Any,  # noqa: ANN401
        **words: Any,  # noqa: ANN401
    ) -> None:
        self._add_scheduler(scheduler)
        # It calls its own `step`, which is not a move of the schedule.
        self._schedule_depth += 1
        try:
            own(scheduler, *args, **words)
        finally:
            self._schedule_depth -= 1

    def _add_scheduler(self, scheduler: LRScheduler) -> None:
        if all(it is not scheduler for it in self._schedulers):
            self._schedulers.append(scheduler)
            for kind in type(scheduler).__mro__:
                self._observe_steps(kind)

    def _observe_steps(self, kind: type) -> None:
        if issubclass(kind, LRScheduler) and "step" in vars(kind):
            self._around(kind, "step", self._move_schedule)

    def _move_schedule(
        self,
        own: Callable[..., Any],
        scheduler: LRScheduler,
        *args: Any,  # noqa: ANN401
        **words: Any,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        # SequentialLR calls the step of those within it, and a subclass that of its base.
        self._since.schedule_moves += not self._schedule_depth
        self._schedule_depth += 1
        try:
            return own(scheduler, *args, **words)
        finally:
            self._schedule_depth -= 1

    def _save(self, own: Callable[..., Any], obj: object, f: Any, *args: Any, **words: Any) -> Any:  # noqa: ANN401
        result = own(obj, f, *args, **words)
        is_in_loop = threading.get_ident() == self._thread
        (self._since.saved if is_in_loop else self.saved_aside).append(_file_name(f))
        return result

    def _load(self, own: Callable[..., Any], f: Any, *args: Any, **words: Any) -> Any:  # noqa: ANN401
        self.see_loaded(_file_name(f))
        return own(f, *args, **words)

    def see_loaded(self, name: str) -> None:
        """Record a file that was read, if no update was made before."""
        if not self.number and name and name not in self.resumed_from:
            self.resumed_from.append(name)

    def see_written(self, name: str) -> None:
        """Record the file to which an object is written that was saved in memory (Lightning)."""
        saved = self._since.saved
        if saved and not saved[-1]:
            saved[-1] = name

    def _load_weights(self, own: Callable[..., Any], *args: Any, **words: Any) -> Any:  # noqa: ANN401
        result = own(*args, **words)
        self.missing_keys += getattr(result, "missing_keys", ())
        self.unexpected_keys += getattr(result, "unexpected_keys", ())
        return result

    # Updates

    def _before_hooks(self, optimizer: Optimizer, *_: object) -> None:
        """Register the hook behind the optimizer's own ones, which may change gradients."""
        if all(it is not optimizer for it in self._optimizers):
            self._optimizers.append(optimizer)
            handle = optimizer.register_step_pre_hook(self._before_update)
            self._stack.callback(handle.remove)

    def _before_update(
        self, optimizer: Optimizer, args: tuple[Any, ...], words: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        self._step_depth += 1
        self._last = optimizer
        closure = args[1] if len(args) > 1 else words.get("closure")
        if closure is None:
            # Of nested calls (Horovod's optimizer) the innermost one has the final gradients.
            self._update = self._state_before(optimizer)
            return None

        def observed() -> Any:  # noqa: ANN401 -- as the closure
            loss = closure()
            if self._update is None:
                self._update = self._state_before(optimizer)
            return loss

        self._update = None
        if len(args) > 1:
            return (args[0], observed, *args[2:]), words
        return args, words | {"closure": observed}

    def _after_update(self, optimizer: Optimizer, *_: object) -> None:
        self._step_depth -= 1
        if self._step_depth or self._update is None:
            return
        update = self._update
        self._update = None
        if float(getattr(optimizer, "found_inf", None) or 0):
            return  # a fused optimizer skips the update itself
        update = self._completed(update)
        self.number += 1
        self._called = []
        self._emit(update)
        self.progress()

    def _completed(self, update: Update) -> Update:
        """Return an update with what happened since the one before it, which is then forgotten."""
        since = self._since
        self._since = Since()
        return replace(
            update,
            batches=self.batches.take(),
            schedule_moves=since.schedule_moves,
            loss=since.loss,
            generators=since.generators,
            masks=tuple(since.masks),
            saved=tuple(since.saved),
        )

    @torch.no_grad()
    def _state_before(self, optimizer: Optimizer) -> Update:
        """Return the state of the process before a step of this optimizer."""
        models = self._models_of(optimizer)
        named = _named_parameters(models, optimizer)
        names = {id(it): name for name, it in named.items()}
        trained = [it for group in optimizer.param_groups for it in group["params"]]
        divisor = getattr(optimizer, "grad_scale", None)  # a fused optimizer divides itself
        gradients = {
            names[id(it)]: it.grad if divisor is None else it.grad / divisor
            for it in trained
            if it.grad is not None
        }
        state = {
            f"{names.get(id(owner), owner)}:{key}": value
            for owner, values in optimizer.state.items()
            for key, value in _items_of(values)
        }
        tensors = [it for it in (*gradients.values(), *state.values()) if isinstance(it, Tensor)]
        averages, averaged_updates = self.averages.record(named, tensors, self.number)
        number = next(place for place, it in enumerate(self._optimizers) if it is optimizer)
        scale, growth = self._scale_now()
        return Update(
            number=self.number,
            optimizer=number,
            epoch=self._epoch,
            rates=tuple(float(group["lr"]) for group in optimizer.param_groups if "lr" in group),
            settings=tuple(_settings_of(group) for group in optimizer.param_groups),
            sizes=tuple(len(group["params"]) for group in optimizer.param_groups),
            schedules=tuple(int(getattr(it, "last_epoch", -1)) for it in self._schedulers),
            scale=scale,
            scale_growth=growth,
            weights={name: trace_of(it) for name, it in named.items()},
            gradients={name: trace_of(it) for name, it in gradients.items()},
            buffers=_of_models(models, self._buffers_of),
            state={key: _number_or_trace(it) for key, it in state.items()},
            averages=averages,
            averaged_updates=averaged_updates,
        )

    def _models_of(self, optimizer: Optimizer) -> list[nn.Module]:
        """Return the modules that the loop called and this optimizer updates."""
        trained = {id(it) for group in optimizer.param_groups for it in group["params"]}
        called = [it for it in self._called if not trained.isdisjoint(map(id, it.parameters()))]
        if not called:
            return self._models.get(id(optimizer), [])
        inner = {id(part) for it in called for part in it.modules() if part is not it}
        outermost = [it for it in called if id(it) not in inner]
        self._models[id(optimizer)] = outermost
        return outermost

    def _used_generators(self) -> dict[str, str]:
        states = _digests_of_generators()
        return {name: it for name, it in states.items() if it != self._at_start.get(name)}

    def _scale_now(self) -> tuple[float | None, int | None]:
        if self._scaler is None or not self._scaler.is_enabled():
            return None, None
        growth = self._scaler._growth_tracker
        growth = self._scaler._init_growth_tracker if growth is None else int(growth)
        return float(self._scaler.get_scale()), growth


def plain_name(name: str) -> str:
    """Return the name of a tensor without the parts that wrappers add.

    >>> plain_name("module._orig_mod.conv1.weight")
    'conv1.weight'
    """
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _named_parameters(models: Sequence[nn.Module], optimizer: Optimizer) -> dict[str, Tensor]:
    """Return the parameters of models by plain name, and others of the optimizer by place."""
    named: dict[str, Tensor] = {**_of_models(models, nn.Module.named_parameters)}
    known = {id(it) for it in named.values()}
    for group, settings in enumerate(optimizer.param_groups):
        for place, tensor in enumerate(settings["params"]):
            if id(tensor) not in known:
                named[f"group {group}.{place}"] = tensor
    return named


def _of_models(
    models: Sequence[nn.Module], read: Callable[[nn.Module], Iterable[tuple[str, T]]]
) -> dict[str, T]:
    named: dict[str, T] = {}
    for number, model in enumerate(models):
        prefix = f"{number}." if len(models) > 1 else ""
        for name, tensor in read(model):
            plain = prefix + plain_name(name)
            named[prefix + name if plain in named else plain] = tensor
    return named


def _settings_of(group: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a parameter group besides its learning rate."""
    numbers: dict[str, float] = {}
    for key, value in group.items():
        if key in {"params", "lr"}:
            continue
        entries = {key: value}
        if isinstance(value, tuple | list):
            entries = {f"{key}.{place}": it for place, it in enumerate(value)}
        for name, it in entries.items():
            if isinstance(it, bool | int | float) or (isinstance(it, Tensor) and it.numel() == 1):
                numbers[name] = float(it)
    return numbers


def _items_of(values: object) -> Iterator[tuple[str, Any]]:
    """Yield tensors and numbers in the state of a parameter, with their keys."""
    items = values.items() if isinstance(values, Mapping) else [("", values)]
    for key, value in items:
        leaves = tree_leaves(value)
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor | int | float):
                yield (str(key) if len(leaves) == 1 else f"{key}.{place}"), leaf


def _number_or_trace(value: Tensor | float) -> Trace | float:
    if not isinstance(value, Tensor):
        return float(value)
    # torch stores numbers of updates as tensors or not, depending on the version.
    return trace_of(value) if value.numel() != 1 or value.ndim else float(value)


def _generator_states() -> dict[str, str]:
    """Return a digest of each state of a generator of torch, by device."""
    states = {"torch": digest_of_bytes(torch.get_rng_state().numpy().tobytes())}
    kind = accelerator.kind()
    if kind is not None:
        all_states = torch.get_device_module(kind).get_rng_state_all()
        for number, state in enumerate(all_states):
            states[f"{kind}:{number}"] = digest_of_bytes(state.numpy().tobytes())
    return states


def _digests_of_generators() -> dict[str, str]:
    return {
        "python": digest_of_bytes(repr(random.getstate()).encode()),
        "numpy": digest_of(list(np.random.get_state())),
        **_generator_states(),
    }


def _is_in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _file_name(file: Any) -> str:  # noqa: ANN401 -- as torch.save takes it
    """Return the name of a file, without its folder; empty for one in memory."""
    name = file if isinstance(file, str | PathLike) else getattr(file, "name", "")
    return Path(name).name if isinstance(name, str | PathLike) else ""


def _with_subclasses(kind: type[Any]) -> Iterator[type[Any]]:
    yield kind
    for below in kind.__subclasses__():
        yield from _with_subclasses(below)
