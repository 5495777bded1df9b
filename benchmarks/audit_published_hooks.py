"""Places in published training scripts where the audit is called; see audit_published.py.

Each function gets the path of a script and runs it. It replaces the script's function for one
epoch, or a method of the library that the script calls, by one that also audits.
"""

# ruff: noqa: ANN401 -- objects of scripts, whose packages may be missing

import importlib
import importlib.util
import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from largebatch.audit import Findings, audit
from largebatch.optional import require_torchvision

Hook = Callable[[Path], None]
FOUND: list[Findings] = []
"""Findings of the script that this process runs."""


def report(*args: Any, **words: Any) -> None:
    FOUND.append(audit(*args, **words))


def imported(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location("published_script", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["published_script"] = module  # data workers find its classes by this name
    spec.loader.exec_module(module)
    return module


def library(name: str) -> Any:
    return importlib.import_module(name)


def caller() -> dict[str, Any]:
    """Return the local variables of the script's function that called the replaced one."""
    frame: FrameType | None = sys._getframe(2)
    assert frame is not None
    return dict(frame.f_locals)


class AnyDevice(DistributedDataParallel):
    """DistributedDataParallel that ignores device_ids, which it refuses on a CPU."""

    def __init__(self, module: torch.nn.Module, device_ids: object = None, **words: Any) -> None:
        del device_ids
        super().__init__(module, **words)


def imagenet(path: Path) -> None:
    _imagenet(path, DistributedDataParallel)


def imagenet_as_it_is(path: Path) -> None:
    _imagenet(path, lambda model: model)


def _imagenet(path: Path, wrap: Callable[[Any], Any]) -> None:
    script = imported(path)
    train = script.train

    def audited(loader: Any, model: Any, *rest: Any) -> None:
        own, model = caller(), wrap(model)
        train(loader, model, *rest)
        report(
            model,
            loader,
            own["criterion"],
            own["optimizer"],
            lambda batch: train([batch], model, *rest),
            set_epoch=loader.sampler.set_epoch,
            val_loader=own["val_loader"],
            evaluate=lambda: script.validate(
                own["val_loader"], model, own["criterion"], own["args"]
            ),
        )

    script.train = audited
    script.main()


def torchvision_reference(path: Path) -> None:
    sys.path.insert(0, str(path.parent))
    script = imported(path)
    train = script.train_one_epoch

    def start(args: Any) -> None:
        dist.init_process_group("gloo")
        args.distributed, args.gpu = True, None
        args.rank, args.world_size = dist.get_rank(), dist.get_world_size()

    def reduce(value: Any) -> Tensor:
        total = torch.tensor(value)
        dist.all_reduce(total)
        return total

    def audited(model: Any, criterion: Any, optimizer: Any, loader: Any, *rest: Any) -> None:
        own = caller()
        train(model, criterion, optimizer, loader, *rest)

        def evaluate() -> float:
            figure: float = script.evaluate(
                model, criterion, own["data_loader_test"], device=own["device"]
            )
            return figure

        report(
            model,
            loader,
            criterion,
            optimizer,
            lambda batch: train(model, criterion, optimizer, [batch], *rest),
            set_epoch=own["train_sampler"].set_epoch,
            val_loader=own["data_loader_test"],
            evaluate=evaluate,
            averaged=own["model_ema"],
        )

    script.utils.init_distributed_mode, script.utils.reduce_across_processes = start, reduce
    script.train_one_epoch = audited
    with mock.patch.object(torch.nn.parallel, "DistributedDataParallel", AnyDevice):
        script.main(script.get_args_parser().parse_args())


def timm_train(path: Path) -> None:
    script = imported(path)
    train = script.train_one_epoch

    def audited(epoch: int, model: Any, loader: Any, *rest: Any, **words: Any) -> Any:
        own = caller()
        task, device = own["task"], own["device"]
        metrics = train(epoch, model, loader, *rest, **words)

        def evaluate() -> float:
            figure: float = script.validate(
                own["eval_model"], own["loader_eval"], own["validate_loss_fn"], own["args"], device
            )["top1"]
            return figure

        report(
            model,
            loader,
            own["train_loss_fn"],
            own["optimizer"],
            lambda batch: train(epoch, model, [batch], *rest, **words),
            set_epoch=lambda number: script._set_loader_epoch(loader, number),
            val_loader=own["loader_eval"],
            evaluate=evaluate,
            averaged=task.get_trainable_module(ema=True),
        )
        return metrics

    script.train_one_epoch = audited
    with mock.patch.object(torch.nn.parallel, "DistributedDataParallel", AnyDevice):
        script.main()


def accelerate_cv(path: Path) -> None:
    timm = library("timm")

    def small(_: str, *, pretrained: bool, num_classes: int) -> Any:
        assert pretrained  # its weights would be downloaded
        return timm.models.create_model("test_resnet", num_classes=num_classes)

    def forward(model: Any, batch: dict[str, Tensor], own: dict[str, Any]) -> tuple[Tensor, Tensor]:
        return model((batch["image"] - own["mean"]) / own["std"]), batch["label"]

    with mock.patch.object(timm, "create_model", small):
        _accelerate(path, forward)


def transformers_loop(path: Path) -> None:
    def forward(model: Any, batch: dict[str, Tensor], _: object) -> tuple[Tensor, Tensor]:
        return model(**batch).logits, batch["labels"]

    _prepare_transformers()
    _accelerate(path, forward)


def _accelerate(path: Path, forward: Callable[..., tuple[Tensor, Tensor]]) -> None:
    """Audit when a script has prepared its objects; its loop is written in one function."""
    os.environ["ACCELERATE_USE_CPU"] = "true"  # as `accelerate launch --cpu` does
    accelerate = library("accelerate")
    prepare = accelerate.Accelerator.prepare

    def audited(accelerator: Any, *parts: Any) -> Any:
        own, prepared = caller(), prepare(accelerator, *parts)
        model, optimizer, loader, val_loader, scheduler = prepared

        model.train()  # the first line of the script's epoch

        def step(batch: dict[str, Tensor]) -> None:
            with accelerator.accumulate(model):
                accelerator.backward(cross_entropy(*forward(model, batch, own)))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

        def evaluate() -> float:
            model.eval()
            hits = []
            for batch in val_loader:
                with torch.no_grad():
                    logits, labels = forward(model, batch, own)
                pair = accelerator.gather_for_metrics((logits.argmax(-1), labels))
                hits.append(pair[0] == pair[1])
            return float(torch.cat(hits).float().mean())

        report(
            model,
            loader,
            cross_entropy,
            optimizer,
            step,
            set_epoch=loader.set_epoch,
            val_loader=val_loader,
            evaluate=evaluate,
        )
        return prepared

    with mock.patch.object(accelerate.Accelerator, "prepare", audited):
        runpy.run_path(str(path), run_name="__main__")


def transformers_trainer(path: Path) -> None:
    _prepare_transformers()
    transformers = library("transformers")
    callback: Any = transformers.TrainerCallback

    class Audit(callback):  # type: ignore[misc]  # of a package that may be missing
        def __init__(self, trainer: Any) -> None:
            self.trainer = trainer

        def on_step_begin(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
            trainer = self.trainer
            optimizer = trainer.optimizer

            def step(batch: dict[str, Tensor]) -> None:
                trainer.training_step(trainer.model_wrapped, batch)
                trainer.accelerator.clip_grad_norm_(
                    trainer.model.parameters(), trainer.args.max_grad_norm
                )
                optimizer.step()
                optimizer.zero_grad()

            if state.global_step == 0:
                report(
                    trainer.model_wrapped,
                    trainer.callback_handler.train_dataloader,
                    cross_entropy,
                    optimizer,
                    step,
                    val_loader=trainer.get_eval_dataloader(),
                    evaluate=lambda: trainer.evaluate()["eval_accuracy"],
                )

    begin = transformers.Trainer.__init__

    def audited(trainer: Any, *args: Any, **words: Any) -> None:
        begin(trainer, *args, **words)
        trainer.add_callback(Audit(trainer))

    with mock.patch.object(transformers.Trainer, "__init__", audited):
        runpy.run_path(str(path), run_name="__main__")


class Hits:
    """Share of hits, in place of evaluate's accuracy, which is downloaded."""

    def __init__(self, *_: object, **__: object) -> None:
        self._hits: list[Tensor] = []

    def add_batch(self, predictions: Tensor, references: Tensor) -> None:
        """Add the predictions of a batch."""
        self._hits.append(torch.as_tensor(predictions) == torch.as_tensor(references))

    def compute(self, **words: Any) -> dict[str, float]:
        """Return the share of hits of these predictions, or of those that were added."""
        if words:
            self.add_batch(**words)
        accuracy = float(torch.cat(self._hits).float().mean())
        self._hits.clear()
        return {"accuracy": accuracy}


def _prepare_transformers() -> None:
    """Replace the package evaluate, which downloads its metrics."""
    sys.modules["evaluate"] = evaluate = ModuleType("evaluate")
    evaluate.load = Hits  # type: ignore[attr-defined]  # not known of a module


def write_model(folder: str) -> None:
    """Write a small ResNet and its image processor, as the scripts load pretrained ones."""
    require_torchvision()
    transformers = library("transformers")
    config = transformers.ResNetConfig(
        embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], layer_type="basic", num_labels=10
    )
    transformers.ResNetForImageClassification(config).save_pretrained(folder)
    transformers.ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(folder)


def lightning_imagenet(path: Path) -> None:
    module = library("lightning.pytorch").LightningModule

    def audited(self: Any, _: object, number: int) -> None:
        trainer = self.trainer
        optimizer, strategy = trainer.optimizers[0], trainer.strategy

        def step(batch: list[Tensor]) -> None:
            self._current_fx_name = "training_step"  # where the script may log
            optimizer.zero_grad()
            strategy.backward(strategy.training_step(batch, 0), optimizer)
            optimizer.step()

        if number == 0 and not FOUND:
            loader = trainer.train_dataloader
            report(
                self.model,
                loader,
                cross_entropy,
                optimizer,
                step,
                set_epoch=loader.sampler.set_epoch,
                val_loader=trainer.val_dataloaders,
            )

    with mock.patch.object(module, "on_train_batch_start", audited):
        runpy.run_path(str(path), run_name="__main__")
