"""An audit of an Accelerate loop with accumulation.

accelerate launch --cpu --num_processes 2 docs/examples/audit_accelerate.py
"""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from largebatch.audit import audit
from largebatch.data.datasets.digits import load_digits
from largebatch.models import build


def main() -> None:
    """Audit the loop, then train on the digits."""
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=2)
    images, labels = map(torch.as_tensor, load_digits())
    digits = TensorDataset(images.view(-1, 1, 8, 8).repeat(1, 3, 2, 2).float() / 16, labels)
    set_seed(0)
    model = build("cifar_resnet8", num_classes=10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(digits, 48, shuffle=True, drop_last=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    def step(batch: list[Tensor]) -> None:
        with accelerator.accumulate(model):
            accelerator.backward(cross_entropy(model(batch[0]), batch[1]))
            optimizer.step()
            optimizer.zero_grad()

    audit(model, loader, cross_entropy, optimizer, step, set_epoch=loader.set_epoch)
    for _ in range(2):
        for batch in loader:
            step(batch)
    accelerator.end_training()


if __name__ == "__main__":
    main()
