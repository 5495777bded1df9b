"""Hits are divided by batches times the batch size, and the last batch is smaller."""

from collections.abc import Callable

import torch
from planted_parts import constant_perceptron, divided, random_data, sgd
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from largebatch.audit import Findings

ISSUE = "https://github.com/mitmul/chainer-cifar10/issues/1"
EXPECTED = "evaluation mean"
FIGURE = 20 / 36 - 20 / 48


@torch.no_grad()
def top1_of_full_batches(model: nn.Module, loader: DataLoader[tuple[Tensor, ...]]) -> float:
    model.eval()
    hits = sum(int((model(images).argmax(1) == labels).sum()) for images, labels in loader)
    return hits / (len(loader) * 16)


def script(audit: Callable[..., Findings]) -> Findings:
    labels = torch.tensor([0, 1] * 16 + [0] * 4)  # batches of 16, 16 and 4
    validation = DataLoader(TensorDataset(torch.randn(36, 8), labels), 16)

    loader = divided(random_data(64, seed=1), 8, shuffle=True)
    model = DistributedDataParallel(constant_perceptron())
    return audit(
        model,
        loader,
        cross_entropy,
        sgd(model, lr=0.01),
        set_epoch=loader.sampler.set_epoch,
        val_loader=validation,
        evaluate=lambda: top1_of_full_batches(model.module, validation),
    )
