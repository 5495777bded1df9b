"""The parts of timm's training script that `--resume` uses, at an epoch's end.

python by_timm.py --epochs 2
python by_timm.py --epochs 1 && python by_timm.py --epochs 2 --resume checkpoint-0.pth.tar

The script itself is in no package. Like it, this one restores no random generator: the order is the
sampler's, which depends on the epoch, and nothing else is random.
"""

import argparse
from typing import Any

import timm
import torch
from timm.models import resume_checkpoint
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import CheckpointSaver, ModelEmaV3, NativeScaler
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--resume")
    args = parser.parse_args()
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(24, 3, 16, 16), torch.randint(2, (24,)))
    sampler: DistributedSampler[Any] = DistributedSampler(data, num_replicas=1, rank=0)
    loader = DataLoader(data, 8, sampler=sampler)
    model = timm.create_model(
        "resnet10t", num_classes=2, channels=(8, 8, 8, 8), stem_width=8, stem_type=""
    )
    optimizer = create_optimizer_v2(model, opt="momentum", lr=0.05, momentum=0.9, weight_decay=1e-4)
    scaler = NativeScaler(device="cpu")
    first_epoch = 0
    if args.resume:
        epoch = resume_checkpoint(model, args.resume, optimizer, scaler, log_info=False)
        assert epoch is not None
        first_epoch = epoch
    average = ModelEmaV3(model, decay=0.8)
    if args.resume:
        timm.models.load_checkpoint(average.module, args.resume, use_ema=True)
    scheduler, _ = create_scheduler_v2(
        optimizer, "cosine", num_epochs=4, warmup_epochs=1, updates_per_epoch=len(loader)
    )
    assert scheduler is not None
    scheduler.step(first_epoch)
    saver = CheckpointSaver(
        model, optimizer, model_ema=average, amp_scaler=scaler, checkpoint_dir="."
    )

    for epoch in range(first_epoch, args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for update, (images, labels) in enumerate(loader, epoch * len(loader) + 1):
            loss = cross_entropy(model(images), labels)
            optimizer.zero_grad()
            scaler(loss, optimizer)
            average.update(model, step=update)
            scheduler.step_update(update)
        scheduler.step(epoch + 1)
        saver.save_checkpoint(epoch)


if __name__ == "__main__":
    main()
