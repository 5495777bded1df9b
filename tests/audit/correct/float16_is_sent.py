"""Gradients are sent in float16, which has enough bits for them."""

from collections.abc import Callable

from planted_parts import divided, perceptron, random_data, sgd
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from largebatch.audit import Findings


def script(audit: Callable[..., Findings]) -> Findings:
    loader = divided(random_data(), 16, shuffle=False)
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    model = DistributedDataParallel(perceptron(), bucket_cap_mb=1)
    model.register_comm_hook(None, fp16_compress_hook)
    return audit(model, loader, nn.CrossEntropyLoss(label_smoothing=0.1), sgd(model))
