"""The schedule's length is that of the loader before it is divided (huggingface/diffusers 8236)."""

import math

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset

NUM_TRAIN_EPOCHS = 5


def main():
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    digits = load_digits()
    x, y = torch.tensor(digits.data).float() / 16, torch.tensor(digits.target)
    train_dataloader = DataLoader(TensorDataset(x, y), shuffle=True, batch_size=32)
    unet = nn.Sequential(nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(unet.parameters(), lr=1e-3)
    # Scheduler and math around the number of training steps.
    num_update_steps_per_epoch = math.ceil(len(train_dataloader))
    max_train_steps = NUM_TRAIN_EPOCHS * num_update_steps_per_epoch
    lr_scheduler = CosineAnnealingLR(optimizer, T_max=max_train_steps * accelerator.num_processes)
    unet, optimizer, train_dataloader, lr_scheduler = accelerator.prepare(
        unet, optimizer, train_dataloader, lr_scheduler
    )
    for _ in range(NUM_TRAIN_EPOCHS):
        for images, classes in train_dataloader:
            with accelerator.accumulate(unet):
                loss = F.cross_entropy(unet(images), classes)
                accelerator.backward(loss)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()


main()
