"""A stream of samples with a shuffle buffer, whose content is saved with its position.

python by_stream.py --updates 4
python by_stream.py --updates 2 && python by_stream.py --updates 4 --resume stream.pt
"""

import argparse
import random
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    """Samples drawn from a buffer of eight."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(4)
        self.inputs = torch.randn(100, 4, generator=generator)
        self.random = random.Random(5)
        self.position = 0
        self.buffer: list[int] = []

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while self.position < len(self.inputs):
            self.buffer.append(self.position)
            self.position += 1
            if len(self.buffer) == 8:
                number = self.buffer.pop(self.random.randrange(8))
                yield self.inputs[number], self.inputs[number].sum()

    def state_dict(self) -> dict[str, Any]:
        return {
            "position": self.position,
            "random": self.random.getstate(),
            "buffer": list(self.buffer),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]
        self.random.setstate(state["random"])
        self.buffer = list(state["buffer"])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--updates", type=int, required=True)
    parser.add_argument("--resume")
    args = parser.parse_args()
    torch.manual_seed(6)
    stream = Stream()
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    updates = 0
    if args.resume:
        state = torch.load(args.resume, weights_only=False)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        stream.load_state_dict(state["stream"])
        updates = state["updates"]
    for inputs, targets in DataLoader(stream, batch_size=5):
        loss = (model(inputs).squeeze(1) - targets).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        updates += 1
        if updates == args.updates:
            break
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "stream": stream.state_dict(),
        "updates": updates,
    }
    torch.save(state, "stream.pt")


if __name__ == "__main__":
    main()
