"""Each worker averages over its own labels that are not ignored: 12 and 4."""

from collections.abc import Callable

import torch.distributed as dist
from planted_parts import apart, linear, sgd
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from largebatch.audit import Findings

ISSUE = "https://github.com/huggingface/transformers/pull/34191"
EXPECTED = "gradient direction"
FIGURE = 4 / (2 * 10) ** 0.5


def script(audit: Callable[..., Findings]) -> Findings:
    model = DistributedDataParallel(linear())
    ours = []
    for images, labels in apart(dist.get_rank(), 4):
        every = labels.repeat(3)
        if dist.get_rank() == 1:
            every[4:] = -100
        ours.append((images.repeat(3, 1), every))
    return audit(model, ours, cross_entropy, sgd(model))
