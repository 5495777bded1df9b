"""The average of the weights is updated on worker 0 and evaluated everywhere."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from planted_parts import divided, perceptron, random_data, sgd
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from largebatch.audit import Findings

ISSUE = "https://github.com/lucidrains/ema-pytorch/issues/9"
EXPECTED = "averaged weights"
FIGURE = 1 / 3  # the counters of the averages are 2 and 1, 0.5 from their mean


def script(audit: Callable[..., Findings]) -> Findings:
    loader = divided(random_data(64, seed=1), 8, shuffle=True)
    model = DistributedDataParallel(perceptron())
    average = AveragedModel(model.module, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    average.update_parameters(model.module)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1)  # an update
    if dist.get_rank() == 0:
        average.update_parameters(model.module)
    set_epoch = loader.sampler.set_epoch
    optimizer = sgd(model, lr=0.01)
    return audit(model, loader, cross_entropy, optimizer, set_epoch=set_epoch, averaged=average)
