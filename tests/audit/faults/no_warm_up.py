"""The scaled rate is used from the first update."""

from collections.abc import Callable

from planted_parts import divided, perceptron, random_data, sgd
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from largebatch.audit import Findings

ISSUE = "https://github.com/open-mmlab/mmdetection/issues/1710"
EXPECTED = "warm-up"
FIGURE = 0.0
LEVEL = "note"


def script(audit: Callable[..., Findings]) -> Findings:
    loader = divided(random_data(64, seed=1), 8, shuffle=True)
    model = DistributedDataParallel(perceptron())
    return audit(
        model,
        loader,
        cross_entropy,
        sgd(model, lr=0.08),
        set_epoch=loader.sampler.set_epoch,
        base=(2, 0.01),
        rate=lambda _: 0.08,
        epochs=400,
    )
