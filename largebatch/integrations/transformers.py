"""Callbacks for the Trainer of Hugging Face's Transformers."""

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformers import Trainer, TrainerCallback

from largebatch.audit import Findings
from largebatch.integrations import audit_updates, exchange, polished
from largebatch.polish import polish


class PolishedAverage(TrainerCallback):  # type: ignore[misc]  # Transformers' types are not read
    """An exponential moving average of the weights, polished and used in every evaluation.

    `trainer.add_callback(PolishedAverage(trainer, batches))`. Training continues from its own
    weights and ends with the polished average in the model. `batches` are clean training images, of
    which every worker may pass all or its own share. Raises ValueError with load_best_model_at_end
    and for a resumed run: the average is not saved.
    """

    def __init__(self, trainer: Trainer, batches: Iterable[Any], *, decay: float = 0.999) -> None:
        self.batches, self.decay, own = batches, decay, trainer.evaluation_loop
        self._averaged: AveragedModel | None = None

        def evaluation_loop(*args: Any, **words: Any) -> Any:
            if self._averaged is None:  # not in training
                return own(*args, **words)
            with polished(trainer.model, self._averaged, self.batches):
                return own(*args, **words)

        trainer.evaluation_loop = evaluation_loop

    def on_train_begin(self, args: Any, state: Any, _: Any, *, model: nn.Module, **__: Any) -> None:
        if args.load_best_model_at_end or state.global_step:
            raise ValueError(
                "the average is not saved: unset load_best_model_at_end and resume_from_checkpoint"
            )
        self._averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(self.decay))

    def on_optimizer_step(self, *_: Any, model: nn.Module, **__: Any) -> None:
        assert self._averaged is not None
        self._averaged.update_parameters(model)

    def on_train_end(self, *_: Any, model: nn.Module, **__: Any) -> None:
        assert self._averaged is not None
        exchange(model, self._averaged)
        polish(model, self.batches)
        self._averaged = None


class Audit(TrainerCallback):  # type: ignore[misc]  # as above
    """Audit the first updates when training starts, and undo them; `findings` has the results.

    `trainer.add_callback(Audit(trainer, loss_fn))`; the step is the trainer's own, with its
    accumulation and clipping. `loss_fn` is a mean over samples.
    """

    def __init__(self, trainer: Trainer, loss_fn: Callable[[Any, Any], Tensor]) -> None:
        self.trainer, self.loss_fn = trainer, loss_fn
        self.findings: Findings | None = None

    def on_step_begin(self, args: Any, *_: Any, **__: Any) -> None:
        if self.findings is not None:
            return
        trainer, model = self.trainer, self.trainer.model_wrapped

        def backward(batch: Any) -> None:
            trainer.training_step(model, batch)

        def clip() -> None:
            if args.max_grad_norm:
                trainer.accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm)

        loader, micros = trainer.callback_handler.train_dataloader, args.gradient_accumulation_steps
        self.findings = audit_updates(
            model, loader, self.loss_fn, trainer.optimizer, backward, clip, micros=micros
        )
