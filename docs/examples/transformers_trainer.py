"""Hugging Face's Trainer, audited, with averaged weights that are polished.

python docs/examples/transformers_trainer.py, or torchrun --nproc-per-node=2 ...
"""

import tempfile

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, Subset
from transformers import ResNetConfig, ResNetForImageClassification, Trainer, TrainingArguments

from largebatch import evaluate
from largebatch.data.datasets.digits import load_digits
from largebatch.integrations.transformers import Audit, PolishedAverage


class Digits(Dataset[dict[str, torch.Tensor]]):
    """Images of 32 x 32 pixels and their labels, by the names that the model expects."""

    def __init__(self) -> None:
        images, self.labels = map(torch.as_tensor, load_digits())
        self.images = images.view(-1, 1, 8, 8).repeat(1, 3, 4, 4).float() / 16

    def __getitem__(self, item: int) -> dict[str, torch.Tensor]:
        return {"pixel_values": self.images[item], "labels": self.labels[item]}

    def __len__(self) -> int:
        return len(self.labels)


def main() -> None:
    """Train on the digits; print top-1 of the polished average."""
    digits = Digits()
    train_set, val_set = Subset(digits, range(1437)), Subset(digits, range(1437, 1797))
    clean_loader = DataLoader(train_set, 64)
    torch.manual_seed(0)
    model = ResNetForImageClassification(
        ResNetConfig(
            embedding_size=16, hidden_sizes=[16, 32, 64], depths=[1, 1, 1], layer_type="basic",
            num_labels=10,
        )
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        words = TrainingArguments(
            folder, num_train_epochs=4, per_device_train_batch_size=48, learning_rate=2e-3,
            lr_scheduler_type="constant", use_cpu=not torch.cuda.is_available(),
            eval_strategy="epoch", save_strategy="no", report_to=[],
        )  # fmt: skip
        trainer = Trainer(model, words, train_dataset=train_set, eval_dataset=val_set)
        trainer.add_callback(PolishedAverage(trainer, clean_loader, decay=0.98))
        trainer.add_callback(Audit(trainer, cross_entropy))
        trainer.train()
    own = Subset(val_set, range(words.process_index, len(val_set), words.world_size))
    found = evaluate(model, DataLoader(own, 64), expected=len(val_set))
    if words.process_index == 0:
        print(f"polished: top-1 {found.top1:.2%}")


if __name__ == "__main__":
    main()
