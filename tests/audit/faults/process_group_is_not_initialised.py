"""torchrun starts two workers, and the script initialises nothing."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from planted_parts import perceptron, random_data, sgd
from torch.nn.functional import cross_entropy

from largebatch.audit import Findings

ISSUE = "https://github.com/mlc-ai/pith-train/issues/91"
EXPECTED = "world size"
FIGURE = 2.0


def script(audit: Callable[..., Findings]) -> Findings:
    dist.destroy_process_group()
    model = perceptron()
    loader = torch.utils.data.DataLoader(random_data(), 16)
    return audit(model, loader, cross_entropy, sgd(model))
