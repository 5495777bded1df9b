"""The top-1 of the workers is added, and nobody divides by their number."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from planted_parts import constant_perceptron, divided, random_data, sgd
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from largebatch.audit import Findings

ISSUE = "https://github.com/tensorflow/benchmarks/pull/469"
EXPECTED = "evaluation mean"
FIGURE = 0.375  # 12 of 32, once for each of two workers


@torch.no_grad()
def summed_top1(model: nn.Module, loader: DataLoader[tuple[Tensor, ...]]) -> float:
    model.eval()
    hits = torch.cat([model(images).argmax(1) == labels for images, labels in loader])
    top1 = hits.float().mean()
    dist.all_reduce(top1)
    return float(top1)


def script(audit: Callable[..., Findings]) -> Findings:
    data = TensorDataset(torch.randn(32, 8), torch.tensor([0, 1, 1, 1, 0, 1, 0, 1] * 4))
    validation = DataLoader(data, 8, sampler=DistributedSampler(data, shuffle=False))

    loader = divided(random_data(64, seed=1), 8, shuffle=True)
    model = DistributedDataParallel(constant_perceptron())
    return audit(
        model,
        loader,
        cross_entropy,
        sgd(model, lr=0.01),
        set_epoch=loader.sampler.set_epoch,
        val_loader=validation,
        evaluate=lambda: summed_top1(model.module, validation),
    )
