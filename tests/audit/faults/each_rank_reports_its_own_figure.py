"""Each worker divides the hits of its own share, and no sum over workers is made."""

from collections.abc import Callable

import torch
from planted_parts import constant_perceptron, divided, random_data, sgd
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from largebatch.audit import Findings

ISSUE = "https://github.com/Lightning-AI/pytorch-lightning/issues/6158"
EXPECTED = "evaluation mean"
FIGURE = 1.0


@torch.no_grad()
def own_top1(model: nn.Module, loader: DataLoader[tuple[Tensor, ...]]) -> float:
    model.eval()
    hits = torch.cat([model(images).argmax(1) == labels for images, labels in loader])
    return float(hits.float().mean())


def script(audit: Callable[..., Findings]) -> Findings:
    data = TensorDataset(torch.randn(32, 8), torch.tensor([0, 1] * 16))
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
        evaluate=lambda: own_top1(model.module, validation),
    )
