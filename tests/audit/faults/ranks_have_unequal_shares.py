"""One worker has three times as many samples, and means of both are averaged."""

from collections.abc import Callable

import torch.distributed as dist
from planted_parts import apart, linear, sgd
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from largebatch.audit import Findings

ISSUE = "https://github.com/Lightning-AI/pytorch-lightning/issues/20404"
EXPECTED = "gradient direction"
FIGURE = 4 / (2 * 10) ** 0.5


def script(audit: Callable[..., Findings]) -> Findings:
    model = DistributedDataParallel(linear())
    batches = apart(dist.get_rank(), 12)
    first = 12 if dist.get_rank() == 0 else 4
    ours = [(images[:4], labels[:4]) for images, labels in batches]
    ours = [(images.repeat(first // 4, 1), labels.repeat(first // 4)) for images, labels in ours]
    return audit(model, ours, cross_entropy, sgd(model))
