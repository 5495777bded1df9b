"""LARS, BatchNorm spans and polishing in Lightning; its Trainer starts the workers.

python docs/examples/lightning_module.py
"""

import lightning
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Subset, TensorDataset

from largebatch.data.datasets.digits import load_digits
from largebatch.models import build, param_groups, with_span
from largebatch.optim import LARS
from largebatch.polish import polish
from largebatch.schedules import cosine, warmup
from largebatch.training import evaluate


class Classifier(lightning.LightningModule):
    """A small ResNet whose statistics are those of 16 images."""

    def __init__(self, clean: DataLoader[list[Tensor]], steps: int) -> None:
        super().__init__()
        self.model = with_span(build("cifar_resnet8", num_classes=10), 16)
        self.clean, self.steps = clean, steps

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        """Return the loss of a batch."""
        return cross_entropy(self.model(batch[0]), batch[1])

    def on_train_end(self) -> None:
        """Measure BatchNorm's statistics on clean images of all workers."""
        polish(self.model, self.clean)

    def configure_optimizers(self) -> tuple[list[Optimizer], list[dict[str, object]]]:
        """Return LARS and its schedule, which gives the part of the peak for every step."""
        optimizer = LARS(param_groups(self.model, weight_decay=1e-4), lr=0.5, eta=0.02)
        part = warmup(cosine(peak=1.0, steps=self.steps), steps=10)
        return [optimizer], [{"scheduler": LambdaLR(optimizer, part), "interval": "step"}]


def main() -> None:
    """Train on the digits."""
    images, labels = map(torch.as_tensor, load_digits())
    digits = TensorDataset(images.view(-1, 1, 8, 8).repeat(1, 3, 2, 2).float() / 16, labels)
    train_set, val_set = Subset(digits, range(1437)), Subset(digits, range(1437, 1797))
    loader = DataLoader(train_set, 48, shuffle=True, drop_last=True)
    lightning.seed_everything(0, verbose=False)
    module = Classifier(DataLoader(train_set, 64), steps=6 * len(loader))
    trainer = lightning.Trainer(
        max_epochs=6, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False
    )
    trainer.fit(module, loader)
    found = evaluate(module.model, DataLoader(val_set, 64))
    print(f"polished: top-1 {found.top1:.2%} of {found.samples} images")


if __name__ == "__main__":
    main()
