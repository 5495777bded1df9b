"""A rate that falls when the loss has not for an epoch; whole models in files.

python by_plateau.py --epochs 4
python by_plateau.py --epochs 2 && python by_plateau.py --epochs 4 --resume plateau.pt
"""

import argparse

import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--resume")
    args = parser.parse_args()
    torch.manual_seed(10)
    data = TensorDataset(torch.randn(24, 4), torch.randn(24, 1))
    model: nn.Module = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    state = {}
    if args.resume:
        state = torch.load(args.resume, weights_only=False)
        model = state["model"]
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0, momentum=0.5)
    scheduler = ReduceLROnPlateau(optimizer, factor=0.5, patience=1)
    if args.resume:
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
    for epoch in range(state.get("epochs", 0), args.epochs):
        total = 0.0
        for inputs, targets in DataLoader(data, 8):
            loss = nn.functional.huber_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
        scheduler.step(total)
        print(epoch, total, optimizer.param_groups[0]["lr"])
        state = {
            "model": model,
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
            "epochs": epoch + 1,
        }
        torch.save(state, "plateau.pt")


if __name__ == "__main__":
    main()
