"""An audit of Hugging Face's Trainer, before its first update.

python docs/examples/audit_transformers.py, or torchrun --nproc-per-node=2 ...
"""

import tempfile
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset
from transformers import ResNetConfig, ResNetForImageClassification, Trainer, TrainingArguments
from transformers.trainer_callback import TrainerCallback

from largebatch.audit import audit
from largebatch.data.datasets.digits import load_digits


class Digits(Dataset[dict[str, torch.Tensor]]):
    """Images of 32 x 32 pixels and their labels, by the names that the model expects."""

    def __init__(self) -> None:
        images, self.labels = map(torch.as_tensor, load_digits())
        self.images = images.view(-1, 1, 8, 8).repeat(1, 3, 4, 4).float() / 16

    def __getitem__(self, item: int) -> dict[str, torch.Tensor]:
        return {"pixel_values": self.images[item], "labels": self.labels[item]}

    def __len__(self) -> int:
        return len(self.labels)


class Audit(TrainerCallback):
    """An audit with the trainer's own training step."""

    trainer: Trainer

    def on_step_begin(self, _: Any, state: Any, *__: Any, **___: Any) -> None:  # noqa: ANN401
        """Audit the first updates, and undo them."""
        if state.global_step:
            return
        trainer, optimizer = self.trainer, self.trainer.optimizer

        def step(batch: dict[str, torch.Tensor]) -> None:
            trainer.training_step(trainer.model_wrapped, batch)
            trainer.accelerator.clip_grad_norm_(trainer.model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

        loader = trainer.callback_handler.train_dataloader
        audit(trainer.model_wrapped, loader, cross_entropy, optimizer, step)


def main() -> None:
    """Audit the loop, then train on the digits."""
    torch.manual_seed(0)
    model = ResNetForImageClassification(
        ResNetConfig(
            embedding_size=16, hidden_sizes=[16, 32, 64], depths=[1, 1, 1], layer_type="basic",
            num_labels=10,
        )
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        words = TrainingArguments(
            folder, num_train_epochs=1, per_device_train_batch_size=48, learning_rate=2e-3,
            use_cpu=not torch.cuda.is_available(), save_strategy="no", report_to=[],
        )  # fmt: skip
        trainer = Trainer(model, words, train_dataset=Digits(), callbacks=[])
        check = Audit()
        check.trainer = trainer
        trainer.add_callback(check)
        trainer.train()


if __name__ == "__main__":
    main()
