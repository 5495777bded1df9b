"""Scripts that resume wrongly, after reports of it, and the finding that must name each.

Each is one of the plain scripts of the folder `resumed` with a few lines replaced. The reports are
issues and pull requests on GitHub.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent / "resumed"

Changes = Sequence[tuple[str, str]]
"""Lines of a script, each there once, and what replaces them."""


@dataclass(frozen=True, kw_only=True)
class Resumed:
    """A script that is run whole, in part, and resumed."""

    script: str = "by_epochs.py"
    changes: Changes = ()
    report: str = ""
    """Issue or pull request that describes the fault."""

    workers: int = 1
    rest_workers: int | None = None
    """Workers of the resumed part; None for as many as before."""

    @property
    def commands(self) -> dict[str, list[str]]:
        """Arguments of the script in each of its runs."""
        if self.script == "by_epochs.py":
            option, first, last = "--epochs", "1", "2"
        else:
            option, first, last = "--updates", "2", "4"
        whole = [option, last]
        return {"whole": whole, "first": [option, first], "rest": [*whole, "--resume", "last.pth"]}

    def write(self, folder: Path) -> Path:
        """Write the script into a folder and return its path."""
        text = (FOLDER / self.script).read_text(encoding="utf-8")
        for old, new in self.changes:
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        path = folder / self.script
        path.write_text(text, encoding="utf-8")
        return path


CORRECT = {
    "one_worker": Resumed(),
    "two_workers": Resumed(workers=2),
    "within_an_epoch": Resumed(script="by_updates.py"),
    "within_an_epoch_on_two_workers": Resumed(script="by_updates.py", workers=2),
    "two_workers_then_one": Resumed(script="by_updates.py", workers=2, rest_workers=1),
    "one_worker_then_two": Resumed(script="by_updates.py", rest_workers=2),
}

# The order of the data

DATA = {
    "generator_of_the_loader_lost": Resumed(
        changes=[('        generator.set_state(states["loader"])\n', "")],
        report="huggingface/accelerate#4195",
    ),
    "order_of_the_global_generator": Resumed(
        changes=[
            ("        generator=generator,\n", ""),
            ('        torch.set_rng_state(states["torch"])\n', ""),
        ],
        report="open-mmlab/mmdetection#7508",
    ),
    "order_begins_again": Resumed(
        script="by_updates.py",
        changes=[
            ('        sampler.position = checkpoint["samples"]\n', ""),
            ("        micro_batches = sampler.position // (DEVICE_BATCH * WORKERS)\n", ""),
        ],
        report="mosaicml/streaming#880",
    ),
    "epochs_count_from_the_resume": Resumed(
        workers=2,
        changes=[("sampler.set_epoch(epoch)", "sampler.set_epoch(epoch - first_epoch)")],
        report="modelscope/ms-swift#10050",
    ),
    "set_epoch_comes_after_the_first_batches": Resumed(
        workers=2,
        changes=[
            ("if sampler is not None:\n", "if sampler is not None and epoch != first_epoch:\n"),
        ],
        report="Lightning-AI/pytorch-lightning#21941",
    ),
    "set_epoch_is_never_called": Resumed(
        workers=2,
        changes=[
            ("        if sampler is not None:\n            sampler.set_epoch(epoch)\n", ""),
        ],
        report="Spijkervet/SimCLR#26",
    ),
    "offset_forgets_accumulation": Resumed(
        script="by_updates.py",
        changes=[
            ("micro_batches * DEVICE_BATCH * WORKERS,", "(updates % 3) * DEVICE_BATCH * WORKERS,"),
        ],
        report="kohya-ss/sd-scripts#2425",
    ),
    "last_batch_is_read_twice": Resumed(
        script="by_updates.py",
        changes=[
            ('checkpoint["samples"]\n', 'max(0, checkpoint["samples"] - BATCH)\n'),
        ],
        report="Red-Hat-AI-Innovation-Team/mini_trainer#79",
    ),
    "samples_are_read_twice_on_fewer_workers": Resumed(
        script="by_updates.py",
        workers=2,
        rest_workers=1,
        changes=[
            ('"samples": micro_batches * DEVICE_BATCH * WORKERS,', '"batches": micro_batches,'),
            ('checkpoint["samples"]', 'checkpoint["batches"] * DEVICE_BATCH * WORKERS'),
        ],
        report="huggingface/transformers#40245",
    ),
    "samples_are_lost_on_more_workers": Resumed(
        script="by_updates.py",
        rest_workers=2,
        changes=[
            ('"samples": micro_batches * DEVICE_BATCH * WORKERS,', '"batches": micro_batches,'),
            ('checkpoint["samples"]', 'checkpoint["batches"] * DEVICE_BATCH * WORKERS'),
            ("SAMPLES = 48", "SAMPLES = 96"),
        ],
        report="huggingface/transformers#40245",
    ),
    "order_is_drawn_from_the_restored_generator": Resumed(
        script="by_updates.py",
        changes=[
            (
                "        generator = torch.Generator().manual_seed(self.epoch)\n        order",
                "        order",
            ),
            (
                "torch.randperm(SAMPLES, generator=generator).tolist()",
                "torch.randperm(SAMPLES).tolist()",
            ),
            (
                '        scheduler.load_state_dict(checkpoint["scheduler"])\n',
                '        scheduler.load_state_dict(checkpoint["scheduler"])\n'
                '        torch.set_rng_state(checkpoint["random"])\n',
            ),
            (
                '                    "epoch": epoch,\n',
                '                    "epoch": epoch,\n                    "random": torch.get_rng_state(),\n',
            ),
        ],
        report="wyim-pgl/transgenic#59",
    ),
    "workers_of_the_loader_are_seeded_alike": Resumed(
        changes=[
            (
                "        num_workers=1,\n",
                "        num_workers=1,\n        persistent_workers=True,\n"
                "        worker_init_fn=torch.manual_seed,\n",
            ),
        ],
        report="fangchangma/sparse-to-dense.pytorch#19",
    ),
}

# Random numbers of the training process

RANDOM = {
    "dropout_begins_again": Resumed(
        changes=[('        torch.set_rng_state(states["torch"])\n', "")],
        report="vllm-project/speculators#1026",
    ),
    "numpy_generator_lost": Resumed(
        changes=[('        np.random.set_state(states["numpy"])\n', "")],
        report="redai-studio/Relax#317",
    ),
    "seed_is_set_after_the_load": Resumed(
        changes=[
            (
                '        generator.set_state(states["loader"])\n',
                '        generator.set_state(states["loader"])\n'
                "        for seed in (random.seed, np.random.seed, torch.manual_seed):\n"
                "            seed(RANK)\n",
            ),
        ],
        report="modelscope/ms-swift#9935",
    ),
    "random_state_of_one_worker_for_all": Resumed(
        workers=2,
        changes=[('torch.load(f"random-{RANK}.pth",', 'torch.load("random-0.pth",')],
        report="radixark/miles#3187",
    ),
}

# The optimizer and its rates

OPTIMIZER = {
    "optimizer_not_saved": Resumed(
        changes=[
            ('        optimizer.load_state_dict(checkpoint["optimizer"])\n', ""),
            (
                '        scheduler.load_state_dict(checkpoint["scheduler"])\n',
                '        scheduler.load_state_dict(checkpoint["scheduler"])\n'
                '        optimizer.param_groups[0]["lr"] = scheduler.get_last_lr()[0]\n',
            ),
            ('                "optimizer": optimizer.state_dict(),\n', ""),
        ],
        report="EvolvingLMMs-Lab/OneVision-Encoder#65",
    ),
    "momentum_lost_by_new_groups": Resumed(
        changes=[
            (
                "    if WORKERS > 1:\n        parallel = ",
                "    if args.resume:\n"
                "        matrices = [it for it in parameters if it.ndim > 1]\n"
                "        vectors = [it for it in parameters if it.ndim == 1]\n"
                '        groups = [optimizer.param_groups[0] | {"params": it} for it in (matrices, vectors)]\n'
                "        optimizer.param_groups[:] = groups\n"
                "        optimizer.state.clear()\n"
                "        scheduler.base_lrs *= 2\n"
                "        scheduler.lr_lambdas *= 2\n"
                "    if WORKERS > 1:\n        parallel = ",
            ),
        ],
        report="facebookresearch/suncet#36",
    ),
    "momentum_of_another_tensor": Resumed(
        changes=[
            (
                "    parameters = list(model.parameters())\n",
                "    parameters = list(model.parameters())\n"
                "    if args.resume:\n"
                "        parameters[4:8] = parameters[6:8] + parameters[4:6]\n",
            ),
        ],
        report="pytorch/pytorch#6031",
    ),
    "scheduler_is_stepped_once_too_often": Resumed(
        changes=[
            (
                '        scheduler.load_state_dict(checkpoint["scheduler"])\n',
                '        scheduler.load_state_dict(checkpoint["scheduler"])\n'
                "        scheduler.step()\n",
            ),
        ],
        report="pytorch/vision#1628",
    ),
    "scheduler_is_saved_before_its_step": Resumed(
        script="by_updates.py",
        changes=[
            (
                "            scheduler.step()\n            updates += 1\n",
                "            updates += 1\n",
            ),
            (
                '                torch.save(checkpoint, "last.pth")\n',
                '                torch.save(checkpoint, "last.pth")\n            scheduler.step()\n',
            ),
        ],
        report="Lightning-AI/pytorch-lightning#1772",
    ),
    "warm_up_begins_again": Resumed(
        changes=[('        scheduler.load_state_dict(checkpoint["scheduler"])\n', "")],
        report="aqlaboratory/openfold#181",
    ),
    "scheduler_is_rebuilt_after_the_warm_up": Resumed(
        changes=[
            (
                '        scheduler.load_state_dict(checkpoint["scheduler"])\n',
                "        scheduler = LambdaLR(optimizer, lambda update: rate(update + WARM_UP))\n",
            ),
        ],
        report="victoresque/pytorch-template#68",
    ),
    "schedule_follows_the_epochs_of_the_command": Resumed(
        changes=[
            (
                "    data = Noisy(seed=0)\n",
                "    global UPDATES\n    UPDATES = 3 * args.epochs\n    data = Noisy(seed=0)\n",
            ),
        ],
        report="mlfoundations/open_clip#413",
    ),
    "loss_scale_lost": Resumed(
        changes=[('        scaler.load_state_dict(checkpoint["scaler"])\n', "")],
        report="huggingface/transformers#11663",
    ),
}

# The model, its statistics and its average

MODEL = {
    "average_not_saved": Resumed(
        changes=[('        average.load_state_dict(checkpoint["average"])\n', "")],
        report="ai2cm/ace#349",
    ),
    "average_begins_with_the_resumed_weights": Resumed(
        changes=[
            (
                '        average.load_state_dict(checkpoint["average"])\n',
                "        average.module.load_state_dict(model.state_dict())\n",
            ),
        ],
        report="ultralytics/yolov5#310",
    ),
    "updates_of_the_average_not_saved": Resumed(
        changes=[
            (
                'average.load_state_dict(checkpoint["average"])',
                'average.module.load_state_dict(checkpoint["average"])',
            ),
            ('"average": average.state_dict()', '"average": average.module.state_dict()'),
        ],
        report="m2lines/Samudra#282",
    ),
    "model_begins_with_the_average": Resumed(
        changes=[
            ('        model.load_state_dict(checkpoint["model"])\n', ""),
            (
                '        average.load_state_dict(checkpoint["average"])\n',
                '        average.load_state_dict(checkpoint["average"])\n'
                "        model.load_state_dict(average.module.state_dict())\n",
            ),
        ],
        report="Megvii-BaseDetection/YOLOX#1318",
    ),
    "buffers_are_not_saved": Resumed(
        changes=[
            ('"model": model.state_dict(),', '"model": dict(model.named_parameters()),'),
            (
                'model.load_state_dict(checkpoint["model"])',
                'model.load_state_dict(checkpoint["model"], strict=False)',
            ),
        ],
        report="TengdaHan/DPC#10",
    ),
    "buffers_are_dropped_by_a_prefix": Resumed(
        workers=2,
        changes=[
            (
                'model.load_state_dict(checkpoint["model"])',
                'model.load_state_dict({key.removeprefix("module."): value for key, value in checkpoint["model"].items()'
                ' if not key.startswith("module.1.running")}, strict=False)',
            ),
            ('"model": model.state_dict(),', '"model": parallel.state_dict(),'),
        ],
        report="TengdaHan/DPC#10",
    ),
    "compiled_prefix_is_not_removed": Resumed(
        changes=[
            (
                'model.load_state_dict(checkpoint["model"])',
                'model.load_state_dict(checkpoint["model"], strict=False)',
            ),
            (
                "    parallel: Callable[[Tensor], Tensor] = model\n",
                '    parallel = torch.compile(model, backend="eager")\n',
            ),
            ('"model": model.state_dict(),', '"model": parallel.state_dict(),'),
        ],
        report="huggingface/pytorch-image-models#2003",
    ),
    "weights_are_saved_in_half_precision": Resumed(
        changes=[
            (
                '"model": model.state_dict(),',
                '"model": {key: value.half() for key, value in model.state_dict().items()},',
            ),
        ],
        report="NVIDIA/apex#42",
    ),
    "best_metric_lost": Resumed(
        changes=[('        best = checkpoint["best"]\n', "")],
        report="OpenRLHF/OpenRLHF#1333",
    ),
}

FAULTS = DATA | RANDOM | OPTIMIZER | MODEL
