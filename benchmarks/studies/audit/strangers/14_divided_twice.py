"""A DistributedSampler, and Accelerate divides the loader again (huggingface/accelerate 3520)."""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def build_dataloader(accelerator):
    digits = load_digits()
    dataset = TensorDataset(torch.tensor(digits.data).float() / 16, torch.tensor(digits.target))
    sampler = DistributedSampler(
        dataset, num_replicas=accelerator.num_processes, rank=accelerator.process_index, seed=7
    )
    return DataLoader(dataset, batch_size=32, sampler=sampler), sampler


def main():
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(7)
    dataloader, sampler = build_dataloader(accelerator)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    model, optimizer, dataloader = accelerator.prepare(model, optimizer, dataloader)
    accelerator.print("batches in an epoch:", len(dataloader))
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for images, labels in dataloader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()
        accelerator.print(epoch, loss.item())


main()
