"""Accumulation over two batches; a checkpoint within a window has the gradients of its half.

python by_windows.py --updates 8
python by_windows.py --updates 5 && python by_windows.py --updates 8 --resume half.pt

Its lengths are in batches.
"""

import argparse

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--updates", type=int, required=True)
    parser.add_argument("--resume")
    args = parser.parse_args()
    torch.manual_seed(7)
    data = TensorDataset(torch.randn(40, 6), torch.randint(4, (40,)))
    model = nn.Sequential(nn.Linear(6, 10), nn.GELU(), nn.Linear(10, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    batches = 0
    if args.resume:
        state = torch.load(args.resume)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        for weight, gradient in zip(model.parameters(), state["gradients"], strict=True):
            weight.grad = gradient
        batches = state["batches"]
    for number, (inputs, labels) in enumerate(DataLoader(data, 5)):
        if number < batches:
            continue
        (cross_entropy(model(inputs), labels) / 2).backward()
        batches += 1
        if batches % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
        if batches == args.updates:
            break
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "gradients": [weight.grad for weight in model.parameters()],
        "batches": batches,
    }
    torch.save(state, "half.pt")


if __name__ == "__main__":
    main()
