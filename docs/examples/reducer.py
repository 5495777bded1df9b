"""The step of largebatch in a loop of your own, without a wrapper around the model.

torchrun --nproc-per-node=2 docs/examples/reducer.py, or horovodrun -np 2 python docs/examples/...

The reducer sums gradients in groups while backward runs. An update calls it in this order:
zero(), the passes of all micro-batches, arm() before the last backward pass, wait().
"""

import torch
from torch.nn import CrossEntropyLoss

from largebatch.data.types import Batch
from largebatch.distributed import connect
from largebatch.distributed.reducer import Reducer
from largebatch.models import Spans, build, param_groups, with_span
from largebatch.optim import LARS
from largebatch.training.loop import EagerStep

MICRO_BATCHES, BATCH, SPAN = 2, 32, 16


def main() -> None:
    """Make ten updates, each from two micro-batches of every worker."""
    backend = connect("auto")
    torch.manual_seed(0)
    model = with_span(build("cifar_resnet8", num_classes=10), SPAN).to(backend.device)
    step = EagerStep(
        model,
        LARS(param_groups(model, weight_decay=1e-4), lr=0.1, eta=0.02),
        CrossEntropyLoss(reduction="sum"),  # the step divides by the global batch
        Reducer(model.named_parameters(), backend, divisor=1.0),
        Spans(model, backend),  # statistics of all workers, moved once an update
        global_batch=BATCH * MICRO_BATCHES * backend.world_size,
    )
    generator = torch.Generator().manual_seed(backend.rank)
    for _ in range(10):
        for micro in range(MICRO_BATCHES):
            images = torch.randn(BATCH, 3, 16, 16, generator=generator).to(backend.device)
            batch = Batch(images, images[:, 0, 0, 0].gt(0).long())
            step.accumulate(batch, first=micro == 0, last=micro == MICRO_BATCHES - 1)
        step.finish()
    print(f"worker {backend.rank}: {sum(w.double().sum().item() for w in model.parameters()):.12f}")
    backend.close()


if __name__ == "__main__":
    main()
