"""All workers freeze a BatchNorm layer in the step, and an average moves once an update."""

from collections.abc import Callable

import torch.distributed as dist
from planted_parts import divided, perceptron, random_data, sgd
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from largebatch.audit import Findings


def script(audit: Callable[..., Findings]) -> Findings:
    loader = divided(random_data(128, seed=1), 16, shuffle=True)
    layers = [nn.BatchNorm1d(16), nn.ReLU(), nn.BatchNorm1d(16)]
    model = DistributedDataParallel(perceptron(*layers))
    optimizer = sgd(model)
    average = AveragedModel(model.module, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    if dist.get_rank() == 0:
        model.eval()  # after an evaluation; the step sets the mode

    def step(batch: tuple[Tensor, Tensor]) -> None:
        model.train()
        layers[0].eval()
        optimizer.zero_grad()
        for images, labels in zip(*(it.split(8) for it in batch), strict=True):
            (cross_entropy(model(images), labels) / 2).backward()
        average.update_parameters(model.module)
        optimizer.step()

    words = {"set_epoch": loader.sampler.set_epoch, "averaged": average}
    return audit(model, loader, cross_entropy, optimizer, step, **words)
