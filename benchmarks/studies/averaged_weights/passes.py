"""Passes over averaged weights, on workers with shares of different sizes.

The passes read the same training images, in the same batches, at every number of workers; the first
worker has the largest share. Each starts from the weights as the library leaves them:
- `as left`: no pass;
- `averaged`: no pass; running means and variances were averaged like the weights;
- `polish`: `largebatch.polish.polish` on all workers;
- `own`: torch's `update_bn` on every worker, over its own share;
- `ddp`: `update_bn` of a DistributedDataParallel model, over as many batches as the smallest share
  has. It sends the first worker's buffers to all only before the first batch, because `update_bn`
  disables gradients; so this is `own` with equal shares;
- `mean`: `own`, then the mean of means and variances over the workers, as timm's `distribute_bn`;
- `augmented`, `polish augmented`: `update_bn` and `polish` on one worker, on images augmented as in
  training.

Several workers, and augmented images, see the weights of SHARED only.
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import update_bn

from largebatch.models import build
from largebatch.polish import polish
from largebatch.runs.launch import start_workers

WIDTH = 16
PASS_BATCH = 250
SHARES = {1: (20,), 2: (14, 6), 4: (8, 6, 4, 2)}
"""Batches of every worker, by the number of workers."""

SHARED = (
    "EMA 0.999, peak",
    "SWA, peak",
    "Schedule-Free SGD, end",
    "Schedule-Free AdamW, end",
    "soup of 3, end",
)

MEAN_STD = {
    "fashion_mnist": ((0.2860,) * 3, (0.3530,) * 3),
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
}
PADDING = {"fashion_mnist": 2, "cifar10": 4}

State = dict[str, Tensor]
"""Weights and buffers of a model."""

States = dict[str, State]
"""States of an average: `as left`, and `averaged` where its buffers can be averaged too."""


Found = dict[str, dict[str, Any]]
"""What was found in every pass."""


@dataclass(frozen=True, slots=True)
class Images:
    """Pixels, uint8, N x H x W x 3, and labels."""

    pixels: Tensor
    labels: Tensor

    def part(self, chosen: Tensor | slice) -> "Images":
        """Return the chosen images."""
        return Images(self.pixels[chosen], self.labels[chosen])


def new_model() -> nn.Module:
    """Return a ResNet-9 with new weights."""
    model = build("cifar_resnet9", num_classes=10, arguments={"width": WIDTH})
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]


def normalised(pixels: Tensor, name: str) -> Tensor:
    """Return normalised images, N x 3 x H x W in channels-last order."""
    mean, std = (255 * torch.tensor(values) for values in MEAN_STD[name])
    return ((pixels - mean) / std).permute(0, 3, 1, 2)


def augmented(pixels: Tensor, name: str, draw: torch.Generator) -> Tensor:
    """Shift images by up to PADDING pixels, with zeros outside, and flip half of them."""
    (count, side), pad = pixels.shape[:2], PADDING[name]
    padded = F.pad(pixels, (0, 0, pad, pad, pad, pad))
    top, left = torch.randint(2 * pad + 1, (2, count, 1, 1), generator=draw)
    columns = torch.arange(side).expand(count, 1, side)
    flipped = torch.rand(count, 1, 1, generator=draw) < 0.5
    columns = torch.where(flipped, columns.flip(2), columns)
    rows = torch.arange(side).view(1, side, 1)
    return padded[torch.arange(count).view(-1, 1, 1), top + rows, left + columns]


def batches(images: Images, name: str) -> Iterator[Tensor]:
    """Yield the images in batches, normalised."""
    for pixels in images.pixels.split(PASS_BATCH):
        yield normalised(pixels, name)


@torch.no_grad()
def predict(model: nn.Module, images: Images, name: str) -> Tensor:
    """Return the predicted classes in evaluation mode."""
    model.eval()
    return torch.cat([model(batch).argmax(1) for batch in batches(images, name)])


def accuracy(predicted: Tensor, images: Images) -> float:
    """Return the part of right predictions."""
    return predicted.eq(images.labels).mean(dtype=torch.float64).item()


def on_workers(workers: int, folder: Path, images: Path, name: str) -> dict[str, Found]:
    """Make the passes over all weights of a folder on `workers` workers.

    Returns by weights and pass: `top1`, of every worker; `differ`, the part of the test images on
    which two workers predict differently; `seconds`; and how far the statistics of the worst worker
    are from those of `polish`.
    """
    with tempfile.TemporaryDirectory() as out:
        command = [
            "-m",
            "benchmarks.studies.averaged_weights.passes",
            str(folder),
            str(images),
            name,
            f"{out}/found.pt",
        ]
        start_workers(command, workers=workers)
        found: dict[str, Found] = torch.load(f"{out}/found.pt")
        return found


def main() -> None:
    """Make all passes as one of the workers."""
    parser = argparse.ArgumentParser()
    for what, kind in (("folder", Path), ("images", Path), ("name", str), ("out", Path)):
        parser.add_argument(what, type=kind)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train, test = torch.load(args.images, weights_only=False)
    found = {}
    for file in sorted(args.folder.glob("*.pt")):
        shared = file.stem in SHARED
        if not shared and dist.get_world_size() > 1:
            continue
        passes = Passes(torch.load(file), train, args.name, shared=shared)
        own = measure(passes.all(), test, args.name)
        of_all: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(of_all, own)
        found[file.stem] = {kind: merge([each[kind] for each in of_all]) for kind in own}
    if dist.get_rank() == 0:
        torch.save(found, args.out)
    dist.destroy_process_group()


def merge(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what all workers found in a pass."""
    predicted = torch.stack([part["predicted"] for part in parts])
    return {
        "top1": [part["top1"] for part in parts],
        "differ": predicted.ne(predicted[0]).any(0).mean(dtype=torch.float64).item(),
        **{key: max(part[key] for part in parts) for key in ("seconds", "shift", "log_variance")},
    }


class Passes:
    """The passes over one set of weights, on this worker and its share of the images."""

    def __init__(self, states: States, train: Images, name: str, *, shared: bool) -> None:
        self.states, self.name, self.shared = states, name, shared
        self.workers, rank = dist.get_world_size(), dist.get_rank()
        shares = SHARES[self.workers]
        first = PASS_BATCH * sum(shares[:rank])
        self.own = train.part(slice(first, first + PASS_BATCH * shares[rank]))
        self.shortest = self.own.part(slice(PASS_BATCH * min(shares)))

    def all(self) -> Mapping[str, Callable[[], nn.Module]]:
        """Return what makes the model of every pass; `polish` is the first."""
        own = {"polish": partial(self.polished, self.own), "own": partial(self.updated, self.own)}
        if self.workers > 1:
            return own | {"ddp": self.updated_by_ddp, "mean": self.mean_of_workers}
        own |= {kind: partial(self.fresh, kind) for kind in self.states}
        if not self.shared:
            return own
        draw = torch.Generator().manual_seed(0)
        moved = Images(augmented(self.own.pixels, self.name, draw), self.own.labels)
        return own | {
            "augmented": partial(self.updated, moved),
            "polish augmented": partial(self.polished, moved),
        }

    def fresh(self, state: str = "as left") -> nn.Module:
        """Return the model as it was saved."""
        model = new_model()
        model.load_state_dict(self.states[state])
        return model

    def polished(self, images: Images) -> nn.Module:
        """Return the model after `polish`."""
        model = self.fresh()
        polish(model, batches(images, self.name))
        return model

    def updated(self, images: Images) -> nn.Module:
        """Return the model after torch's `update_bn`."""
        model = self.fresh()
        update_bn(batches(images, self.name), model)
        return model

    def updated_by_ddp(self) -> nn.Module:
        """Return the model after `update_bn` of DistributedDataParallel."""
        model = DistributedDataParallel(self.fresh())
        update_bn(batches(self.shortest, self.name), model)
        wrapped: nn.Module = model.module
        return wrapped

    def mean_of_workers(self) -> nn.Module:
        """Return the model with the mean of what `update_bn` found on the workers."""
        model = self.updated(self.own)
        for buffer in running_buffers(model):
            dist.all_reduce(buffer)
            buffer.div_(self.workers)
        return model


def measure(passes: Mapping[str, Callable[[], nn.Module]], test: Images, name: str) -> Found:
    """Make the passes and return what this worker found; `polish`, the first, is exact."""
    found: Found = {}
    exact: nn.Module | None = None
    for kind, make in passes.items():
        dist.barrier()
        start = time.perf_counter()
        model = make()
        seconds = time.perf_counter() - start
        exact = exact or model
        predicted = predict(model, test, name)
        found[kind] = {
            "predicted": predicted,
            "top1": accuracy(predicted, test),
            "seconds": seconds,
            **distance(model, exact),
        }
    return found


def running_buffers(model: nn.Module) -> list[Tensor]:
    """Return the running means and variances of a model in turn."""
    return [buffer for buffer in model.buffers() if buffer.is_floating_point()]


def distance(model: nn.Module, exact: nn.Module) -> dict[str, float]:
    """Return the largest shift of a mean, in standard deviations, and |ln| of a variance ratio."""
    own, true = running_buffers(model), running_buffers(exact)
    shifts = [
        (mean - true_mean).abs() / (true_var + 1e-5).sqrt()
        for mean, true_mean, true_var in zip(own[::2], true[::2], true[1::2], strict=True)
    ]
    ratios = [
        ((var + 1e-5) / (true_var + 1e-5)).log().abs()
        for var, true_var in zip(own[1::2], true[1::2], strict=True)
    ]
    return {
        "shift": torch.cat(shifts).max().item(),
        "log_variance": torch.cat(ratios).max().item(),
    }


if __name__ == "__main__":
    main()
