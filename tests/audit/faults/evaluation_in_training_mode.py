"""model.eval() is missing before the evaluation."""

from collections.abc import Callable

import torch
from planted_parts import divided, perceptron, random_data, sgd
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from largebatch.audit import Findings

ISSUE = "https://github.com/deep-learning-with-pytorch/dlwpt-code/issues/104"
EXPECTED = "evaluation mode"
FIGURE = 1.0


@torch.no_grad()
def top1(model: nn.Module, loader: DataLoader[tuple[Tensor, ...]]) -> float:
    hits = torch.cat([model(images).argmax(1) == labels for images, labels in loader])
    return float(hits.float().mean())


def script(audit: Callable[..., Findings]) -> Findings:
    validation = DataLoader(random_data(32, seed=1), 8)

    loader = divided(random_data(64, seed=1), 8, shuffle=True)
    model = DistributedDataParallel(perceptron(nn.ReLU(), nn.BatchNorm1d(16)))
    return audit(
        model,
        loader,
        cross_entropy,
        sgd(model, lr=0.01),
        set_epoch=loader.sampler.set_epoch,
        val_loader=validation,
        evaluate=lambda: top1(model.module, validation),
    )
