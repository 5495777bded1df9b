"""A script with augmentation, dropout, warm-up, an average and an evaluation."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from planted_parts import Augmented, divided, perceptron, random_data
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, DistributedSampler

from largebatch.audit import Findings
from largebatch.models import param_groups


def rise(step: int) -> float:
    return min(1.0, (step + 1) / 100)


@torch.no_grad()
def top1(model: nn.Module, loader: DataLoader[tuple[Tensor, ...]]) -> float:
    model.eval()
    counts = torch.zeros(2)
    for images, labels in loader:
        counts += torch.tensor([(model(images).argmax(1) == labels).sum(), len(labels)])
    dist.all_reduce(counts)
    model.train()
    return float(counts[0] / counts[1])


def script(audit: Callable[..., Findings]) -> Findings:
    torch.manual_seed(dist.get_rank())
    loader = divided(Augmented(random_data(63, seed=1), lambda: torch.randn(8)), 8, shuffle=True)
    data = random_data(31, seed=1)
    validation = DataLoader(data, 8, sampler=DistributedSampler(data, shuffle=False))
    model = DistributedDataParallel(perceptron(nn.ReLU(), nn.Dropout(), nn.BatchNorm1d(16)))
    groups = param_groups(model, weight_decay=1e-4)
    optimizer = torch.optim.SGD(groups, lr=0.01)
    scheduler = LambdaLR(optimizer, rise)
    average = AveragedModel(model.module, multi_avg_fn=get_ema_multi_avg_fn(0.9))

    def step(batch: tuple[Tensor, Tensor]) -> None:
        cross_entropy(model(batch[0]), batch[1]).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        average.update_parameters(model.module)

    return audit(
        model,
        loader,
        cross_entropy,
        optimizer,
        step,
        set_epoch=loader.sampler.set_epoch,
        base=(8, 0.005),
        rate=lambda update: 0.01 * rise(update),
        epochs=400,
        val_loader=validation,
        evaluate=lambda: top1(model.module, validation),
        averaged=average,
    )
