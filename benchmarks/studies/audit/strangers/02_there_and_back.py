"""The wrapped model is converted for an evaluation and back (pytorch/pytorch 104336).

There it moves to the CPU and back to the GPU; on a CPU alone a change of the type does the same.
"""

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def build_index(model, images):
    """Embed all images in double precision while the device is free."""
    model.double()
    with torch.no_grad():
        index = model.module(images.double())
    model.float()
    return index


def main():
    dist.init_process_group(backend="gloo")
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    targets = torch.tensor(digits.target)
    train_set = TensorDataset(images, targets)
    sampler = DistributedSampler(train_set, shuffle=True)
    loader = DataLoader(train_set, 40, sampler=sampler)

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    model = DistributedDataParallel(net)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        index = build_index(model, images)
        model.train()
        for inputs, labels in loader:
            outputs = model(inputs)
            loss = criterion(outputs, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(dist.get_rank(), epoch, loss.item(), index.norm().item())


main()
