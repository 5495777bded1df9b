"""Each worker takes its share of the data, and the sampler divides that share again."""

from collections.abc import Callable

import torch.distributed as dist
from small_training import divided, network, optimizer_of, samples
from torch.nn.functional import cross_entropy
from torch.utils.data import Subset

from largebatch.measure.audit import Findings

ISSUE = "https://github.com/huggingface/accelerate/issues/3547"
EXPECTED = "samples"
FIGURE = 0.5


def script(audit: Callable[..., Findings]) -> Findings:
    data = samples(128)
    share = Subset(data, range(dist.get_rank(), len(data), dist.get_world_size()))
    loader = divided(share)
    model = network()
    set_epoch = loader.sampler.set_epoch
    return audit(model, loader, cross_entropy, optimizer_of(model), set_epoch=set_epoch)
