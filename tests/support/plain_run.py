"""A run with every augmentation, and its losses and weights in plain PyTorch, one process.

`train` runs one part of it with largebatch, on the workers that it is started on.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from plain_augment import Settings, clean_image, sample_at, training_image
from plain_mixing import CUTMIX, MIXUP, PROBABILITY, SWITCH, Label, mixed_by_hand
from tiny_net import NAME, TinyNet, tiny_net
from torch import Tensor, nn

from largebatch import load_recipe, run
from largebatch.optional import require_timm
from largebatch.recipe.recipe import Recipe

require_timm()
from timm.optim import create_optimizer_v2  # noqa: E402 -- timm needs torchvision's operators

Case = Literal["bce and AdamW", "cross-entropy and SGD"]
CASES: tuple[Case, ...] = ("bce and AdamW", "cross-entropy and SGD")
COUNTS = (39, 20, 11)
"""Training images of each class: a block of 64 and a few more."""

GLOBAL_BATCH, SPAN = 96, 4
MIXED, STEPS, CLEAN = 2, 3, 1
"""Updates on mixed images, those on augmented ones, and then on clean ones."""

SIZE = 12
CLASSES = len(COUNTS)
PEAK, DECAY, WEIGHT_DECAY = 0.05, 0.6, 0.1
SMOOTHING, THRESHOLD = 0.1, 0.25

SETTINGS: dict[Case, Settings] = {
    "bce and AdamW": Settings(
        seed=5,
        size=SIZE,
        area=(0.4, 0.9),
        translate=1,
        augment="rand_augment",
        erased=0.5,
        fill="noise",
        count=2,
        repeats=3,
    ),
    "cross-entropy and SGD": Settings(
        seed=6,
        size=SIZE,
        area=(0.4, 0.9),
        translate=2,
        augment="trivial_augment",
        erased=0.7,
        fill="constant",
        count=1,
        repeats=1,
    ),
}
LOSSES: dict[Case, str] = {
    "bce and AdamW": (
        f"{{kind: bce, label_smoothing: {SMOOTHING}, target_threshold: {THRESHOLD}, classes: sum}}"
    ),
    "cross-entropy and SGD": f"{{label_smoothing: {SMOOTHING}, class_weights: balanced}}",
}
LIMITS: dict[Case, float] = {"bce and AdamW": 0.58, "cross-entropy and SGD": 0.28}
"""Norms that clip some updates, and others not."""

OPTIMIZERS: dict[Case, str] = {
    "bce and AdamW": "kind: adamw",
    "cross-entropy and SGD": "kind: sgd, momentum: 0.9",
}


@dataclass(frozen=True, slots=True)
class Part:
    """Updates up to `until` on these workers, with this accumulation."""

    workers: int
    accumulation: int
    until: int = STEPS + CLEAN
    horovod: bool = False


def write_images(root: Path) -> None:
    """Write small images of unequal classes."""
    generator = np.random.default_rng(0)
    for split, counts in (("train", COUNTS), ("val", (2, 2, 2))):
        for label, count in enumerate(counts):
            folder = root / split / f"class {label}"
            folder.mkdir(parents=True)
            for number in range(count):
                height, width = generator.integers(14, 20, 2)
                pixels = generator.integers(0, 256, (height, width, 3)) // (1 + number % 3)
                pixels[: height // 2] = 60 * label + number
                Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{number:02d}.png")


def recipe_of(case: Case, *changes: str) -> Recipe:
    settings = SETTINGS[case]
    mix = f"mixup: {MIXUP}, cutmix: {CUTMIX}, probability: {PROBABILITY}, switch: {SWITCH}"
    optimizer = f"{OPTIMIZERS[case]}, weight_decay: {WEIGHT_DECAY}"
    limits = f"clip_norm: {LIMITS[case]}, layer_decay: {DECAY}"
    erase = f"probability: {settings.erased}, fill: {settings.fill}, count: {settings.count}"
    return load_recipe(
        "digits_96",
        [
            f"seed={settings.seed}",
            f"duration={{steps: {STEPS + CLEAN}}}",
            f"batch={{global_batch: {GLOBAL_BATCH}, bn_span: {SPAN}}}",
            "data.source=folder",
            f"data.classes={CLASSES}",
            f"data.train_samples={sum(COUNTS)}",
            "data.val_samples=6",
            f"data.image_size={SIZE}",
            "data.mean=[0.485, 0.456, 0.406]",
            "data.std=[0.229, 0.224, 0.225]",
            f"data.crop_area={[*settings.area]}",
            "data.flip=true",
            f"data.translate={settings.translate}",
            f"data.augment.kind={settings.augment}",
            f"data.erase={{{erase}}}",
            f"data.repeats={settings.repeats}",
            f"data.mix={{{mix}, until: {{steps: {MIXED}}}}}",
            f"model={{name: {NAME}}}",
            f"optimizer={{{optimizer}, {limits}}}",
            f"schedule={{peak_lr: {PEAK}, warmup: null, decay: {{kind: constant}}}}",
            f"loss={LOSSES[case]}",
            f"polish={{clean: {{steps: {CLEAN}}}}}",
            "evaluation={}",
            "execution={decoder: torchvision, cache: none}",
            *changes,
        ],
    )


def train(case: Case, part: Part, images: Path, out: Path) -> None:
    """Train until the end of a part on the workers that this is started on."""
    size = GLOBAL_BATCH // part.workers // part.accumulation
    run(
        recipe_of(case, f"execution.device_batch={size}"),
        data=images,
        out=out,
        max_steps=part.until,
        resume="auto",
        report=False,
    )


def updates_by_hand(case: Case, root: Path) -> tuple[list[Tensor], list[list[Label]]]:
    """Return the images of all updates, mixed and clean, and what they show."""
    settings = SETTINGS[case]
    paths = sorted(root.glob("train/*/*"))
    labels = [int(path.parent.name[-1]) for path in paths]
    pictures = [Image.open(path).convert("RGB") for path in paths]
    batches = []
    shown = []
    for step in range(STEPS + CLEAN):
        is_clean = step >= STEPS
        repeats = 1 if is_clean else settings.repeats
        rows = []
        numbers = []
        for position in range(step * GLOBAL_BATCH, (step + 1) * GLOBAL_BATCH):
            sample = sample_at(
                position, seed=settings.seed, num_samples=len(paths), repeats=repeats
            )
            picture = pictures[sample]
            if is_clean:
                rows.append(clean_image(picture, SIZE))
            else:
                rows.append(training_image(picture, position, settings))
            numbers.append(labels[sample])
        images = torch.from_numpy(np.stack(rows))
        if step < MIXED:
            images, of_step = mixed_by_hand(
                images,
                torch.tensor(numbers),
                first=step * GLOBAL_BATCH,
                seed=settings.seed,
                dtype=torch.float32,
            )
        else:
            of_step = [Label(1.0, number, number) for number in numbers]
        batches.append(images)
        shown.append(of_step)
    return batches, shown


def losses_of(case: Case, logits: Tensor, shown: Sequence[Label]) -> Tensor:
    """Return the loss of each image."""
    own = torch.tensor([label.own for label in shown])
    partners = torch.tensor([label.partners for label in shown])
    # In float32, as the labels of a run. Two images of one class have one number, which is the sum.
    shares = torch.tensor([label.share for label in shown])
    others = 1 - shares
    is_one_class = own == partners
    shares = torch.where(is_one_class, shares + others, shares)
    others = torch.where(is_one_class, 0, others)
    if case == "bce and AdamW":
        targets = torch.zeros(len(shown), CLASSES)
        rows = torch.arange(len(shown))
        targets[rows, own] += shares
        targets[rows, partners] += others
        soft = (1 - SMOOTHING) * targets.double() + SMOOTHING / CLASSES
        hard = (soft > THRESHOLD).double()
        return -(hard * F.logsigmoid(logits) + (1 - hard) * F.logsigmoid(-logits)).sum(1)
    inverse = 1 / torch.tensor(COUNTS, dtype=torch.float64)
    weights = inverse * sum(COUNTS) / CLASSES
    both = []
    for labels in (own, partners):
        losses = F.cross_entropy(logits, labels, label_smoothing=SMOOTHING, reduction="none")
        both.append(weights[labels] * losses)
    return shares.double() * both[0] + others.double() * both[1]


def reference_optimizer(case: Case, model: nn.Module) -> torch.optim.Optimizer:
    """Build timm's, with its groups of layers."""
    name = "adamw" if case == "bce and AdamW" else "momentum"
    words: dict[str, Any] = {"lr": PEAK, "weight_decay": WEIGHT_DECAY, "layer_decay": DECAY}
    optimizer: torch.optim.Optimizer = create_optimizer_v2(model, name, momentum=0.9, **words)
    for group in optimizer.param_groups:
        group["lr"] = PEAK * group["lr_scale"]
    return optimizer


@dataclass(frozen=True, slots=True)
class Trained:
    """Losses of the updates, norms of their gradients before clipping, and the last weights."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]


def plain_run(case: Case, root: Path) -> Trained:
    """Train in plain PyTorch: the sum over all spans of an update, clipped, then an update."""
    model: TinyNet = tiny_net(SETTINGS[case].seed, num_classes=CLASSES)
    optimizer = reference_optimizer(case, model)
    model.train()
    losses = []
    norms = []
    for images, shown in zip(*updates_by_hand(case, root), strict=True):
        optimizer.zero_grad()
        before = {name: buffer.clone() for name, buffer in model.named_buffers()}
        after = []
        total = 0.0
        for first in range(0, GLOBAL_BATCH, SPAN):
            for name, buffer in model.named_buffers():
                buffer.copy_(before[name])
            span = slice(first, first + SPAN)
            loss = losses_of(case, model(images[span]), shown[span]).sum() / GLOBAL_BATCH
            loss.backward()
            total += loss.item()
            after.append({name: buffer.clone() for name, buffer in model.named_buffers()})
        for name, buffer in model.named_buffers():
            buffer.copy_(torch.stack([values[name] for values in after]).double().mean(0))
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), LIMITS[case]).item())
        optimizer.step()
        losses.append(total)
    return Trained(losses, norms, model.state_dict())
