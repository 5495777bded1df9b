"""Weights and statistics in dictionaries, and a model that is a function of them.

python by_functions.py --epochs 2
python by_functions.py --epochs 1 && python by_functions.py --epochs 2 --resume state.pt
"""

import argparse

import torch
from torch import nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, required=True)
parser.add_argument("--resume")
args = parser.parse_args()

torch.manual_seed(3)
data = TensorDataset(torch.randn(30, 5), torch.randint(2, (30,)))
network = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
weights = {name: it.detach().clone().requires_grad_() for name, it in network.named_parameters()}
statistics = {name: it.clone() for name, it in network.named_buffers()}
optimizer = torch.optim.Adam(weights.values(), lr=0.01)
start = 0
if args.resume:
    state = torch.load(args.resume)
    with torch.no_grad():
        for name, weight in weights.items():
            weight.copy_(state["weights"][name])
    statistics = state["statistics"]
    optimizer.load_state_dict(state["optimizer"])
    start = state["epoch"]

for epoch in range(start, args.epochs):
    order = torch.Generator().manual_seed(epoch)
    for inputs, labels in DataLoader(data, 10, shuffle=True, generator=order):
        loss = cross_entropy(functional_call(network, (weights, statistics), inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    state = {
        "weights": weights,
        "statistics": statistics,
        "optimizer": optimizer.state_dict(),
        "epoch": epoch + 1,
    }
    torch.save(state, "state.pt")
