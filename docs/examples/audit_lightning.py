"""An audit of a Lightning module, when its training starts.

python docs/examples/audit_lightning.py
"""

from typing import Any

import lightning
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from largebatch.audit import audit
from largebatch.data.datasets.digits import load_digits
from largebatch.models import build


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


class Audit(lightning.Callback):
    """An audit with the strategy's own forward and backward passes."""

    def on_train_start(self, trainer: lightning.Trainer, pl_module: Any) -> None:  # noqa: ANN401
        """Audit the first updates, and undo them."""
        optimizer, strategy = trainer.optimizers[0], trainer.strategy

        def step(batch: list[Tensor]) -> None:
            optimizer.zero_grad()
            strategy.backward(strategy.training_step(batch, 0), optimizer)
            optimizer.step()

        audit(pl_module.model, trainer.train_dataloader, cross_entropy, optimizer, step)


def main() -> None:
    """Audit the loop, then train on the digits."""
    images, labels = map(torch.as_tensor, load_digits())
    digits = TensorDataset(images.view(-1, 1, 8, 8).repeat(1, 3, 2, 2).float() / 16, labels)
    lightning.seed_everything(0, verbose=False)
    trainer = lightning.Trainer(
        max_epochs=2, accelerator="cpu", devices=1, callbacks=[Audit()],
        logger=False, enable_checkpointing=False, enable_progress_bar=False,
    )  # fmt: skip
    trainer.fit(Classifier(), DataLoader(digits, 48, shuffle=True, drop_last=True))


if __name__ == "__main__":
    main()
