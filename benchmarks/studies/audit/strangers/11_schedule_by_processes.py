"""Accelerate moves the schedule once for each process (huggingface/diffusers 3954)."""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

WARMUP_STEPS = 20
MAX_TRAIN_STEPS = 200


def warmup_then_linear(step):
    if step < WARMUP_STEPS:
        return step / WARMUP_STEPS
    return max(0.0, (MAX_TRAIN_STEPS - step) / (MAX_TRAIN_STEPS - WARMUP_STEPS))


def main():
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    digits = load_digits()
    pixels, targets = torch.tensor(digits.data).float() / 16, torch.tensor(digits.target)
    train_dataloader = DataLoader(TensorDataset(pixels, targets), shuffle=True, batch_size=16)
    unet = nn.Sequential(nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(unet.parameters(), lr=1e-3)
    lr_scheduler = LambdaLR(optimizer, warmup_then_linear)
    unet, optimizer, train_dataloader, lr_scheduler = accelerator.prepare(
        unet, optimizer, train_dataloader, lr_scheduler
    )
    global_step = 0
    while global_step < MAX_TRAIN_STEPS:
        for clean_images, classes in train_dataloader:
            loss = F.cross_entropy(unet(clean_images), classes)
            accelerator.backward(loss)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
            global_step += 1
            if global_step >= MAX_TRAIN_STEPS:
                break


main()
