"""srun starts two tasks, and each makes a group of its own."""

import os
from collections.abc import Callable

import torch
import torch.distributed as dist
from planted_parts import perceptron, random_data, sgd
from torch.distributed import HashStore  # type: ignore[attr-defined]  # torch's stubs
from torch.nn.functional import cross_entropy

from largebatch.audit import Findings

ISSUE = "https://github.com/pytorch/pytorch/issues/73656"
EXPECTED = "world size"
FIGURE = 2.0


def script(audit: Callable[..., Findings]) -> Findings:
    dist.destroy_process_group()
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)
    os.environ.update(SLURM_PROCID="0", SLURM_STEP_ID="0", SLURM_STEP_NUM_TASKS="2")
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    model = perceptron()
    loader = torch.utils.data.DataLoader(random_data(), 16)
    return audit(model, loader, cross_entropy, sgd(model))
