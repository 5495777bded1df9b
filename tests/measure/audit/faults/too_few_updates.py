"""The batch grew with the workers, the epochs did not: 40 updates are left."""

from collections.abc import Callable

from small_training import divided, network, optimizer_of, samples
from torch.nn.functional import cross_entropy

from largebatch.measure.audit import Findings

ISSUE = "https://github.com/open-mmlab/OpenPCDet/issues/364"
EXPECTED = "updates"
FIGURE = 40.0
LEVEL = "note"


def script(audit: Callable[..., Findings]) -> Findings:
    loader = divided(samples())
    model = network()
    set_epoch = loader.sampler.set_epoch
    optimizer = optimizer_of(model)
    return audit(model, loader, cross_entropy, optimizer, set_epoch=set_epoch, epochs=10)
