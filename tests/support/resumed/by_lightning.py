"""Lightning's `fit`, resumed by `ckpt_path` at an epoch's end; its sampler's order is the epoch's.

python by_lightning.py --epochs 2
python by_lightning.py --epochs 1 && python by_lightning.py --epochs 2 --resume last.ckpt

With EMAWeightAveraging it is another training: when `fit` ends, the average becomes the model, and
the checkpoint of that moment has no other weights.
"""

import argparse
import warnings
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Classifier(lightning.LightningModule):  # type: ignore[misc, unused-ignore]
    """A small network with BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(
            nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3)
        )

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        return cross_entropy(self.model(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:  # noqa: ANN401 -- Lightning's type
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=12)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--resume")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    lightning.seed_everything(0, verbose=False)
    data = TensorDataset(torch.randn(48, 8), torch.randint(3, (48,)))
    sampler: DistributedSampler[Any] = DistributedSampler(data, num_replicas=1, rank=0)
    saving = ModelCheckpoint(".", save_last=True, save_top_k=0)
    trainer = lightning.Trainer(
        max_epochs=args.epochs,
        accelerator="cpu",
        devices=1,
        callbacks=[saving],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Classifier(), DataLoader(data, 16, sampler=sampler), ckpt_path=args.resume)


if __name__ == "__main__":
    main()
