"""Each worker takes its share of the data, and the sampler divides that share again."""

from collections.abc import Callable

import torch.distributed as dist
from planted_parts import divided, perceptron, random_data, sgd
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Subset

from largebatch.audit import Findings

ISSUE = "https://github.com/huggingface/accelerate/issues/3547"
EXPECTED = "samples"
FIGURE = 0.5


def script(audit: Callable[..., Findings]) -> Findings:
    data = random_data(128, seed=1)
    share = Subset(data, range(dist.get_rank(), len(data), dist.get_world_size()))
    loader = divided(share, 8, shuffle=True)
    model = DistributedDataParallel(perceptron())
    set_epoch = loader.sampler.set_epoch
    return audit(model, loader, cross_entropy, sgd(model, lr=0.01), set_epoch=set_epoch)
