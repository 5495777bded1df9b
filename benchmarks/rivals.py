"""One step of ResNet-18 with SGD, for each way of reducing gradients in reduction.py."""

import torch
import torch.nn.functional as F
from measuring import Step
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer

from largebatch.distributed.backend import Backend
from largebatch.distributed.reducer import Reducer
from largebatch.models import build

RATE = 1e-3


def resnet18() -> nn.Module:
    torch.manual_seed(0)
    return build("resnet18", num_classes=1000)


def usual_step(model: nn.Module, optimizer: Optimizer, images: Tensor, labels: Tensor) -> Step:
    """Make the training step of a PyTorch tutorial."""

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()

    return step


def plain(images: Tensor, labels: Tensor) -> Step:
    """Train without communication."""
    model = resnet18()
    return usual_step(model, SGD(model.parameters(), lr=RATE), images, labels)


def ours(backend: Backend, images: Tensor, labels: Tensor) -> Step:
    model = resnet18()
    optimizer = SGD(model.parameters(), lr=RATE)
    reducer = Reducer(model.named_parameters(), backend)
    global_batch = backend.world_size * len(images)

    def step() -> None:
        reducer.zero()
        loss = F.cross_entropy(model(images), labels, reduction="sum") / global_batch
        reducer.arm()
        loss.backward()
        reducer.wait()
        optimizer.step()

    return step


def ddp(
    images: Tensor,
    labels: Tensor,
    *,
    broadcast_buffers: bool = False,
    gradient_as_bucket_view: bool = False,
) -> Step:
    """DistributedDataParallel, which by default also sends BatchNorm's buffers in every forward.

    No other rival here sends them, so a fair comparison goes without.
    """
    model = DistributedDataParallel(
        resnet18(),
        broadcast_buffers=broadcast_buffers,
        gradient_as_bucket_view=gradient_as_bucket_view,
    )
    return usual_step(model, SGD(model.parameters(), lr=RATE), images, labels)


def horovod_example(images: Tensor, labels: Tensor) -> Step:
    """What examples/pytorch/pytorch_imagenet_resnet50.py of Horovod 0.28.1 does in a step."""
    import horovod.torch as hvd

    model = resnet18()
    optimizer = hvd.DistributedOptimizer(
        SGD(model.parameters(), lr=RATE),
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.none,
        backward_passes_per_step=1,
        op=hvd.Average,
        gradient_predivide_factor=1.0,
    )
    return usual_step(model, optimizer, images, labels)
