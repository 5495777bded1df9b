"""An audit of a Horovod loop, whose optimizer averages the gradients.

horovodrun -np 2 python docs/examples/audit_horovod.py
"""

import horovod.torch as hvd
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from largebatch.audit import audit
from largebatch.data.datasets.digits import load_digits
from largebatch.models import build


def main() -> None:
    """Audit the loop, then train on the digits."""
    hvd.init()
    images, labels = map(torch.as_tensor, load_digits())
    digits = TensorDataset(images.view(-1, 1, 8, 8).repeat(1, 3, 2, 2).float() / 16, labels)
    sampler = DistributedSampler(digits, num_replicas=hvd.size(), rank=hvd.rank())
    loader = DataLoader(digits, 48, sampler=sampler, drop_last=True)
    torch.manual_seed(hvd.rank())
    model = build("cifar_resnet8", num_classes=10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    audit(model, loader, cross_entropy, optimizer, set_epoch=sampler.set_epoch)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            cross_entropy(model(images), labels).backward()
            optimizer.step()


if __name__ == "__main__":
    main()
