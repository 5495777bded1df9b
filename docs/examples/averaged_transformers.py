"""Averaged weights of Hugging Face's Trainer, polished when training ends.

python docs/examples/averaged_transformers.py, or torchrun --nproc-per-node=2 ...
"""

import tempfile
from typing import Any

import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset, Subset
from transformers import ResNetConfig, ResNetForImageClassification, Trainer, TrainingArguments
from transformers.trainer_callback import TrainerCallback

from largebatch.data.datasets.digits import load_digits
from largebatch.polish import polish
from largebatch.training import evaluate


class Digits(Dataset[dict[str, torch.Tensor]]):
    """Images of 32 x 32 pixels and their labels, by the names that the model expects."""

    def __init__(self) -> None:
        images, self.labels = map(torch.as_tensor, load_digits())
        self.images = images.view(-1, 1, 8, 8).repeat(1, 3, 4, 4).float() / 16

    def __getitem__(self, item: int) -> dict[str, torch.Tensor]:
        return {"pixel_values": self.images[item], "labels": self.labels[item]}

    def __len__(self) -> int:
        return len(self.labels)


class Averaging(TrainerCallback):
    """An exponential moving average of the weights."""

    def __init__(self, model: torch.nn.Module) -> None:
        average = get_ema_multi_avg_fn(0.98)
        self.averaged = AveragedModel(model, multi_avg_fn=average)

    def on_optimizer_step(self, *_: Any, model: torch.nn.Module, **__: Any) -> None:  # noqa: ANN401
        """Take the new weights into the average."""
        self.averaged.update_parameters(model)


def main() -> None:
    """Train on the digits; print top-1 of the average as left and polished."""
    digits = Digits()
    train_set, val_set = Subset(digits, range(1437)), Subset(digits, range(1437, 1797))
    torch.manual_seed(0)
    model = ResNetForImageClassification(
        ResNetConfig(
            embedding_size=16, hidden_sizes=[16, 32, 64], depths=[1, 1, 1], layer_type="basic",
            num_labels=10,
        )
    )  # fmt: skip
    averaging = Averaging(model)
    with tempfile.TemporaryDirectory() as folder:
        words = TrainingArguments(
            folder, num_train_epochs=4, per_device_train_batch_size=48, learning_rate=2e-3,
            lr_scheduler_type="constant", use_cpu=not torch.cuda.is_available(),
            save_strategy="no", report_to=[],
        )  # fmt: skip
        trainer = Trainer(model, words, train_dataset=train_set, callbacks=[averaging])
        trainer.train()

    rank, workers = words.process_index, words.world_size
    val_loader = DataLoader(Subset(val_set, range(rank, len(val_set), workers)), 64)
    left = evaluate(averaging.averaged, val_loader)
    clean_loader = DataLoader(Subset(train_set, range(rank, len(train_set), workers)), 64)
    polish(averaging.averaged, clean_loader)
    polished = evaluate(averaging.averaged, val_loader)
    if rank == 0:
        print(f"top-1 of the average {left.top1:.2%}, polished {polished.top1:.2%}")


if __name__ == "__main__":
    main()
