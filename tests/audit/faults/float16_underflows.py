"""Gradients are sent in float16, in which they are zero."""

from collections.abc import Callable

from planted_parts import divided, perceptron, random_data, sgd
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from largebatch.audit import Findings

ISSUE = "https://docs.pytorch.org/docs/stable/amp.html"
EXPECTED = "precision"
FIGURE = 1.0


def script(audit: Callable[..., Findings]) -> Findings:
    loader = divided(random_data(), 16, shuffle=False)
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    model = DistributedDataParallel(perceptron())
    model.register_comm_hook(None, fp16_compress_hook)

    def small(logits: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(logits, labels) * 1e-9

    return audit(model, loader, small, sgd(model))
