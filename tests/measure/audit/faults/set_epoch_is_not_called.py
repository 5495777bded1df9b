"""DistributedSampler shuffles, and set_epoch is not called."""

from collections.abc import Callable

from small_training import divided, network, optimizer_of, samples
from torch.nn.functional import cross_entropy

from largebatch.measure.audit import Findings

ISSUE = "https://github.com/pytorch/pytorch/issues/31771"
EXPECTED = "epoch order"
FIGURE = 2.0


def script(audit: Callable[..., Findings]) -> Findings:
    model = network()
    return audit(model, divided(samples()), cross_entropy, optimizer_of(model))
