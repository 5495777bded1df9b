"""The audit of a script that does not call it: the script's own loop makes the updates.

The script runs as `python script.py` would. Hooks of torch see its first update, and with it the
model, the optimizer, the loss function and the loader. When the loop then requests the next batch,
an audit starts in a thread; its step gives the loop a batch, and waits until the loop requests
another one. So forward, backward, reduction, clipping and update are those of the script, which
ends with the audit.
"""

import gc
import os
import runpy
import sys
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from importlib import import_module
from inspect import signature
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader, DistributedSampler

from largebatch.audit.auditing import audit_from
from largebatch.audit.findings import Findings
from largebatch.audit.subject import NoLossError
from largebatch.audit.watchdog import Watchdog, leave_before_the_audit
from largebatch.errors import DataError
from largebatch.models.inputs import labels_of
from largebatch.models.wrappers import device_of, uncompiled
from largebatch.optional import require_torchvision
from largebatch.replacing import replaced

_LOSSES = (
    *("cross_entropy", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "kl_div"),
    *("binary_cross_entropy", "binary_cross_entropy_with_logits"),
)
"""Functions of torch.nn.functional; a loss that is a module is seen whatever it calls."""


_MOST_AHEAD = 2
"""Largest number of batches that a loader may be ahead of the loop."""

_UPDATES_WITHOUT_A_CALL = 3
"""Number of batches after which an optimizer counts whose tensors are of no model that was called:
layers with an optimizer of their own, which is first, come before it."""


class _EndedError(BaseException):
    """Ends the script after its audit; not an Exception, which the script may catch."""


def audit_script(path: Path, arguments: Sequence[str], timeout: float = 300) -> Findings:
    """Run a script with its arguments until its first updates are audited; every worker calls this.

    Raises DataError, with what was not seen, if the script ends before that or cannot be audited. A
    wait of the audit for another worker ends this process after `timeout` seconds, with the stacks
    of all workers. So does a script that ends its process by itself.
    """
    watchdog = Watchdog(path, timeout)
    watch = _ScriptWatch(timeout, watchdog)
    require_torchvision()  # what most scripts import, also where it was built for another torch
    sys.path.insert(0, str(path.parent.resolve()))
    sys.argv = [str(path), *arguments]
    watchdog.start()
    try:
        _run(path, watch)
    finally:
        if watch.thread is None:
            watchdog.stop()
    if watch.thread is not None:
        watchdog.thread_of_audit = watch.thread
        watch.thread.join()
        watchdog.stop()
        # A DistributedDataParallel that outlives its process group can block.
        watch.models = []
        watch.optimizer = None
        gc.collect()
        if dist.is_initialized():
            dist.destroy_process_group()
    if isinstance(watch.result, Findings):
        return watch.result
    if watch.result is not None:
        raise watch.result
    missing = "requested a batch after an update"
    if watch.loader is None:
        missing = "read a batch from a DataLoader"
    elif watch.optimizer is None:
        missing = "made an update of a model that it called"
    raise DataError(
        f"{path}: it ended before it had {missing} in this process; pass {path}:FUNCTION, which "
        "returns (model, loader, loss_fn, optimizer), or call largebatch.audit in the script"
    )


def _run(path: Path, watch: "_ScriptWatch") -> None:
    """Run the script until its audit ends it; an error in between becomes one of the audit's."""
    end: Exception = RuntimeError("the script ended")
    try:
        with watch.installed(), _no_exit(path, watch):
            runpy.run_path(str(path), run_name="__main__")
        watch.watchdog.end(str(end))
    except _EndedError:
        pass
    except SystemExit as error:
        if watch.thread is not None:
            watch.watchdog.fail(error)
        elif error.code:
            raise DataError(
                f"{path}: it exited with {error.code} before its first updates were audited; "
                "options of the audit, such as --workers, come before the script"
            ) from None
    except Exception as error:
        if watch.thread is None:
            raise
        watch.watchdog.fail(error)
        end = error
    finally:  # also after Ctrl-C: the step of the audit waits for the script
        watch.requests.put(end)


class _ScriptWatch:
    """What hooks saw of a script, and the exchange of batches between it and its audit."""

    def __init__(self, timeout: float, watchdog: Watchdog) -> None:
        self.timeout = timeout
        self.watchdog = watchdog
        self.models: list[nn.Module] = []
        self.loss: tuple[Callable[[Any, Any], Tensor], object] | None = None
        """Loss function and labels of its last call."""

        self.terms = 0
        """Largest number of losses of one pass, of which the step has a sum or a mean of losses
        that are not reduced yet."""

        self._losses = 0
        self._outermost: nn.Module | None = None

        self._uncalled: Optimizer | None = None
        """Optimizer of tensors that no called model has."""

        self.optimizer: Optimizer | None = None
        self.trained: DataLoader[Any] | None = None
        """The loader that was read last before the optimizer's update."""

        self.set_epoch: Callable[[int], object] | None = None
        self.loader: DataLoader[Any] | None = None
        self.batches_read: deque[object] = deque()
        """Batches that this loader gave last; the loop may not have used the newest ones."""

        self.read = 0
        """Number of batches that the script has read in this epoch."""

        self.thread: threading.Thread | None = None
        self.result: Findings | BaseException | None = None
        self.batches: SimpleQueue[Any] = SimpleQueue()
        self.requests: SimpleQueue[Exception | None] = SimpleQueue()
        """An item for each request of the script for a batch; an error if it has failed."""

        self.compiled: list[object] = []
        """Functions that the script has compiled, other than models."""

        self._hooks = ExitStack()
        self._depth = 0
        self._is_eager = False
        self._owner = threading.current_thread()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """See what a script does in this block."""
        torch_iter = DataLoader.__iter__
        torch_set_epoch = DistributedSampler.set_epoch
        torch_destroy = dist.destroy_process_group
        torch_compile = torch.compile

        def iterate(loader: DataLoader[Any]) -> Iterator[Any]:
            batches = torch_iter(loader)
            return self._follow(loader, batches) if self._is_of_script() else batches

        def set_epoch(sampler: DistributedSampler[Any], epoch: int) -> None:
            if self._is_of_script():
                self.set_epoch = sampler.set_epoch
            torch_set_epoch(sampler, epoch)

        def destroy(*args: Any, **words: Any) -> None:  # noqa: ANN401 -- as of torch
            if self.thread is not None and self._is_of_script():  # the audit needs the group
                raise RuntimeError("the script ended before its updates were audited")
            torch_destroy(*args, **words)

        def compile_eagerly(*args: Any, **words: Any) -> Any:  # noqa: ANN401 -- as of torch
            import_module("torch._dynamo")  # without it nothing is switched off

            # Graphs do not have hooks: the audit compares compiled code with eager code later.
            if not self._is_eager:
                self._is_eager = True
                stack.enter_context(uncompiled())
                warnings.filterwarnings("ignore", "Using `torch.compile.*global hooks")
            result = torch_compile(*args, **words)
            target = args[0] if args else words.get("model")  # None: a decorator with options
            is_of_model = isinstance(getattr(target, "__self__", target), nn.Module)
            if target is not None and not is_of_model:
                self.compiled.append(result)
            return result

        with self._hooks, ExitStack() as stack:
            stack.enter_context(replaced(torch, "compile", compile_eagerly))
            for handle in (
                register_module_forward_pre_hook(self._enter),
                register_module_forward_hook(self._leave, always_call=True),
                register_optimizer_step_post_hook(self._after_update),
            ):
                self._hooks.callback(handle.remove)
            for name in _LOSSES:
                call_loss = partial(self._call_loss, getattr(F, name))
                self._hooks.enter_context(replaced(F, name, call_loss))
            stack.enter_context(replaced(DataLoader, "__iter__", iterate))
            stack.enter_context(replaced(DistributedSampler, "set_epoch", set_epoch))
            stack.enter_context(replaced(dist, "destroy_process_group", destroy))
            yield

    def _is_of_script(self) -> bool:
        return threading.current_thread() is self._owner

    def _enter(self, module: nn.Module, _: object) -> None:
        if not self._depth:
            self._outermost = module
            if next(module.parameters(), None) is not None:
                self._losses = 0
        self._depth += 1

    def _see_loss(self, function: Callable[[Any, Any], Tensor], labels: object) -> None:
        self.loss = function, labels
        self._losses += 1
        self.terms = max(self.terms, self._losses)

    def _leave(self, module: nn.Module, args: tuple[Any, ...], output: object) -> None:
        self._depth -= 1
        if self._depth or not torch.is_grad_enabled():
            return
        if next(module.parameters(), None) is not None:
            self.models = [*(it for it in self.models if it is not module), module]
        elif isinstance(output, Tensor) and output.ndim == 0 and len(args) == 2:
            self._see_loss(module, args[1])

    def _call_loss(self, function: Callable[..., Tensor], *args: Any, **words: Any) -> Tensor:  # noqa: ANN401
        options = dict(signature(function).bind(*args, **words).arguments)
        scores = options.pop("input")
        labels = options.pop("target")
        loss = function(*args, **words)
        # A loss that is a module is seen when its forward pass ends.
        outermost = self._outermost if self._depth else None
        is_within_loss = outermost is not None and next(outermost.parameters(), None) is None
        if torch.is_grad_enabled() and scores.requires_grad and not is_within_loss:
            self._see_loss(partial(function, **options), labels)
            if loss.ndim:
                self.terms = max(self.terms, loss.numel())
        return loss

    def _after_update(self, optimizer: Optimizer, *_: object) -> None:
        tensors = {id(it) for group in optimizer.param_groups for it in group["params"]}

        def is_updated(model: nn.Module) -> bool:
            return not tensors.isdisjoint(map(id, model.parameters()))

        # The script may have called a teacher or an average after it: what is updated comes last.
        self.models.sort(key=is_updated)
        if self.models and is_updated(self.models[-1]):
            self.optimizer = optimizer
            self.trained = self.loader
        else:
            self._uncalled = optimizer

    def _follow(self, loader: DataLoader[Any], batches: Iterator[Any]) -> Iterator[Any]:
        """Yield a loader's batches; after the first update those of the audit."""
        last: deque[object] = deque(maxlen=_MOST_AHEAD + 1)
        for number, batch in enumerate(batches, 1):
            last.append(batch)
            self._set_read(loader, last, number)
            yield batch
            if number == _UPDATES_WITHOUT_A_CALL and self.optimizer is None and self._uncalled:
                self.optimizer = self._uncalled
                self.trained = loader
                self.models = []
            if self.optimizer is None or self.trained is not loader:
                continue
            # The script may have evaluated since, with another loader.
            self._set_read(loader, last, number)
            self._hooks.close()
            self._start()
            while (batch := self.batches.get()) is not None:
                self._hand_over(None)
                yield batch
                self._hand_over(self.thread)
                self.requests.put(None)
            raise _EndedError

    def _set_read(self, loader: DataLoader[Any], batches: deque[object], number: int) -> None:
        self.loader = loader
        self.batches_read = batches
        self.read = number

    def _hand_over(self, to: threading.Thread | None) -> None:
        """Watch the thread of the audit, or the script."""
        self.watchdog.thread_of_audit = to
        self.watchdog.progress()

    def _start(self) -> None:
        model = self.models[-1] if self.models else self._tensors_as_model()
        loader = self.loader
        optimizer = self.optimizer
        no_loss = self._no_loss()
        loss_fn = F.cross_entropy if self.loss is None else self.loss[0]
        # Own samplers are not DistributedSamplers, so whether the script sets their epoch is not
        # seen: it is taken to do so.
        sampler = getattr(loader, "sampler", None)
        set_epoch = self.set_epoch
        if not isinstance(sampler, DistributedSampler):
            set_epoch = getattr(sampler, "set_epoch", None)

        def step(batch: object) -> None:
            # The script makes its update between taking this batch and requesting the next one.
            self.batches.put(batch)
            error = self.requests.get()
            if error is not None:
                self.requests.put(error)  # for the next call
                raise error

        def work() -> None:
            device = device_of(model)
            try:
                if device.type != "cpu":
                    torch.get_device_module(device).set_device(device)
                self._wait_for_all()
                self.result = audit_from(
                    self.read,
                    self.watchdog.progress,
                    self.compiled,
                    no_loss,
                    self._read_ahead() or (),
                    model=model,
                    loader=loader,
                    loss_fn=loss_fn,
                    optimizer=optimizer,
                    step=step,
                    set_epoch=set_epoch,
                )
            except BaseException as error:  # raised in the main thread
                self.result = error
            self.batches.put(None)  # ends the script

        # Set before it starts: the audit restores what the hook of set_epoch refers to.
        self.thread = threading.Thread(target=work, name="audit", daemon=True)
        self._hand_over(self.thread)
        self.watchdog.begin()
        self.thread.start()

    def _tensors_as_model(self) -> nn.Module:
        """Return a module of the tensors that the optimizer updates."""
        assert self.optimizer is not None
        groups = self.optimizer.param_groups
        return nn.ParameterList(it for group in groups for it in group["params"])

    def _read_ahead(self) -> list[object] | None:
        """Return the batches that the loader gave after the one whose labels the loss had last.

        Accelerate's loaders are one batch ahead of the loop. None if it is none of the last ones.
        """
        labels = None if self.loss is None else self.loss[1]
        ahead: list[object] = []
        for batch in reversed(self.batches_read):
            if _has_labels(batch, labels):
                return ahead
            ahead.insert(0, batch)
        return None

    def _no_loss(self) -> NoLossError | None:
        """Return why the loss of the script's updates cannot be computed again; None if it can."""
        if not self.models:
            return NoLossError(
                "not compared with one process: the script calls no model with the tensors that "
                "its optimizer updates",
                "call the wrapped model: DistributedDataParallel reduces only what its own forward "
                "pass has computed",
            )
        if self._read_ahead() is None:
            return NoLossError(
                "not compared with one process: the script has not passed the labels of the batch "
                "that it read last to a loss function (mixup, labels first, a loss in the model)",
                "call largebatch.audit in it, or a part of largebatch.integrations",
            )
        if self.terms > 1:
            return NoLossError(
                "not compared with one process: the script computes its loss from several calls of "
                "a loss function, or from one with reduction='none'",
                "call largebatch.audit in it, with a loss_fn of all terms",
            )
        return None

    def _wait_for_all(self) -> None:
        """Wait until all workers have made an update: sums of theirs must not meet the audit's."""
        if dist.is_initialized() and "gloo" in str(dist.get_backend()):
            # The watchdog ends this wait before: it knows where the others are.
            dist.monitored_barrier(timeout=timedelta(seconds=2 * self.timeout + 60))


@contextmanager
def _no_exit(path: Path, watch: _ScriptWatch) -> Iterator[None]:
    """Report it if the script ends its process, without an exception, before the audit is made.

    Processes that the script forks, and this package, end as usual.
    """
    process = os.getpid()

    def guard(name: str) -> Callable[..., Any]:
        function = getattr(os, name)

        def leave(*args: Any, **words: Any) -> Any:  # noqa: ANN401 -- of any of the functions
            module = str(sys._getframe(1).f_globals.get("__name__"))
            is_of_script = os.getpid() == process and not module.startswith("largebatch.")
            if is_of_script and watch.result is None:
                leave_before_the_audit(path, f"os.{name}")
            return function(*args, **words)

        return leave

    with ExitStack() as stack:
        for name in ("_exit", "execv", "execve", "abort"):
            stack.enter_context(replaced(os, name, guard(name)))
        yield


def _has_labels(batch: Any, labels: object) -> bool:  # noqa: ANN401 -- as the loader has it
    """Return True if these are the labels of a batch, or of its last part."""
    try:
        of_batch = labels_of(batch)
    except ValueError:
        return False
    if not isinstance(labels, Tensor) or not 0 < len(labels) <= len(of_batch):
        return False
    last = of_batch[-len(labels) :]
    return labels.shape == last.shape and bool((labels.cpu() == last.cpu()).all())
