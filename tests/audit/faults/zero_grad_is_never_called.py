"""zero_grad is never called, so each update has the gradients of all updates before it."""

from collections.abc import Callable

from planted_parts import alternating, linear, sgd
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from largebatch.audit import Findings

ISSUE = "https://github.com/wenet-e2e/wekws/pull/73"
EXPECTED = "gradient direction"
FIGURE = 0.5**0.5


def script(audit: Callable[..., Findings]) -> Findings:
    model = DistributedDataParallel(linear())
    optimizer = sgd(model)

    def step(batch: tuple[Tensor, Tensor]) -> None:
        cross_entropy(model(batch[0]), batch[1]).backward()
        optimizer.step()

    return audit(model, alternating(), cross_entropy, optimizer, step)
