"""The rate grows with the number of GPUs, from a base that had several: 8 times the linear rule."""

from collections.abc import Callable

from small_training import divided, network, optimizer_of, samples
from torch.nn.functional import cross_entropy

from largebatch.measure.audit import Findings

ISSUE = "https://github.com/determined-ai/determined/issues/5661"
EXPECTED = "rate for the batch"
FIGURE = 8.0
LEVEL = "note"


def script(audit: Callable[..., Findings]) -> Findings:
    loader = divided(samples())
    model = network()
    set_epoch = loader.sampler.set_epoch
    optimizer = optimizer_of(model, 0.64)
    return audit(model, loader, cross_entropy, optimizer, set_epoch=set_epoch, base=(2, 0.01))
