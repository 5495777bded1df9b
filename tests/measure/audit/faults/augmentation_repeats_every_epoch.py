"""worker_init_fn seeds NumPy with the number of the process, again in each epoch."""

from collections.abc import Callable

import numpy as np
import torch
from small_training import Augmented, network, optimizer_of, samples
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler

from largebatch.measure.audit import Findings

ISSUE = "https://github.com/xingyizhou/CenterNet/issues/233"
EXPECTED = "augmentation"
FIGURE = 32.0


def noise() -> torch.Tensor:
    return torch.from_numpy(np.random.standard_normal(8)).float()


def script(audit: Callable[..., Findings]) -> Findings:
    data = Augmented(samples(), noise)
    sampler: DistributedSampler[object] = DistributedSampler(data)
    loader = DataLoader(
        data,
        8,
        sampler=sampler,
        num_workers=2,
        worker_init_fn=np.random.seed,
        multiprocessing_context="fork",
    )
    model = network()
    return audit(model, loader, cross_entropy, optimizer_of(model), set_epoch=sampler.set_epoch)
