"""Every worker has one seed, so all draw the same masks of dropout."""

from collections.abc import Callable

import torch
from planted_parts import divided, perceptron, random_data, sgd
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from largebatch.audit import Findings

ISSUE = "https://github.com/huggingface/transformers/issues/31412"
EXPECTED = "dropout"
FIGURE = 2.0
LEVEL = "note"


def script(audit: Callable[..., Findings]) -> Findings:
    torch.manual_seed(40)
    loader = divided(random_data(64, seed=1), 8, shuffle=True)
    model = DistributedDataParallel(perceptron(nn.ReLU(), nn.Dropout()))
    set_epoch = loader.sampler.set_epoch
    return audit(model, loader, cross_entropy, sgd(model, lr=0.01), set_epoch=set_epoch)
