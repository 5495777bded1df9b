"""Worker 0 evaluates before the training, and stays in evaluation mode."""

from collections.abc import Callable

import torch.distributed as dist
from planted_parts import divided, perceptron, random_data, sgd
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from largebatch.audit import Findings

ISSUE = "https://docs.pytorch.org/docs/stable/generated/torch.nn.Module.html#torch.nn.Module.eval"
EXPECTED = "training mode"
FIGURE = 1.0


def script(audit: Callable[..., Findings]) -> Findings:
    loader = divided(random_data(128, seed=1), 16, shuffle=True)
    model = DistributedDataParallel(perceptron(nn.ReLU(), nn.Dropout()))
    if dist.get_rank() == 0:
        model.eval()
    set_epoch = loader.sampler.set_epoch
    return audit(model, loader, cross_entropy, sgd(model), set_epoch=set_epoch)
