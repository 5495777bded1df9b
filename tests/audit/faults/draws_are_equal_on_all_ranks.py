"""WeightedRandomSampler draws with one seed on every worker, so all read the same samples."""

from collections.abc import Callable

import torch
from planted_parts import perceptron, random_data, sgd
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, WeightedRandomSampler

from largebatch.audit import Findings

ISSUE = "https://github.com/huggingface/accelerate/issues/2865"
EXPECTED = "samples"
FIGURE = 2.0


def script(audit: Callable[..., Findings]) -> Findings:
    draw = torch.Generator().manual_seed(0)
    sampler = WeightedRandomSampler([1.0, 3.0] * 48, 96, generator=draw)
    model = DistributedDataParallel(perceptron())
    return audit(model, DataLoader(random_data(), 16, sampler=sampler), cross_entropy, sgd(model))
