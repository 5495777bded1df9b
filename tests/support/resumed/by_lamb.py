"""An optimizer of one's own, with trust ratios and a bias correction by a count in its state.

python by_lamb.py --epochs 2
python by_lamb.py --epochs 1 && python by_lamb.py --epochs 2 --resume lamb.pt
"""

import argparse
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset


class Lamb(Optimizer):
    def __init__(self, weights: Iterable[Tensor], lr: float) -> None:
        super().__init__(weights, {"lr": lr, "updates": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ANN401
        for group in self.param_groups:
            group["updates"] += 1
            for weight in group["params"]:
                state = self.state[weight]
                if not state:
                    state["first"] = torch.zeros_like(weight)
                    state["second"] = torch.zeros_like(weight)
                state["first"].lerp_(weight.grad, 0.1)
                state["second"].lerp_(weight.grad.square(), 0.01)
                first = state["first"] / (1 - 0.9 ** group["updates"])
                second = state["second"] / (1 - 0.99 ** group["updates"])
                direction = first / (second.sqrt() + 1e-6) + 0.1 * weight
                ratio = weight.norm() / direction.norm()
                weight.sub_(direction, alpha=float(group["lr"] * ratio))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--resume")
    args = parser.parse_args()
    torch.manual_seed(8)
    data = TensorDataset(torch.randn(24, 3), torch.randn(24, 2))
    model = nn.Sequential(nn.Linear(3, 7), nn.SiLU(), nn.Linear(7, 2))
    optimizer = Lamb(model.parameters(), lr=0.05)
    start = 0
    if args.resume:
        state = torch.load(args.resume)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        start = state["epochs"]
    for epoch in range(start, args.epochs):
        for inputs, targets in DataLoader(data, 8):
            optimizer.zero_grad()
            nn.functional.l1_loss(model(inputs), targets).backward()
            optimizer.step()
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state | {"epochs": epoch + 1}, "lamb.pt")


if __name__ == "__main__":
    main()
