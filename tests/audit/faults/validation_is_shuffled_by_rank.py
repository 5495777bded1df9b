"""Each worker takes its share of a permutation of the validation set that it seeds itself."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from planted_parts import divided, perceptron, random_data, sgd
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset

from largebatch.audit import Findings

ISSUE = "https://github.com/TensorAuto/OpenTau/pull/498"
EXPECTED = "evaluation samples"


def share(rank: int) -> list[int]:
    draw = torch.Generator().manual_seed(rank)
    return torch.randperm(80, generator=draw)[rank::2].tolist()


FIGURE = float(80 - len({*share(0), *share(1)}))


def script(audit: Callable[..., Findings]) -> Findings:
    validation = DataLoader(Subset(random_data(80), share(dist.get_rank())), 8)

    loader = divided(random_data(64, seed=1), 8, shuffle=True)
    model = DistributedDataParallel(perceptron())
    words = {"set_epoch": loader.sampler.set_epoch, "val_loader": validation}
    return audit(model, loader, cross_entropy, sgd(model), **words)
