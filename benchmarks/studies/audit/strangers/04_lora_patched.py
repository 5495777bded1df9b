"""LoRA replaces forward methods; the adapter is never called (kohya-ss/sd-scripts 989)."""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Lora(nn.Module):
    def __init__(self, layer, rank=4):
        super().__init__()
        self.down = nn.Linear(layer.in_features, rank, bias=False)
        self.up = nn.Linear(rank, layer.out_features, bias=False)
        self.org_forward = layer.forward
        layer.forward = self.forward

    def forward(self, x):
        return self.org_forward(x) + self.up(self.down(x))


class LoraNetwork(nn.Module):
    def __init__(self, unet):
        super().__init__()
        layers = [m for m in unet.modules() if isinstance(m, nn.Linear)]
        self.loras = nn.ModuleList([Lora(m) for m in layers])


def main():
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(42)
    digits = load_digits()
    x, y = torch.tensor(digits.data).float() / 16, torch.tensor(digits.target)
    dataloader = DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True)

    unet = nn.Sequential(nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 10))
    unet.requires_grad_(False)
    network = LoraNetwork(unet)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
    network, optimizer, dataloader = accelerator.prepare(network, optimizer, dataloader)

    for epoch in range(2):
        for images, labels in dataloader:
            with accelerator.accumulate(network):
                loss = F.cross_entropy(unet(images), labels)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        accelerator.print(epoch, loss.item())


main()
