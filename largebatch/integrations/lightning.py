"""Callbacks for Lightning."""

from collections.abc import Callable, Iterable
from itertools import count
from typing import Any

from lightning import Callback, LightningModule, Trainer
from torch import Tensor

from largebatch.audit import Findings, audit
from largebatch.polish import polish


class Polish(Callback):  # type: ignore[misc]  # Lightning's types are not read
    """Polish the model before every validation, and when training ends.

    Put it behind a callback that averages weights, such as Lightning's EMAWeightAveraging: then
    the average is polished. `batches` are clean training images, of which every worker may pass all
    or its own share. `network` names the module within the LightningModule that takes images; "" is
    the LightningModule itself.
    """

    def __init__(self, batches: Iterable[Any], network: str = "model") -> None:
        self._batches = batches
        self._network = network

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            self.on_train_end(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002
        polish(pl_module.get_submodule(self._network), self._batches)


class Audit(Callback):  # type: ignore[misc]  # as above
    """Audit the first updates when training starts, and undo them; `findings` has the results.

    The step is the strategy's forward and backward pass, with the trainer's accumulation and
    clipping; `network` is as above, and `loss_fn` a mean over samples.
    """

    def __init__(self, loss_fn: Callable[[Any, Any], Tensor], network: str = "model") -> None:
        self._loss_fn = loss_fn
        self._network = network
        self.findings: Findings | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        strategy = trainer.strategy
        optimizer = trainer.optimizers[0]
        micros = trainer.accumulate_grad_batches

        calls = count(1)
        norm = trainer.gradient_clip_val, trainer.gradient_clip_algorithm

        def step(batch: Any) -> None:
            output = strategy.training_step(strategy.batch_to_device(batch), 0)
            # A LightningModule may return the loss alone, or a dictionary with more for its
            # callbacks.
            loss = output["loss"] if isinstance(output, dict) else output
            strategy.backward(loss / micros, optimizer)
            number = next(calls)
            if number % micros == 0 or number % len(loader) == 0:  # as at the end of an epoch
                pl_module.configure_gradient_clipping(optimizer, *norm)
                optimizer.step()
                optimizer.zero_grad()

        network = pl_module.get_submodule(self._network)
        loader = trainer.train_dataloader
        # Lightning calls `set_epoch` itself before an epoch; in the audit it has to be called for
        # it.
        owner = loader if hasattr(loader, "set_epoch") else getattr(loader, "sampler", None)
        set_epoch = getattr(owner, "set_epoch", None)
        self.findings = audit(network, loader, self._loss_fn, optimizer, step, set_epoch=set_epoch)
