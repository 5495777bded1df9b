"""An Accelerate loop that `save_state` and `load_state` resume at an epoch's end.

python by_accelerate.py --epochs 2
python by_accelerate.py --epochs 1 && python by_accelerate.py --epochs 2 --resume state
"""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--resume")
    args = parser.parse_args()
    accelerator = Accelerator(cpu=True)
    set_seed(0)
    data = TensorDataset(torch.randn(48, 8), torch.randint(3, (48,)))
    loader = DataLoader(data, 16, shuffle=True)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=12)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    first_epoch = 0
    if args.resume:
        accelerator.load_state(args.resume)
        first_epoch = scheduler.scheduler.last_epoch // len(loader)
    for _ in range(first_epoch, args.epochs):
        for inputs, labels in loader:
            loss = cross_entropy(model(inputs), labels)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        accelerator.save_state("state")
    accelerator.end_training()


if __name__ == "__main__":
    main()
