"""Every worker has one seed, so samples at the same place of a batch have one augmentation."""

from collections.abc import Callable

import torch
from small_training import Augmented, divided, network, optimizer_of, samples
from torch.nn.functional import cross_entropy

from largebatch.measure.audit import Findings

ISSUE = "https://github.com/huggingface/transformers/issues/37932"
EXPECTED = "augmentation"
FIGURE = 2.0
LEVEL = "note"


def script(audit: Callable[..., Findings]) -> Findings:
    torch.manual_seed(42)
    loader = divided(Augmented(samples(), lambda: torch.randn(8)))
    model = network()
    set_epoch = loader.sampler.set_epoch
    return audit(model, loader, cross_entropy, optimizer_of(model), set_epoch=set_epoch)
