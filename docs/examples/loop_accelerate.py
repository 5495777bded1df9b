"""An Accelerate loop, audited, whose averaged weights are polished on all workers.

accelerate launch --cpu --num_processes 2 docs/examples/loop_accelerate.py
"""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Subset, TensorDataset

from largebatch import evaluate
from largebatch.data.datasets.digits import load_digits
from largebatch.integrations import polished
from largebatch.integrations.accelerate import audit_loop
from largebatch.models import build


def main() -> None:
    """Train on the digits, average the weights, and print top-1 as left and polished."""
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    rank, workers = accelerator.process_index, accelerator.num_processes
    images, labels = map(torch.as_tensor, load_digits())
    digits = TensorDataset(images.view(-1, 1, 8, 8).repeat(1, 3, 2, 2).float() / 16, labels)
    train_set, val_set = Subset(digits, range(1437)), Subset(digits, range(1437, 1797))
    set_seed(0)
    model = build("cifar_resnet8", num_classes=10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(train_set, 48, shuffle=True, drop_last=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    audit_loop(accelerator, model, loader, cross_entropy, optimizer)

    average = get_ema_multi_avg_fn(0.98)
    averaged = AveragedModel(accelerator.unwrap_model(model), multi_avg_fn=average)
    for _ in range(4):
        for batch, targets in loader:
            optimizer.zero_grad()
            accelerator.backward(cross_entropy(model(batch), targets))
            optimizer.step()
            averaged.update_parameters(accelerator.unwrap_model(model))

    val_loader = DataLoader(Subset(val_set, range(rank, len(val_set), workers)), 64)
    left = evaluate(averaged, val_loader)
    clean_loader = DataLoader(Subset(train_set, range(rank, len(train_set), workers)), 64)
    with polished(model, averaged, clean_loader):
        found = evaluate(model, val_loader)
    accelerator.print(f"top-1 of the average {left.top1:.2%}, polished {found.top1:.2%}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
