"""The rate grows with the number of GPUs, from a base that had several: 8 times the linear rule."""

from collections.abc import Callable

from planted_parts import divided, perceptron, random_data, sgd
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from largebatch.audit import Findings

ISSUE = "https://github.com/determined-ai/determined/issues/5661"
EXPECTED = "rate for the batch"
FIGURE = 8.0
LEVEL = "note"


def script(audit: Callable[..., Findings]) -> Findings:
    loader = divided(random_data(64, seed=1), 8, shuffle=True)
    model = DistributedDataParallel(perceptron())
    set_epoch = loader.sampler.set_epoch
    optimizer = sgd(model, lr=0.64)
    return audit(model, loader, cross_entropy, optimizer, set_epoch=set_epoch, base=(2, 0.01))
