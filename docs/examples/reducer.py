"""Gradients summed in groups while backward runs, without a wrapper around the model.

torchrun --nproc-per-node=2 docs/examples/reducer.py, or horovodrun -np 2 python docs/examples/...
"""

import torch
from torch.nn.functional import cross_entropy

from largebatch.distributed import connect
from largebatch.distributed.reducer import Reducer, cubic
from largebatch.models import Spans, build, param_groups, with_span
from largebatch.optim import LARS

MICRO_BATCHES, BATCH, SPAN = 2, 32, 16


def main() -> None:
    """Make ten updates, each from two micro-batches of every worker."""
    backend = connect("auto")
    torch.manual_seed(0)
    model = with_span(build("cifar_resnet8", num_classes=10), SPAN).to(backend.device)
    spans = Spans(model, backend)  # statistics of all workers, moved once an update
    divisor = MICRO_BATCHES * backend.world_size
    reducer = Reducer(model.named_parameters(), backend, grouping=cubic, divisor=divisor)
    optimizer = LARS(param_groups(model, weight_decay=1e-4), lr=0.1, eta=0.02)
    generator = torch.Generator().manual_seed(backend.rank)
    for _ in range(10):
        reducer.zero()
        for micro in range(MICRO_BATCHES):
            images = torch.randn(BATCH, 3, 16, 16, generator=generator).to(backend.device)
            loss = cross_entropy(model(images), images[:, 0, 0, 0].gt(0).long())
            if micro == MICRO_BATCHES - 1:
                spans.reduce()
                reducer.arm()  # from here on a group is sent as soon as its gradients are there
            loss.backward()
        reducer.wait()
        optimizer.step()
        spans.update()
    print(f"worker {backend.rank}: {sum(w.double().sum().item() for w in model.parameters()):.12f}")
    backend.close()


if __name__ == "__main__":
    main()
