"""A class that trains, counts its own updates, and sets the rate from the count.

python by_class.py --epochs 2
python by_class.py --epochs 1 && python by_class.py --epochs 2 --resume trainer.pt
"""

import argparse

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

STATEFUL = ("model", "optimizer")


class Trainer:
    def __init__(self) -> None:
        torch.manual_seed(1)
        data = TensorDataset(torch.randn(60, 6), torch.randn(60, 1))
        self.generator = torch.Generator().manual_seed(2)
        sampler = RandomSampler(data, generator=self.generator)
        self.loader = DataLoader(data, 20, sampler=sampler)
        self.model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 1))
        self.optimizer = torch.optim.RMSprop(self.model.parameters(), lr=0.01, momentum=0.5)
        self.epoch = 0
        self.updates = 0

    def save(self) -> None:
        state = {name: getattr(self, name).state_dict() for name in STATEFUL}
        state["generator"] = self.generator.get_state()
        state["epoch"] = self.epoch
        state["updates"] = self.updates
        torch.save(state, "trainer.pt")

    def load(self, path: str) -> None:
        state = torch.load(path)
        for name in STATEFUL:
            getattr(self, name).load_state_dict(state[name])
        self.generator.set_state(state["generator"])
        self.epoch = state["epoch"]
        self.updates = state["updates"]

    def update(self, inputs: Tensor, targets: Tensor) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = 0.01 / (1 + self.updates)
        self.optimizer.zero_grad()
        nn.functional.mse_loss(self.model(inputs), targets).backward()
        self.optimizer.step()
        self.updates += 1

    def fit(self, epochs: int) -> None:
        while self.epoch < epochs:
            for inputs, targets in self.loader:
                self.update(inputs, targets)
            self.epoch += 1
            self.save()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--resume")
    args = parser.parse_args()
    trainer = Trainer()
    if args.resume:
        trainer.load(args.resume)
    trainer.fit(args.epochs)
