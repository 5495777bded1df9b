"""Gradients are sent in float16, in which they are zero."""

from collections.abc import Callable

from planted_parts import divided, parallel, perceptron, sgd
from torch import Tensor
from torch.nn.functional import cross_entropy

from largebatch.measure.audit import Findings

ISSUE = "https://docs.pytorch.org/docs/stable/amp.html"
EXPECTED = "precision"
FIGURE = 1.0


def script(audit: Callable[..., Findings]) -> Findings:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    model = parallel(perceptron())
    model.register_comm_hook(None, fp16_compress_hook)

    def small(logits: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(logits, labels) * 1e-9

    return audit(model, divided(), small, sgd(model))
