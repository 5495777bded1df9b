"""An audit of a plain DistributedDataParallel loop with accumulation and clipping.

torchrun --nproc-per-node=2 docs/examples/audit_ddp.py
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from largebatch.audit import audit
from largebatch.data.datasets.digits import load_digits
from largebatch.models import build


def main() -> None:
    """Audit the loop, then train on the digits."""
    dist.init_process_group("gloo")  # "nccl" on GPUs
    images, labels = map(torch.as_tensor, load_digits())
    digits = TensorDataset(images.view(-1, 1, 8, 8).repeat(1, 3, 2, 2).float() / 16, labels)
    sampler = DistributedSampler(digits)
    loader = DataLoader(digits, 48, sampler=sampler, drop_last=True)
    torch.manual_seed(0)
    model = DistributedDataParallel(build("cifar_resnet8", num_classes=10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    micro_batches = 0

    def step(batch: list[Tensor]) -> None:
        nonlocal micro_batches
        micro_batches += 1
        loss = cross_entropy(model(batch[0]), batch[1]) / 2
        loss.backward()
        if micro_batches % 2 == 0:
            clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    audit(model, loader, cross_entropy, optimizer, step, set_epoch=sampler.set_epoch)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for batch in loader:
            step(batch)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
