"""DistributedSampler shuffles, and set_epoch is not called."""

from collections.abc import Callable

from planted_parts import divided, perceptron, random_data, sgd
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from largebatch.audit import Findings

ISSUE = "https://github.com/pytorch/pytorch/issues/31771"
EXPECTED = "epoch order"
FIGURE = 2.0


def script(audit: Callable[..., Findings]) -> Findings:
    loader = divided(random_data(64, seed=1), 8, shuffle=True)
    model = DistributedDataParallel(perceptron())
    return audit(model, loader, cross_entropy, sgd(model, lr=0.01))
