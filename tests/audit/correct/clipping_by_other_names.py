"""Clipping by a partial of clip_grad_norm_, then by the parts of which it is made."""

from collections.abc import Callable
from functools import partial

from planted_parts import divided, perceptron, random_data, sgd
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from largebatch.audit import Findings

clip = partial(nn.utils.clip_grad_norm_, max_norm=0.2)


def script(audit: Callable[..., Findings]) -> Findings:
    loader = divided(random_data(), 16, shuffle=False)
    model = DistributedDataParallel(perceptron())
    optimizer = sgd(model)

    def step(batch: list[Tensor]) -> None:
        optimizer.zero_grad()
        cross_entropy(model(batch[0]), batch[1]).backward()
        clip(model.parameters())
        norm = nn.utils.get_total_norm(
            [it.grad for it in model.parameters() if it.grad is not None]
        )
        nn.utils.clip_grads_with_norm_(model.parameters(), 0.1, norm)
        optimizer.step()

    return audit(model, loader, cross_entropy, optimizer, step)
