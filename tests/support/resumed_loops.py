"""Scripts that resume wrongly, after reports of it, and the finding that must name each.

Each is one of the plain scripts of the folder `resumed` with a few lines replaced. The reports are
issues and pull requests on GitHub.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from largebatch.audit.findings import Check

FOLDER = Path(__file__).parent / "resumed"

RUNS = {
    "by_accelerate.py": ("--epochs", 1, 2, "state"),
    "by_class.py": ("--epochs", 1, 2, "trainer.pt"),
    "by_epochs.py": ("--epochs", 1, 2, "last.pth"),
    "by_functions.py": ("--epochs", 1, 2, "state.pt"),
    "by_lamb.py": ("--epochs", 1, 2, "lamb.pt"),
    "by_lightning.py": ("--epochs", 1, 2, "last.ckpt"),
    "by_plateau.py": ("--epochs", 2, 4, "plateau.pt"),
    "by_stream.py": ("--updates", 2, 4, "stream.pt"),
    "by_timm.py": ("--epochs", 1, 2, "checkpoint-0.pth.tar"),
    "by_trainer.py": ("--updates", 2, 4, "checkpoint-2"),
    "by_two_optimizers.py": ("--epochs", 1, 2, "both.pt"),
    "by_updates.py": ("--updates", 2, 4, "last.pth"),
    "by_windows.py": ("--updates", 5, 8, "half.pt"),
}
"""Option with the length of each script, length of its first part and of the whole, checkpoint."""

Change = tuple[str, str]
"""A text that a script has once, and what replaces it."""


def without(text: str) -> Change:
    return text, ""


def then(text: str, *lines: str) -> Change:
    """Add lines after a line."""
    return text, "\n".join([text, *lines])


@dataclass(frozen=True, kw_only=True)
class Resumed:
    """A script that is run whole, in part, and resumed."""

    script: str = "by_epochs.py"
    changes: Sequence[Change] = ()
    report: str = ""
    """Issue or pull request that describes the fault."""

    check: Check | None = None
    """The check that must name the fault; None for a correct script."""

    figure: float = 0.0
    """Its figure."""

    workers: int = 1
    rest_workers: int | None = None
    """Workers of the resumed part; None for as many as before."""

    @property
    def arguments(self) -> dict[str, str]:
        """Arguments of the script in each of its runs."""
        option, first, whole, checkpoint = RUNS[self.script]
        return {
            "whole": f"{option} {whole}",
            "first": f"{option} {first}",
            "rest": f"{option} {whole} --resume {checkpoint}",
        }

    def write(self, folder: Path) -> Path:
        """Write the script into a folder and return its path."""
        text = (FOLDER / self.script).read_text(encoding="utf-8")
        for old, new in self.changes:
            assert text.count(old) == 1, old
            before = text[: text.index(old)].rpartition("\n")[2]
            indent = before[: len(before) - len(before.lstrip())]
            text = text.replace(old, new.replace("\n", f"\n{indent}"))
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
    "accelerate": Resumed(script="by_accelerate.py"),
    "lightning": Resumed(script="by_lightning.py"),
    "timm": Resumed(script="by_timm.py"),
    "transformers": Resumed(script="by_trainer.py"),
    "class": Resumed(script="by_class.py"),
    "functions": Resumed(script="by_functions.py"),
    "stream": Resumed(script="by_stream.py"),
    "half_a_window": Resumed(script="by_windows.py"),
    "own_optimizer": Resumed(script="by_lamb.py"),
    "two_optimizers": Resumed(script="by_two_optimizers.py"),
    "plateau": Resumed(script="by_plateau.py"),
}

_LOAD_MODEL = 'model.load_state_dict(checkpoint["model"])'
_LOAD_OPTIMIZER = 'optimizer.load_state_dict(checkpoint["optimizer"])'
_LOAD_SCHEDULER = 'scheduler.load_state_dict(checkpoint["scheduler"])'
_LOAD_AVERAGE = 'average.load_state_dict(checkpoint["average"])'
_LOAD_GENERATOR = 'generator.set_state(states["loader"])'
_LOAD_POSITION = 'sampler.position = checkpoint["samples"]'
_SAVE_MODEL = '"model": model.state_dict(),'
_SAVE_POSITION = '"samples": micro_batches * DEVICE_BATCH * WORKERS,'

# The order of the data

DATA = {
    "generator_of_the_loader_lost": Resumed(
        changes=[without(_LOAD_GENERATOR)],
        report="huggingface/accelerate#4195",
        check="epoch order",
        figure=48.0,
    ),
    "order_of_the_global_generator": Resumed(
        changes=[
            without("generator=generator,"),
            without('torch.set_rng_state(states["torch"])'),
        ],
        report="open-mmlab/mmdetection#7508",
        check="epoch order",
        figure=48.0,
    ),
    "order_begins_again": Resumed(
        script="by_updates.py",
        changes=[
            without(_LOAD_POSITION),
            without("micro_batches = sampler.position // (DEVICE_BATCH * WORKERS)"),
        ],
        report="mosaicml/streaming#880",
        check="samples",
        figure=32.0,
    ),
    "epochs_count_from_the_resume": Resumed(
        workers=2,
        changes=[("sampler.set_epoch(epoch)", "sampler.set_epoch(epoch - first_epoch)")],
        report="modelscope/ms-swift#10050",
        check="epoch order",
        figure=48.0,
    ),
    "set_epoch_is_not_called_after_the_resume": Resumed(
        workers=2,
        changes=[
            ("if sampler is not None:", "if sampler is not None and epoch != first_epoch:"),
        ],
        report="Lightning-AI/pytorch-lightning#21941",
        check="epoch order",
        figure=48.0,
    ),
    "set_epoch_is_never_called": Resumed(
        workers=2,
        changes=[("sampler.set_epoch(epoch)", "pass")],
        report="Spijkervet/SimCLR#26",
        check="epoch order",
        figure=2.0,
    ),
    "offset_forgets_accumulation": Resumed(
        script="by_updates.py",
        changes=[(_SAVE_POSITION, '"samples": updates * DEVICE_BATCH * WORKERS,')],
        report="kohya-ss/sd-scripts#2425",
        check="samples",
        figure=24.0,
    ),
    "last_batch_is_read_twice": Resumed(
        script="by_updates.py",
        changes=[(_LOAD_POSITION, f"{_LOAD_POSITION} - BATCH")],
        report="Red-Hat-AI-Innovation-Team/mini_trainer#79",
        check="samples",
        figure=16.0,
    ),
    "samples_are_read_twice_on_fewer_workers": Resumed(
        script="by_updates.py",
        workers=2,
        rest_workers=1,
        changes=[
            (_SAVE_POSITION, '"batches": micro_batches,'),
            ('checkpoint["samples"]', 'checkpoint["batches"] * DEVICE_BATCH * WORKERS'),
        ],
        report="huggingface/transformers#40245",
        check="samples",
        figure=16.0,
    ),
    "samples_are_lost_on_more_workers": Resumed(
        script="by_updates.py",
        rest_workers=2,
        changes=[
            ("SAMPLES = 48", "SAMPLES = 96"),
            (_SAVE_POSITION, '"batches": micro_batches,'),
            ('checkpoint["samples"]', 'checkpoint["batches"] * DEVICE_BATCH * WORKERS'),
        ],
        report="huggingface/transformers#40245",
        check="samples",
        figure=32.0,
    ),
    "order_is_drawn_from_the_restored_generator": Resumed(
        script="by_updates.py",
        changes=[
            without("generator = torch.Generator().manual_seed(self.epoch)"),
            ("torch.randperm(SAMPLES, generator=generator)", "torch.randperm(SAMPLES)"),
            then(_LOAD_SCHEDULER, 'torch.set_rng_state(checkpoint["random"])'),
            then('"epoch": epoch,', '"random": torch.get_rng_state(),'),
        ],
        report="wyim-pgl/transgenic#59",
        check="samples",
        figure=10.0,
    ),
    "workers_of_the_loader_are_seeded_alike": Resumed(
        changes=[
            without("shuffle=sampler is None,"),
            ("sampler=sampler,", "sampler=sampler or RandomSampler(data, generator=generator),"),
            then(
                "num_workers=1,",
                "persistent_workers=True,",
                "worker_init_fn=torch.manual_seed,",
            ),
            ("generator=generator,\n    )", "generator=torch.Generator(),\n)"),
            ("Dataset, DistributedSampler", "Dataset, DistributedSampler, RandomSampler"),
        ],
        report="fangchangma/sparse-to-dense.pytorch#19",
        check="augmentation",
        figure=1.0,
    ),
    "persistent_workers_draw_a_seed_once": Resumed(
        changes=[then("num_workers=1,", "persistent_workers=True,")],
        report="huggingface/datasets#7447",
        check="epoch order",
        figure=48.0,
    ),
}

# Random numbers of the training process

RANDOM = {
    "dropout_begins_again": Resumed(
        changes=[without('torch.set_rng_state(states["torch"])')],
        report="vllm-project/speculators#1026",
        check="dropout",
        figure=1.0,
    ),
    "numpy_generator_lost": Resumed(
        changes=[without('np.random.set_state(states["numpy"])')],
        report="redai-studio/Relax#317",
        check="random numbers",
        figure=1.0,
    ),
    "seed_is_set_after_the_load": Resumed(
        changes=[
            then(
                _LOAD_GENERATOR,
                "for seed in (random.seed, np.random.seed, torch.manual_seed):",
                "    seed(RANK)",
            )
        ],
        report="modelscope/ms-swift#9935",
        check="dropout",
        figure=1.0,
    ),
    "random_state_of_one_worker_for_all": Resumed(
        workers=2,
        changes=[('torch.load(f"random-{RANK}.pth",', 'torch.load("random-0.pth",')],
        report="radixark/miles#3187",
        check="random numbers",
        figure=1.0,
    ),
}

# The optimizer and its rates

OPTIMIZER = {
    "optimizer_not_saved": Resumed(
        changes=[
            without(_LOAD_OPTIMIZER),
            then(_LOAD_SCHEDULER, 'optimizer.param_groups[0]["lr"] = scheduler.get_last_lr()[0]'),
            without('"optimizer": optimizer.state_dict(),'),
        ],
        report="EvolvingLMMs-Lab/OneVision-Encoder#65",
        check="optimizer state",
        figure=1.0,
    ),
    "momentum_lost_by_new_groups": Resumed(
        changes=[
            then(
                _LOAD_SCHEDULER,
                "group = optimizer.param_groups.pop()",
                "optimizer.state.clear()",
                'optimizer.add_param_group(group | {"params": parameters[:4]})',
                'optimizer.add_param_group(group | {"params": parameters[4:]})',
                "scheduler.base_lrs *= 2",
                "scheduler.lr_lambdas *= 2",
            ),
        ],
        report="facebookresearch/suncet#36",
        check="optimizer state",
        figure=1.0,
    ),
    "momentum_of_another_tensor": Resumed(
        changes=[
            then(
                "parameters = list(model.parameters())",
                "if args.resume:",
                "    parameters[4:8] = parameters[6:8] + parameters[4:6]",
            )
        ],
        report="pytorch/pytorch#6031",
        check="optimizer state",
        figure=0.4,
    ),
    "scheduler_is_stepped_once_too_often": Resumed(
        changes=[then(_LOAD_SCHEDULER, "scheduler.step()")],
        report="pytorch/vision#1628",
        check="learning rates",
        figure=0.072801,
    ),
    "scheduler_is_saved_before_its_step": Resumed(
        script="by_updates.py",
        changes=[
            ("scheduler.step()\n            updates += 1", "updates += 1"),
            ("if updates == args.updates:", "scheduler.step()\nif updates == args.updates:"),
        ],
        report="Lightning-AI/pytorch-lightning#1772",
        check="learning rates",
        figure=0.053536,
    ),
    "warm_up_begins_again": Resumed(
        changes=[without(_LOAD_SCHEDULER)],
        report="aqlaboratory/openfold#181",
        check="learning rates",
        figure=0.105573,
    ),
    "scheduler_is_rebuilt_after_the_warm_up": Resumed(
        changes=[
            (_LOAD_SCHEDULER, "scheduler = LambdaLR(optimizer, lambda it: rate(it + WARM_UP))"),
        ],
        report="victoresque/pytorch-template#68",
        check="learning rates",
        figure=0.025086,
    ),
    "schedule_follows_the_epochs_of_the_command": Resumed(
        changes=[
            then("args = parser.parse_args()", "global UPDATES", "UPDATES = 3 * args.epochs"),
        ],
        report="mlfoundations/open_clip#413",
        check="learning rates",
        figure=1.0,
    ),
    "loss_scale_lost": Resumed(
        changes=[without('scaler.load_state_dict(checkpoint["scaler"])')],
        report="huggingface/transformers#11663",
        check="loss scale",
        figure=0.5,
    ),
}

# The model, its statistics and its average

MODEL = {
    "average_not_saved": Resumed(
        changes=[without(_LOAD_AVERAGE)],
        report="ai2cm/ace#349",
        check="averaged weights",
        figure=1.0,
    ),
    "average_begins_with_the_resumed_weights": Resumed(
        changes=[(_LOAD_AVERAGE, "average.module.load_state_dict(model.state_dict())")],
        report="ultralytics/yolov5#310",
        check="averaged weights",
        figure=1.0,
    ),
    "updates_of_the_average_not_saved": Resumed(
        changes=[
            (_LOAD_AVERAGE, 'average.module.load_state_dict(checkpoint["average"])'),
            ('"average": average.state_dict()', '"average": average.module.state_dict()'),
        ],
        report="m2lines/Samudra#282",
        check="averaged weights",
        figure=-3.0,
    ),
    "model_begins_with_the_average": Resumed(
        changes=[
            without(_LOAD_MODEL),
            then(_LOAD_AVERAGE, "model.load_state_dict(average.module.state_dict())"),
        ],
        report="Megvii-BaseDetection/YOLOX#1318",
        check="weights",
        figure=1.0,
    ),
    "buffers_are_not_saved": Resumed(
        changes=[
            (_SAVE_MODEL, '"model": dict(model.named_parameters()),'),
            (_LOAD_MODEL, 'model.load_state_dict(checkpoint["model"], strict=False)'),
        ],
        report="torch/nn#1165",
        check="buffers",
        figure=1.0,
    ),
    "buffers_are_dropped_by_a_prefix": Resumed(
        workers=2,
        changes=[
            (_SAVE_MODEL, '"model": parallel.state_dict(),'),
            (
                _LOAD_MODEL,
                """\
weights = dict(model.named_parameters())  # without "module."
state = {key: checkpoint["model"][f"module.{key}"] for key in weights}
model.load_state_dict(state, strict=False)""",
            ),
        ],
        report="TengdaHan/DPC#10",
        check="buffers",
        figure=1.0,
    ),
    "compiled_prefix_is_not_removed": Resumed(
        changes=[
            (
                "parallel: Callable[[Tensor], Tensor] = model",
                "parallel = torch.compile(model, backend='eager')",
            ),
            (_SAVE_MODEL, '"model": parallel.state_dict(),'),
            (_LOAD_MODEL, 'model.load_state_dict(checkpoint["model"], strict=False)'),
        ],
        report="huggingface/pytorch-image-models#2003",
        check="weights",
        figure=1.0,
    ),
    "weights_are_saved_in_half_precision": Resumed(
        changes=[
            (_SAVE_MODEL, '"model": {key: it.half() for key, it in model.state_dict().items()},'),
        ],
        report="NVIDIA/apex#42",
        check="weights",
        figure=0.00024,
    ),
    "best_metric_lost": Resumed(
        changes=[without('best = checkpoint["best"]')],
        report="OpenRLHF/OpenRLHF#1333",
        check="best checkpoint",
        figure=6.0,
    ),
}

# Scripts of other styles, written when the rules were: they were held back until these were run

HELD = {
    "count_of_updates_lost": Resumed(
        script="by_class.py",
        changes=[without('self.updates = state["updates"]')],
        report="NguyenJus/custom-sam-peft#308",
        check="learning rates",
        figure=3.0,
    ),
    "statistics_of_a_function_lost": Resumed(
        script="by_functions.py",
        changes=[without('statistics = state["statistics"]')],
        report="torch/nn#1165",
        check="buffers",
        figure=1,
    ),
    "content_of_the_shuffle_buffer_lost": Resumed(
        script="by_stream.py",
        changes=[without('self.buffer = list(state["buffer"])')],
        report="huggingface/datasets#7901",
        check="samples",
        figure=5.0,
    ),
    "gradients_of_half_a_window_lost": Resumed(
        script="by_windows.py",
        changes=[("weight.grad = gradient", "pass")],
        report="huggingface/transformers#22143",
        check="weights",
        figure=1.0,
    ),
    "bias_correction_begins_again": Resumed(
        script="by_lamb.py",
        changes=[
            ('{"lr": lr, "updates": 0})', '{"lr": lr})\nself.updates = 0'),
            ('group["updates"] += 1', "self.updates += 1"),
            ('0.9 ** group["updates"]', "0.9**self.updates"),
            ('0.99 ** group["updates"]', "0.99**self.updates"),
        ],
        report="facebookresearch/metaseq#3",
        check="optimizer state",
        figure=0.00324,
    ),
    "one_optimizer_gets_the_state_of_the_other": Resumed(
        script="by_two_optimizers.py",
        changes=[
            (
                "part.load_state_dict(state[name])",
                "part.load_state_dict(torch.load(args.resume)[name.replace('f_judge', 'f_maker')])",
            )
        ],
        check="optimizer state",
        figure=2 / 3,
    ),
    "two_optimizers_share_the_tensors_of_a_state": Resumed(
        script="by_two_optimizers.py",
        changes=[
            (
                "part.load_state_dict(state[name])",
                "part.load_state_dict(state[name.replace('f_judge', 'f_maker')])",
            )
        ],
        check="optimizer state",
        figure=1,
    ),
    "patience_begins_again": Resumed(
        script="by_plateau.py",
        changes=[without('scheduler.load_state_dict(state["scheduler"])')],
        report="facebookresearch/ParlAI#1812",
        check="learning rates",
        figure=1.0,
    ),
    "optimizer_updates_the_model_before_the_load": Resumed(
        script="by_plateau.py",
        changes=[
            without('model = state["model"]'),
            then('optimizer.load_state_dict(state["optimizer"])', 'model = state["model"]'),
        ],
        check="weights",
        figure=1.0,
    ),
}

FAULTS = DATA | RANDOM | OPTIMIZER | MODEL
