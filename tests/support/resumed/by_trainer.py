"""Hugging Face's Trainer, resumed by `resume_from_checkpoint` within an epoch.

python by_trainer.py --updates 4
python by_trainer.py --updates 2 && python by_trainer.py --updates 4 --resume checkpoint-2
"""

import argparse

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments


class Samples(Dataset[dict[str, Tensor]]):
    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(48, 8, generator=generator)
        self.labels = torch.randint(3, (48,), generator=generator)

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"inputs": self.inputs[index], "labels": self.labels[index]}


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 3)
        )

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        scores = self.layers(inputs)
        return {"loss": cross_entropy(scores, labels), "logits": scores}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--updates", type=int, required=True)
    parser.add_argument("--resume")
    args = parser.parse_args()
    torch.manual_seed(0)
    words = TrainingArguments(
        ".",
        max_steps=args.updates,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        lr_scheduler_type="constant",
        save_steps=2,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(Classifier(), words, train_dataset=Samples())
    trainer.train(resume_from_checkpoint=args.resume)


if __name__ == "__main__":
    main()
