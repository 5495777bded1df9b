"""Two networks against each other, each with an optimizer.

python by_two_optimizers.py --epochs 2
python by_two_optimizers.py --epochs 1 && python by_two_optimizers.py --epochs 2 --resume both.pt
"""

import argparse
from typing import Any

import torch
from torch import nn
from torch.nn.functional import softplus
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--resume")
    args = parser.parse_args()
    torch.manual_seed(9)
    data = TensorDataset(torch.randn(36, 4))
    maker = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    judge = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4), nn.Flatten(0))
    of_maker = torch.optim.Adam(maker.parameters(), lr=0.002, betas=(0.5, 0.99))
    of_judge = torch.optim.Adam(judge.parameters(), lr=0.002, betas=(0.5, 0.99))
    parts: dict[str, Any] = {
        "maker": maker,
        "judge": judge,
        "of_maker": of_maker,
        "of_judge": of_judge,
    }
    start = 0
    if args.resume:
        state = torch.load(args.resume)
        for name, part in parts.items():
            part.load_state_dict(state[name])
        torch.set_rng_state(state["random"])
        start = state["epoch"]
    for epoch in range(start, args.epochs):
        for (real,) in DataLoader(data, 12, shuffle=True):
            false = maker(torch.randn(len(real), 4))
            of_judge.zero_grad()
            (softplus(-judge(real)).mean() + softplus(judge(false.detach())).mean()).backward()
            of_judge.step()
            of_maker.zero_grad()
            softplus(-judge(false)).mean().backward()
            of_maker.step()
        state = {name: part.state_dict() for name, part in parts.items()}
        state["random"] = torch.get_rng_state()
        state["epoch"] = epoch + 1
        torch.save(state, "both.pt")


if __name__ == "__main__":
    main()
