"""An audit of a loop as in timm's training script.

torchrun --nproc-per-node=2 docs/examples/audit_timm.py
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from largebatch.audit import audit
from largebatch.data.datasets.digits import load_digits
from largebatch.optional import require_timm

timm = require_timm()  # as `import timm`, also where torchvision was built for another torch

from timm.loss import LabelSmoothingCrossEntropy  # noqa: E402
from timm.optim import create_optimizer_v2  # noqa: E402
from timm.utils import ModelEmaV3, dispatch_clip_grad  # noqa: E402


def main() -> None:
    """Audit the loop, then train on the digits."""
    dist.init_process_group("gloo")  # "nccl" on GPUs
    images, labels = map(torch.as_tensor, load_digits())
    digits = TensorDataset(images.view(-1, 1, 8, 8).repeat(1, 3, 4, 4).float() / 16, labels)
    sampler = DistributedSampler(digits)
    loader = DataLoader(digits, 48, sampler=sampler, drop_last=True)
    torch.manual_seed(0)
    model = timm.create_model("resnet10t", num_classes=10)
    optimizer = create_optimizer_v2(model, opt="sgd", lr=0.1, momentum=0.9, weight_decay=1e-4)
    model_ema = ModelEmaV3(model, decay=0.99)
    model = DistributedDataParallel(model)
    train_loss_fn = LabelSmoothingCrossEntropy(0.1)

    def step(batch: list[Tensor]) -> None:
        loss = train_loss_fn(model(batch[0]), batch[1])
        loss.backward()
        dispatch_clip_grad(model.parameters(), 1.0, mode="norm")
        optimizer.step()
        optimizer.zero_grad()
        model_ema.update(model.module)

    audit(
        model,
        loader,
        train_loss_fn,
        optimizer,
        step,
        set_epoch=sampler.set_epoch,
        averaged=model_ema,
    )
    for epoch in range(1):
        sampler.set_epoch(epoch)
        for batch in loader:
            step(batch)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
