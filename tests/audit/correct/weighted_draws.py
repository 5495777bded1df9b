"""A weighted sampler of the script's own, and a loss with class weights."""

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from planted_parts import perceptron, random_data, sgd
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from largebatch.audit import Findings


class Draws:
    """Each worker takes its share of one draw with replacement."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 48

    def __iter__(self) -> Iterator[int]:
        draw = torch.Generator().manual_seed(self.epoch)
        numbers = torch.multinomial(torch.ones(96), 96, replacement=True, generator=draw)
        yield from numbers[dist.get_rank() :: dist.get_world_size()].tolist()


def script(audit: Callable[..., Findings]) -> Findings:
    model = DistributedDataParallel(perceptron())
    sampler = Draws()
    loader = DataLoader(random_data(), 16, sampler=sampler)
    loss_fn = nn.CrossEntropyLoss(weight=torch.arange(1.0, 5.0))
    return audit(model, loader, loss_fn, sgd(model), set_epoch=sampler.set_epoch)
