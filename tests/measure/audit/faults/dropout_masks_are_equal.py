"""Every worker has one seed, so all draw the same masks of dropout."""

from collections.abc import Callable

import torch
from small_training import divided, network, optimizer_of, samples
from torch import nn
from torch.nn.functional import cross_entropy

from largebatch.measure.audit import Findings

ISSUE = "https://github.com/huggingface/transformers/issues/31412"
EXPECTED = "dropout"
FIGURE = 2.0
LEVEL = "note"


def script(audit: Callable[..., Findings]) -> Findings:
    torch.manual_seed(40)
    loader = divided(samples())
    model = network(nn.Dropout())
    set_epoch = loader.sampler.set_epoch
    return audit(model, loader, cross_entropy, optimizer_of(model), set_epoch=set_epoch)
