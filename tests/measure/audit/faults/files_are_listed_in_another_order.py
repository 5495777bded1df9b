"""Each machine lists the files in its own order, so equal sample numbers mean other samples."""

from collections.abc import Callable

import torch.distributed as dist
from small_training import divided, network, optimizer_of, samples
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from largebatch.measure.audit import Findings

ISSUE = "https://github.com/pytorch/pytorch/issues/70103"
EXPECTED = "samples"
FIGURE = 0.5


def script(audit: Callable[..., Findings]) -> Findings:
    parts = samples(128).tensors
    if dist.get_rank():
        parts = tuple(part.roll(40, 0) for part in parts)
    loader = divided(TensorDataset(*parts))
    model = network()
    set_epoch = loader.sampler.set_epoch
    return audit(model, loader, cross_entropy, optimizer_of(model), set_epoch=set_epoch)
