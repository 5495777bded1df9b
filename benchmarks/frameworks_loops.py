"""The loops of other frameworks for frameworks.py, each as its own script or Trainer has it."""

import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer
from torch.optim.lr_scheduler import (
    ConstantLR,
    CosineAnnealingLR,
    LinearLR,
    LRScheduler,
    MultiStepLR,
    SequentialLR,
)
from torch.utils.data import DataLoader, TensorDataset

from largebatch.optional import require_torchvision

MOMENTUM = 0.9
GAMMA = 0.1
"""Factor of the steps."""

WARMUP_START = 0.01
"""torchvision's --lr-warmup-decay."""

TIMM_WARMUP_LR, TIMM_MIN_LR = 1e-4, 1e-6


@dataclass(frozen=True, slots=True)
class Setting:
    """What a user writes down for any framework."""

    batch: int
    optimizer: Literal["sgd", "adam"]
    rate: float
    weight_decay: float = 0.0
    decay: Literal["constant", "steps", "cosine"] = "constant"
    at: tuple[float, ...] = ()
    """Fractions of the run at which the rate falls to a tenth."""

    warmup: int = 0
    """Epochs of warm-up."""

    smoothing: float = 0.0


@dataclass(frozen=True, slots=True)
class Data:
    """Images and labels in memory."""

    epochs: int
    train_images: Tensor
    train_labels: Tensor
    val_images: Tensor
    val_labels: Tensor

    def batches(self, setting: Setting, *, drop_last: bool = False) -> DataLoader[Any]:
        """Return shuffled batches of the training images."""
        images = TensorDataset(self.train_images, self.train_labels)
        return DataLoader(images, batch_size=setting.batch, shuffle=True, drop_last=drop_last)


Loop = Callable[[nn.Module, Data, Setting], None]
"""Train a model in place; raise FloatingPointError once the loss is not finite."""


def train_torch(model: nn.Module, data: Data, setting: Setting) -> None:
    """Train as torchvision's references/classification/train.py."""
    optimizer = _optimizer(model, setting)
    scheduler = _scheduler(optimizer, setting, data.epochs)
    criterion = nn.CrossEntropyLoss(label_smoothing=setting.smoothing)
    for _ in range(data.epochs):
        _epoch(model, data.batches(setting), criterion, optimizer)
        scheduler.step()


def _epoch(
    model: nn.Module, batches: DataLoader[Any], criterion: nn.Module, optimizer: Optimizer
) -> None:
    model.train()
    for images, labels in batches:
        loss = criterion(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    _require_finite(loss)


def _require_finite(loss: Tensor) -> None:
    if not loss.isfinite():
        raise FloatingPointError("the loss is not finite")


def _optimizer(model: nn.Module, setting: Setting) -> Optimizer:
    decay = setting.weight_decay
    if setting.optimizer == "adam":
        return Adam(model.parameters(), lr=setting.rate, weight_decay=decay)
    return SGD(model.parameters(), lr=setting.rate, momentum=MOMENTUM, weight_decay=decay)


def _scheduler(optimizer: Optimizer, setting: Setting, epochs: int) -> LRScheduler:
    """Return a scheduler that is stepped once an epoch."""
    left = epochs - setting.warmup
    main: LRScheduler
    match setting.decay:
        case "constant":
            main = ConstantLR(optimizer, factor=1.0)
        case "steps":
            main = MultiStepLR(optimizer, [round(it * epochs) for it in setting.at], gamma=GAMMA)
        case "cosine":
            main = CosineAnnealingLR(optimizer, T_max=left)
    if not setting.warmup:
        return main
    warmup = LinearLR(optimizer, start_factor=WARMUP_START, total_iters=setting.warmup)
    return SequentialLR(optimizer, [warmup, main], milestones=[setting.warmup])


def train_timm(model: nn.Module, data: Data, setting: Setting) -> None:
    """Train as timm's train.py."""
    require_torchvision()
    from timm.loss import LabelSmoothingCrossEntropy
    from timm.optim import create_optimizer_v2
    from timm.scheduler import create_scheduler_v2

    optimizer = create_optimizer_v2(
        model, opt=setting.optimizer, lr=setting.rate, weight_decay=setting.weight_decay,
        momentum=MOMENTUM,
    )  # fmt: skip
    is_cosine = setting.decay == "cosine"
    scheduler, _ = create_scheduler_v2(
        optimizer, sched="cosine" if is_cosine else "multistep", num_epochs=data.epochs,
        decay_milestones=[round(it * data.epochs) for it in setting.at], decay_rate=GAMMA,
        warmup_epochs=setting.warmup, warmup_lr=TIMM_WARMUP_LR, min_lr=TIMM_MIN_LR,
    )  # fmt: skip
    assert scheduler is not None
    smooth = LabelSmoothingCrossEntropy(setting.smoothing)
    criterion: nn.Module = smooth if setting.smoothing else nn.CrossEntropyLoss()
    for epoch in range(data.epochs):
        _epoch(model, data.batches(setting, drop_last=True), criterion, optimizer)
        scheduler.step(epoch + 1)


def train_lightning(model: nn.Module, data: Data, setting: Setting) -> None:
    """Train with Lightning's Trainer."""
    require_torchvision()
    from lightning.pytorch import LightningModule, Trainer  # type: ignore[import-not-found, unused-ignore]

    class Classifier(LightningModule):  # type: ignore[misc, unused-ignore]
        """The module of Lightning's image classifier."""

        def __init__(self) -> None:
            super().__init__()
            self.model = model
            self.criterion = nn.CrossEntropyLoss(label_smoothing=setting.smoothing)

        def training_step(self, batch: list[Tensor], _: int) -> Tensor:
            images, labels = batch
            loss: Tensor = self.criterion(self.model(images), labels)
            _require_finite(loss)
            return loss

        def configure_optimizers(self) -> Any:  # noqa: ANN401 -- Lightning's type
            optimizer = _optimizer(self, setting)
            scheduler = _scheduler(optimizer, setting, data.epochs)
            return {"optimizer": optimizer, "lr_scheduler": scheduler}

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # one worker loads the data, on purpose
        trainer = Trainer(
            accelerator="cpu", devices=1, max_epochs=data.epochs, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(Classifier(), data.batches(setting))
