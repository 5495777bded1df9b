"""Worker 0 clips the average of the gradients, and the other worker does not."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from planted_parts import apart, linear, sgd
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot
from torch.nn.parallel import DistributedDataParallel

from largebatch.audit import Findings

ISSUE = "https://docs.pytorch.org/docs/stable/notes/ddp.html"
EXPECTED = "clipping"
ALSO = ("weights",)


def script(audit: Callable[..., Findings]) -> Findings:
    model = DistributedDataParallel(linear())
    optimizer = sgd(model, lr=1e-4)

    def step(batch: tuple[Tensor, Tensor]) -> None:
        optimizer.zero_grad()
        cross_entropy(model(batch[0]), batch[1]).backward()
        if dist.get_rank() == 0:
            nn.utils.clip_grad_norm_(model.parameters(), MAXIMUM)
        optimizer.step()

    return audit(model, apart(dist.get_rank()), cross_entropy, optimizer, step)


def first_norm() -> float:
    """Return the norm of the first average, of four classes whose probabilities are equal."""
    halves = [apart(place)[0] for place in range(2)]
    each = [(0.25 - one_hot(labels, 4)).T @ images / 8 for images, labels in halves]
    return float(torch.linalg.norm(sum(each) / 2))


MAXIMUM = 0.02
FIGURE = MAXIMUM / first_norm()
