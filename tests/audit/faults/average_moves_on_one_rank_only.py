"""The step moves the average of the weights on worker 0 only."""

from collections.abc import Callable

import torch.distributed as dist
from planted_parts import divided, linear, random_data, sgd
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from largebatch.audit import Findings

ISSUE = "https://github.com/lucidrains/ema-pytorch/issues/9"
EXPECTED = "averaged weights"
FIGURE = 1.0  # a worker's average stays zero: both are as far from their mean as it is long


def script(audit: Callable[..., Findings]) -> Findings:
    loader = divided(random_data(64, seed=1), 8, shuffle=True)
    model = DistributedDataParallel(linear())
    optimizer = sgd(model)
    average = AveragedModel(model.module, multi_avg_fn=get_ema_multi_avg_fn(0.9))

    def step(batch: tuple[Tensor, Tensor]) -> None:
        optimizer.zero_grad()
        cross_entropy(model(batch[0]), batch[1]).backward()
        optimizer.step()
        if dist.get_rank() == 0:
            average.update_parameters(model.module)

    set_epoch = loader.sampler.set_epoch
    words = {"set_epoch": set_epoch, "averaged": average}
    return audit(model, loader, cross_entropy, optimizer, step, **words)
