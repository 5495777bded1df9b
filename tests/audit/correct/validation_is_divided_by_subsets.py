"""Each worker holds its share of one permutation of a validation split, as a Subset."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from planted_parts import divided, perceptron, random_data, sgd
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset, random_split

from largebatch.audit import Findings


@torch.no_grad()
def error_rate(model: nn.Module, loader: DataLoader[tuple[Tensor, ...]]) -> float:
    model.eval()
    counts = torch.zeros(2)
    for images, labels in loader:
        counts += torch.tensor([(model(images).argmax(1) != labels).sum(), len(labels)])
    dist.all_reduce(counts)
    model.train()
    return float(100 * counts[0] / counts[1])


def script(audit: Callable[..., Findings]) -> Findings:
    draw = torch.Generator().manual_seed(0)
    train, held_out = random_split(random_data(105), [64, 41], draw)
    order = torch.randperm(41, generator=draw).tolist()
    validation = DataLoader(Subset(held_out, order[dist.get_rank() :: 2]), 8)
    loader = divided(train, 8, shuffle=True)
    model = DistributedDataParallel(perceptron())
    return audit(
        model,
        loader,
        cross_entropy,
        sgd(model),
        set_epoch=loader.sampler.set_epoch,
        val_loader=validation,
        evaluate=lambda: error_rate(model.module, validation),
    )
