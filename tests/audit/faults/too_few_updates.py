"""The batch grew with the workers, the epochs did not: 40 updates are left."""

from collections.abc import Callable

from planted_parts import divided, perceptron, random_data, sgd
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from largebatch.audit import Findings

ISSUE = "https://github.com/open-mmlab/OpenPCDet/issues/364"
EXPECTED = "updates"
FIGURE = 40.0
LEVEL = "note"


def script(audit: Callable[..., Findings]) -> Findings:
    loader = divided(random_data(64, seed=1), 8, shuffle=True)
    model = DistributedDataParallel(perceptron())
    set_epoch = loader.sampler.set_epoch
    optimizer = sgd(model, lr=0.01)
    return audit(model, loader, cross_entropy, optimizer, set_epoch=set_epoch, epochs=10)
