"""The batch is 8 times as large as before, and the learning rate is the same."""

from collections.abc import Callable

from small_training import divided, network, optimizer_of, samples
from torch.nn.functional import cross_entropy

from largebatch.measure.audit import Findings

ISSUE = "https://github.com/horovod/horovod/issues/478"
EXPECTED = "rate for the batch"
FIGURE = 0.125
LEVEL = "note"


def script(audit: Callable[..., Findings]) -> Findings:
    loader = divided(samples())
    model = network()
    set_epoch = loader.sampler.set_epoch
    optimizer = optimizer_of(model, 0.01)
    return audit(model, loader, cross_entropy, optimizer, set_epoch=set_epoch, base=(2, 0.01))
