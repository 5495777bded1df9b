"""Callbacks for the Trainer of Hugging Face's Transformers."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from inspect import signature
from itertools import islice
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformers import Trainer, TrainerCallback

from largebatch.audit import Findings, audit
from largebatch.integrations import exchange, polished
from largebatch.polish import polish


class PolishedAverage(TrainerCallback):  # type: ignore[misc]  # Transformers' types are not read
    """An exponential moving average of the weights, polished and evaluated in every evaluation.

    `trainer.add_callback(PolishedAverage(trainer, batches))`. Training continues from its own
    weights and ends with the polished average in the model. An evaluation in training is made
    twice: `eval_...` are of the training weights, which a checkpoint has, and `eval_average_...` of
    the polished average, which is saved in the folder `average` of the checkpoint. `batches` are
    clean training images, of which every worker may pass all or its own share. Raises ValueError
    with load_best_model_at_end and for a resumed run: the average does not continue.
    """

    def __init__(self, trainer: Trainer, batches: Iterable[Any], *, decay: float = 0.999) -> None:
        self._batches = batches
        self._decay = decay
        own_evaluation = trainer.evaluation_loop
        self._trainer = trainer
        self._averaged: AveragedModel | None = None

        def evaluation_loop(*args: Any, **words: Any) -> Any:
            result = own_evaluation(*args, **words)
            if self._averaged is None:  # not in training
                return result
            prefix = words.get("metric_key_prefix", "eval")
            # The second evaluation sees the same data: its own prefix keeps the figures apart.
            with polished(trainer.model, self._averaged, self._batches):
                average = own_evaluation(
                    *args, **words | {"metric_key_prefix": f"{prefix}_average"}
                )
            result.metrics.update(average.metrics)
            return result

        # No callback is called before an evaluation, so the loop itself is wrapped.
        trainer.evaluation_loop = evaluation_loop

    def on_train_begin(self, args: Any, state: Any, _: Any, *, model: nn.Module, **__: Any) -> None:
        if args.load_best_model_at_end or state.global_step:
            raise ValueError(
                "the average is not saved: unset load_best_model_at_end and resume_from_checkpoint"
            )
        self._averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(self._decay))

    def on_optimizer_step(self, *_: Any, model: nn.Module, **__: Any) -> None:
        assert self._averaged is not None
        self._averaged.update_parameters(model)

    def on_save(self, args: Any, state: Any, _: Any, *, model: nn.Module, **__: Any) -> None:
        assert self._averaged is not None
        folder = Path(args.output_dir, f"checkpoint-{state.global_step}", "average")
        with polished(model, self._averaged, self._batches):  # on every worker
            if args.should_save:
                self._trainer._save(str(folder))

    def on_train_end(self, *_: Any, model: nn.Module, **__: Any) -> None:
        assert self._averaged is not None
        exchange(model, self._averaged)
        polish(model, self._batches)
        self._averaged = None


class Audit(TrainerCallback):  # type: ignore[misc]  # as above
    """Audit the first updates when training starts, and undo them; `findings` has the results.

    `trainer.add_callback(Audit(trainer, loss_fn))`; the step is the trainer's own, with its
    accumulation and clipping. `loss_fn` is a mean over samples.
    """

    def __init__(self, trainer: Trainer, loss_fn: Callable[[Any, Any], Tensor]) -> None:
        self._trainer = trainer
        self._loss_fn = loss_fn
        self.findings: Findings | None = None

    def on_step_begin(self, args: Any, *_: Any, **__: Any) -> None:
        if self.findings is not None:
            return
        trainer = self._trainer
        model = trainer.model_wrapped
        optimizer = trainer.optimizer
        gradients = trainer.accelerator.gradient_state
        scheduler = trainer.lr_scheduler
        windows = _Windows(
            trainer.callback_handler.train_dataloader, args.gradient_accumulation_steps
        )
        divisor = trainer.current_gradient_accumulation_steps
        items = list[Any]()

        def step(batch: Any) -> None:
            number = windows.place
            window = windows.window
            # The trainer divides the sum of the losses by all labels of an update, which it
            # counts before the first of its passes.
            if number == 0:
                items[:] = [_items_in(window, trainer, args.device)]
                trainer.current_gradient_accumulation_steps = len(window)
            is_last = number == len(window) - 1
            gradients._set_sync_gradients(is_last)
            # DistributedDataParallel sums gradients in the last pass only, as in the trainer's
            # own loop.
            with nullcontext() if is_last else trainer.accelerator.no_sync(model=model):
                trainer.training_step(model, batch, *items)
            if not is_last:
                return
            if args.max_grad_norm:
                trainer.accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm)
            optimizer.step()
            if not isinstance(scheduler, ReduceLROnPlateau):
                scheduler.step()
            model.zero_grad()

        dataloader = windows._dataloader
        owner = (
            dataloader if hasattr(dataloader, "set_epoch") else getattr(dataloader, "sampler", None)
        )
        set_epoch = getattr(owner, "set_epoch", None)
        try:
            self.findings = audit(
                model, windows, self._loss_fn, optimizer, step, set_epoch=set_epoch
            )
        finally:
            trainer.current_gradient_accumulation_steps = divisor


class _Windows:
    """A loader's batches, read ahead by those of an update: the trainer counts their labels."""

    def __init__(self, loader: Any, micros: int) -> None:
        self._dataloader = loader
        self._micros = micros
        self.window: list[Any] = []
        self.place = 0
        """Place in the window of the batch that was yielded last."""

    def __len__(self) -> int:
        return len(self._dataloader)

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self._dataloader)
        while window := list(islice(batches, self._micros)):
            self.window = window
            for self.place, batch in enumerate(window):
                yield batch


def _items_in(window: list[Any], trainer: Trainer, device: Any) -> Any:
    """Return the number of labels in the batches of an update as the trainer counts them."""
    words = {"device": device}  # since Transformers 4.49
    parameters = signature(trainer.get_batch_samples).parameters
    words = {name: value for name, value in words.items() if name in parameters}
    return trainer.get_batch_samples(iter(window), len(window), **words)[1]
