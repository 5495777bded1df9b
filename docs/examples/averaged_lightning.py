"""Lightning's weight-averaging callback, polished when training ends.

python docs/examples/averaged_lightning.py
"""

import lightning
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Subset, TensorDataset

from largebatch.data.datasets.digits import load_digits
from largebatch.models import build
from largebatch.polish import polish
from largebatch.training import evaluate


class Classifier(lightning.LightningModule):
    """A small ResNet."""

    def __init__(self) -> None:
        super().__init__()
        self.model = build("cifar_resnet8", num_classes=10)

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        """Return the loss of a batch."""
        return cross_entropy(self.model(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return momentum SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def main() -> None:
    """Train on the digits; print top-1 as the callback leaves the model, and polished."""
    images, labels = map(torch.as_tensor, load_digits())
    digits = TensorDataset(images.view(-1, 1, 8, 8).repeat(1, 3, 2, 2).float() / 16, labels)
    train_set, val_set = Subset(digits, range(1437)), Subset(digits, range(1437, 1797))
    lightning.seed_everything(0, verbose=False)
    module = Classifier()
    averaging = EMAWeightAveraging(decay=0.98, update_starting_at_step=1, use_buffers=False)
    trainer = lightning.Trainer(
        max_epochs=4, accelerator="cpu", devices=1, callbacks=[averaging],
        logger=False, enable_checkpointing=False, enable_progress_bar=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(train_set, 48, shuffle=True, drop_last=True))

    clean_loader, val_loader = DataLoader(train_set, 64), DataLoader(val_set, 64)
    left = evaluate(module.model, val_loader)
    polish(module.model, clean_loader)  # on several workers each passes its share
    polished = evaluate(module.model, val_loader)
    print(f"top-1 of the average {left.top1:.2%}, polished {polished.top1:.2%}")


if __name__ == "__main__":
    main()
