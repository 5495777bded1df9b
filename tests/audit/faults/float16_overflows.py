"""Gradients are sent in float16, in which they are infinite."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from planted_parts import sgd
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from largebatch.audit import Findings

ISSUE = "https://github.com/pytorch/pytorch/pull/59522"
EXPECTED = "precision"
FIGURE = 8.0


def script(audit: Callable[..., Findings]) -> Findings:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    model = DistributedDataParallel(nn.Linear(8, 1, bias=False))
    model.register_comm_hook(None, fp16_compress_hook)

    def large(outputs: Tensor, labels: Tensor) -> Tensor:
        return (outputs[:, 0] * labels).mean() * 1e6

    images = torch.full((16, 8), 1.0 + dist.get_rank())
    batches = [(images, torch.ones(16)) for _ in range(3)]
    return audit(model, batches, large, sgd(model, lr=1e-9))
