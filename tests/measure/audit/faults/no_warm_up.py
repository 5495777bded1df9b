"""The scaled rate is used from the first update."""

from collections.abc import Callable

from small_training import divided, network, optimizer_of, samples
from torch.nn.functional import cross_entropy

from largebatch.measure.audit import Findings

ISSUE = "https://github.com/open-mmlab/mmdetection/issues/1710"
EXPECTED = "warm-up"
FIGURE = 0.0
LEVEL = "note"


def script(audit: Callable[..., Findings]) -> Findings:
    loader = divided(samples())
    model = network()
    return audit(
        model,
        loader,
        cross_entropy,
        optimizer_of(model, 0.08),
        set_epoch=loader.sampler.set_epoch,
        base=(2, 0.01),
        rate=lambda _: 0.08,
        epochs=400,
    )
