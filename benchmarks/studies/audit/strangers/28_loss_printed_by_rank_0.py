"""Correct: the printed loss is that of rank 0 and its last micro-batch (karpathy/llm.c 551)."""

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

grad_accum_steps = 4


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(1337)
    digits = load_digits()
    data = TensorDataset(torch.tensor(digits.data).float() / 16, torch.tensor(digits.target))
    sampler = DistributedSampler(data, drop_last=True)
    loader = DataLoader(data, batch_size=16, sampler=sampler, drop_last=True)
    model = DDP(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 10)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, weight_decay=0.0)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        batches = iter(loader)
        for step in range(len(loader) // grad_accum_steps):
            optimizer.zero_grad(set_to_none=True)
            for micro_step in range(grad_accum_steps):
                x, y = next(batches)
                model.require_backward_grad_sync = micro_step == grad_accum_steps - 1
                loss = F.cross_entropy(model(x), y) / grad_accum_steps
                loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if dist.get_rank() == 0:
                print(f"step {step} | loss {loss.item() * grad_accum_steps:.4f} | norm {norm:.3f}")


main()
