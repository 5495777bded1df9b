"""The batch is 8 times as large as before, and the learning rate is the same."""

from collections.abc import Callable

from planted_parts import divided, perceptron, random_data, sgd
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from largebatch.audit import Findings

ISSUE = "https://github.com/horovod/horovod/issues/478"
EXPECTED = "rate for the batch"
FIGURE = 0.125
LEVEL = "note"


def script(audit: Callable[..., Findings]) -> Findings:
    loader = divided(random_data(64, seed=1), 8, shuffle=True)
    model = DistributedDataParallel(perceptron())
    set_epoch = loader.sampler.set_epoch
    optimizer = sgd(model, lr=0.01)
    return audit(model, loader, cross_entropy, optimizer, set_epoch=set_epoch, base=(2, 0.01))
