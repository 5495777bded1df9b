"""worker_init_fn seeds NumPy with the number of the process, again in each epoch."""

from collections.abc import Callable

import numpy as np
import torch
from planted_parts import Augmented, perceptron, random_data, sgd
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from largebatch.audit import Findings

ISSUE = "https://github.com/xingyizhou/CenterNet/issues/233"
EXPECTED = "augmentation"
FIGURE = 32.0


def noise() -> torch.Tensor:
    return torch.from_numpy(np.random.standard_normal(8)).float()


def script(audit: Callable[..., Findings]) -> Findings:
    data = Augmented(random_data(64, seed=1), noise)
    sampler: DistributedSampler[object] = DistributedSampler(data)
    loader = DataLoader(
        data,
        8,
        sampler=sampler,
        num_workers=2,
        worker_init_fn=np.random.seed,
        multiprocessing_context="fork",
    )
    model = DistributedDataParallel(perceptron())
    return audit(model, loader, cross_entropy, sgd(model, lr=0.01), set_epoch=sampler.set_epoch)
