"""Callbacks for the Trainer of Hugging Face's Transformers."""

from collections.abc import Callable, Iterable
from itertools import cycle
from typing import Any

from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from largebatch.audit import Findings, audit
from largebatch.integrations import exchange
from largebatch.optional import require_transformers
from largebatch.polish import polish

require_transformers()

from transformers import Trainer, TrainerCallback  # noqa: E402


class PolishedAverage(TrainerCallback):  # type: ignore[misc]  # Transformers' types are not read
    """An exponential moving average of the weights, polished and used in every evaluation.

    Training continues from its own weights and ends with the polished average in the model.
    `batches` are clean training images, of which every worker may pass all or its own share.
    Raises ValueError with load_best_model_at_end: saved weights are those of training. So it does
    for a resumed run, whose average is not saved, and for several evaluation sets in a dict.
    """

    def __init__(self, batches: Iterable[Any], *, decay: float = 0.999) -> None:
        self.batches, self.decay = batches, decay
        self._averaged: AveragedModel | None = None
        self._is_in_model = False
        self._evaluated: int | None = None
        """Update of the last evaluation."""

    def on_train_begin(self, args: Any, state: Any, *_: Any, model: nn.Module, **__: Any) -> None:  # noqa: ANN401
        """Start the average."""
        if args.load_best_model_at_end:
            raise ValueError("load_best_model_at_end loads weights that are not averaged: unset it")
        if state.global_step > 0:
            raise ValueError("resume_from_checkpoint has no average: train from the first update")
        self._averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(self.decay))

    def on_optimizer_step(self, *_: Any, model: nn.Module, **__: Any) -> None:  # noqa: ANN401
        """Average the new weights."""
        assert self._averaged is not None
        self._averaged.update_parameters(model)

    def on_step_end(self, _: Any, __: Any, control: Any, *, model: nn.Module, **___: Any) -> None:  # noqa: ANN401
        """Exchange weights with the average before an evaluation, and polish them."""
        if control.should_evaluate and not self._is_in_model:
            self._exchange(model)
            polish(model, self.batches)

    on_epoch_end = on_step_end

    def on_evaluate(self, _: Any, state: Any, *__: Any, model: nn.Module, **___: Any) -> None:  # noqa: ANN401
        """Exchange again: training continues from its own weights, which are saved next."""
        if self._is_in_model:
            self._exchange(model)
            self._evaluated = state.global_step
        elif self._evaluated == state.global_step:
            raise ValueError(
                "eval_dataset: the average is evaluated on one set, got several: join them, or "
                "evaluate the others after training"
            )

    def on_train_end(self, *_: Any, model: nn.Module, **__: Any) -> None:  # noqa: ANN401
        """End with the polished average."""
        self._exchange(model)
        polish(model, self.batches)
        self._is_in_model, self._evaluated = False, None

    def _exchange(self, model: nn.Module) -> None:
        assert self._averaged is not None
        exchange(model, self._averaged)
        self._is_in_model = not self._is_in_model


class Audit(TrainerCallback):  # type: ignore[misc]  # as above
    """Audit the first updates when training starts, and undo them; `findings` has the results.

    `trainer.add_callback(Audit(trainer, loss_fn))`; the step is the trainer's own, with its
    accumulation and clipping. `loss_fn` is a mean over samples.
    """

    def __init__(self, trainer: Trainer, loss_fn: Callable[[Any, Any], Tensor]) -> None:
        self.trainer, self.loss_fn = trainer, loss_fn
        self.findings: Findings | None = None

    def on_step_begin(self, args: Any, *_: Any, **__: Any) -> None:  # noqa: ANN401
        """Audit the loop before the first update; every worker calls this."""
        if self.findings is not None:
            return
        trainer, optimizer, model = self.trainer, self.trainer.optimizer, self.trainer.model_wrapped
        loader, micros = trainer.callback_handler.train_dataloader, args.gradient_accumulation_steps
        lasts = cycle(micro == micros - 1 for micro in range(micros))

        def step(batch: Any) -> None:  # noqa: ANN401 -- as the loader has it
            trainer.training_step(model, batch)
            if next(lasts):
                if args.max_grad_norm:
                    trainer.accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm)
                optimizer.step()
                optimizer.zero_grad()

        set_epoch = getattr(loader, "set_epoch", None)
        self.findings = audit(model, loader, self.loss_fn, optimizer, step, set_epoch=set_epoch)
