"""The top-1 of batches is averaged, and the last one is smaller."""

from collections.abc import Callable

import torch
from small_training import constant_network, divided, optimizer_of, samples
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from largebatch.measure.audit import Findings

ISSUE = "https://github.com/Nota-NetsPresso/netspresso-trainer/issues/360"
EXPECTED = "evaluation mean"
FIGURE = 1 / 9


@torch.no_grad()
def mean_of_batches(model: nn.Module, loader: DataLoader[tuple[Tensor, ...]]) -> float:
    model.eval()
    hits = [(model(images).argmax(1) == labels).float().mean() for images, labels in loader]
    return float(torch.stack(hits).mean())


def script(audit: Callable[..., Findings]) -> Findings:
    labels = torch.tensor([0, 1] * 16 + [0] * 4)  # batches of 16, 16 and 4
    validation = DataLoader(TensorDataset(torch.randn(36, 8), labels), 16)

    loader = divided(samples())
    model = constant_network()
    return audit(
        model,
        loader,
        cross_entropy,
        optimizer_of(model),
        set_epoch=loader.sampler.set_epoch,
        val_loader=validation,
        evaluate=lambda: mean_of_batches(model.module, validation),
    )
