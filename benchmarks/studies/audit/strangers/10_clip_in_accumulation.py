"""Gradients are clipped in every micro-batch of an accumulation (huggingface/accelerate 641)."""

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

GRADIENT_ACCUMULATION_STEPS = 4


def main():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=GRADIENT_ACCUMULATION_STEPS)
    torch.manual_seed(3)
    digits = load_digits()
    images = torch.tensor(digits.data).float() / 16
    labels = torch.tensor(digits.target)
    loader = DataLoader(TensorDataset(images, labels), batch_size=28, shuffle=True)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    loss_function = nn.CrossEntropyLoss()
    for epoch in range(3):
        model.train()
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                outputs = model(inputs)
                loss = loss_function(outputs, targets)
                accelerator.backward(loss)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
                optimizer.step()
                optimizer.zero_grad()
        accelerator.print(f"epoch {epoch}: {loss.item():.3f}")


main()
