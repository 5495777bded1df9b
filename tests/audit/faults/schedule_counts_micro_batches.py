"""The scheduler is stepped after every micro-batch, three times an update."""

from collections.abc import Callable
from contextlib import nullcontext

from planted_parts import divided, perceptron, random_data, sgd
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

from largebatch.audit import Findings

ISSUE = "https://github.com/huggingface/accelerate/issues/963"
EXPECTED = "warm-up"
FIGURE = 3.0


def rise(step: int) -> float:
    return min(1.0, (step + 1) / 100)


def script(audit: Callable[..., Findings]) -> Findings:
    loader = divided(random_data(128, seed=1), 8, shuffle=True)
    model = DistributedDataParallel(perceptron())
    optimizer = sgd(model, lr=0.01)
    scheduler = LambdaLR(optimizer, rise)
    batches = 0

    def step(batch: tuple[Tensor, Tensor]) -> None:
        nonlocal batches
        batches += 1
        with nullcontext() if batches % 3 == 0 else model.no_sync():
            (cross_entropy(model(batch[0]), batch[1]) / 3).backward()
        if batches % 3 == 0:
            optimizer.step()
            optimizer.zero_grad()
        scheduler.step()

    return audit(
        model,
        loader,
        cross_entropy,
        optimizer,
        step,
        2,
        set_epoch=loader.sampler.set_epoch,
        rate=lambda update: 0.01 * rise(update),
    )
