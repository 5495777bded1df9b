"""Lightning with LARS, BatchNorm spans, an audit, and averaged weights that are polished.

python docs/examples/lightning_module.py; its Trainer starts the workers.
"""

import lightning
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Subset, TensorDataset

from largebatch import LARS, evaluate
from largebatch.data.datasets.digits import load_digits
from largebatch.integrations.lightning import Audit, Polish
from largebatch.models import build, param_groups, with_span
from largebatch.schedules import cosine, warmup


class Classifier(lightning.LightningModule):
    """A small ResNet whose statistics are those of 16 images."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.model = with_span(build("cifar_resnet8", num_classes=10), 16)
        self.steps = steps

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        """Return the loss of a batch."""
        return cross_entropy(self.model(batch[0]), batch[1])

    def configure_optimizers(self) -> tuple[list[Optimizer], list[dict[str, object]]]:
        """Return LARS and its schedule, which gives the part of the peak for every step."""
        optimizer = LARS(param_groups(self.model, weight_decay=1e-4), lr=0.5, eta=0.02)
        part = warmup(cosine(peak=1.0, steps=self.steps), steps=10)
        return [optimizer], [{"scheduler": LambdaLR(optimizer, part), "interval": "step"}]


def main() -> None:
    """Train on the digits; print top-1 of the polished average."""
    images, labels = map(torch.as_tensor, load_digits())
    digits = TensorDataset(images.view(-1, 1, 8, 8).repeat(1, 3, 2, 2).float() / 16, labels)
    train_set, val_set = Subset(digits, range(1437)), Subset(digits, range(1437, 1797))
    loader, clean_loader = DataLoader(train_set, 48, shuffle=True), DataLoader(train_set, 64)
    lightning.seed_everything(0, verbose=False)
    averaging = EMAWeightAveraging(decay=0.98, update_starting_at_step=1, use_buffers=False)
    callbacks = [averaging, Polish(clean_loader), Audit(cross_entropy)]
    trainer = lightning.Trainer(
        callbacks=callbacks, max_epochs=6, accelerator="cpu", devices=1,
        logger=False, enable_checkpointing=False, enable_progress_bar=False,
    )  # fmt: skip
    module = Classifier(steps=6 * len(loader))
    trainer.fit(module, loader)
    found = evaluate(module.model, DataLoader(val_set, 64))
    print(f"polished: top-1 {found.top1:.2%} of {found.samples} images")


if __name__ == "__main__":
    main()
