"""Every worker has one seed, so samples at the same place of a batch have one augmentation."""

from collections.abc import Callable

import torch
from planted_parts import Augmented, divided, perceptron, random_data, sgd
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from largebatch.audit import Findings

ISSUE = "https://github.com/huggingface/transformers/issues/37932"
EXPECTED = "augmentation"
FIGURE = 2.0
LEVEL = "note"


def script(audit: Callable[..., Findings]) -> Findings:
    torch.manual_seed(42)
    loader = divided(Augmented(random_data(64, seed=1), lambda: torch.randn(8)), 8, shuffle=True)
    model = DistributedDataParallel(perceptron())
    set_epoch = loader.sampler.set_epoch
    return audit(model, loader, cross_entropy, sgd(model, lr=0.01), set_epoch=set_epoch)
