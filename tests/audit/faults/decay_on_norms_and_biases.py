"""One group of parameters, with weight decay for normalisation and biases too."""

from collections.abc import Callable

import torch
from planted_parts import divided, perceptron, random_data
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from largebatch.audit import Findings

ISSUE = "https://github.com/mmcdermott/MEDS_EIC_AR/issues/30"
EXPECTED = "weight decay"
FIGURE = 4.0
LEVEL = "note"


def script(audit: Callable[..., Findings]) -> Findings:
    loader = divided(random_data(64, seed=1), 8, shuffle=True)
    model = DistributedDataParallel(perceptron(nn.ReLU(), nn.LayerNorm(16)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, weight_decay=1e-4)
    set_epoch = loader.sampler.set_epoch
    return audit(model, loader, cross_entropy, optimizer, set_epoch=set_epoch)
