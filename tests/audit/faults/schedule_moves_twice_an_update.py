"""The scheduler is stepped twice an update: by the optimizer's wrapper, and by the script."""

from collections.abc import Callable

from planted_parts import divided, perceptron, random_data, sgd
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

from largebatch.audit import Findings

ISSUE = "https://github.com/pytorch/vision/issues/1261"
EXPECTED = "warm-up"
FIGURE = 2.0


def rise(step: int) -> float:
    return min(1.0, (step + 1) / 100)


def script(audit: Callable[..., Findings]) -> Findings:
    loader = divided(random_data(64, seed=1), 8, shuffle=True)
    model = DistributedDataParallel(perceptron())
    optimizer = sgd(model, lr=0.01)
    scheduler = LambdaLR(optimizer, rise)

    def step(batch: tuple[Tensor, Tensor]) -> None:
        cross_entropy(model(batch[0]), batch[1]).backward()
        optimizer.step()
        optimizer.zero_grad()
        for _ in range(2):
            scheduler.step()

    return audit(
        model,
        loader,
        cross_entropy,
        optimizer,
        step,
        set_epoch=loader.sampler.set_epoch,
        rate=lambda update: 0.01 * rise(update),
    )
