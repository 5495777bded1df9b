"""Audit published training scripts, unmodified, on two CPU workers.

    python benchmarks/audit_published.py CHECKOUTS [NAME ...]

CHECKOUTS is a folder with git checkouts of the projects that SCRIPTS names. Each script runs by its
own `main` for an epoch of small images with a small network, and is audited with its own model,
loader, loss and optimizer. The step is the script's function for an epoch, called with one batch,
and the audit follows the first epoch; where a script has no such function, its lines are restated
in audit_published_hooks.py, and the audit precedes the first update. The packages that a script
needs must be installed.
"""

import argparse
import hashlib
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import audit_published_hooks as hooks
import numpy as np
from measuring import write
from PIL import Image

from largebatch.distributed.environment import own_rank
from largebatch.errors import LargebatchError, WorkerFailedError
from largebatch.formatting import plural
from largebatch.optional import require_digits, require_torchvision
from largebatch.runs.launch import reporting_errors, start_workers

NAME = "audit_published"
CLASSES = 10
SIZES = {"train": 13, "val": 5}
"""Number of images of a class."""


@dataclass(frozen=True, slots=True)
class Published:
    """A published script, its command line and the changes that two CPU workers need."""

    repository: str
    path: str
    hook: hooks.Hook
    """Function that runs the script and audits it."""

    words: str
    """Arguments; {data}, {pets} and {model} are folders."""

    packages: tuple[str, ...]
    changes: str
    """What differs from the script as published, apart from its arguments."""


_IMAGENET = (
    "{data} -a shufflenet_v2_x0_5 -b 16 -j 0 --epochs 1 --dist-backend gloo --dist-url env://"
)
_EVALUATE = "evaluate.load, which downloads, is replaced by a count of hits"

SCRIPTS = {
    "PyTorch ImageNet example": Published(
        "pytorch/examples",
        "imagenet/main.py",
        hooks.imagenet,
        _IMAGENET,
        ("torch", "torchvision"),
        "DistributedDataParallel is added: the script adds it on CUDA only",
    ),
    "PyTorch ImageNet example, on CPU as it is": Published(
        "pytorch/examples",
        "imagenet/main.py",
        hooks.imagenet_as_it_is,
        _IMAGENET,
        ("torch", "torchvision"),
        "none",
    ),
    "torchvision reference": Published(
        "pytorch/vision",
        "references/classification/train.py",
        hooks.torchvision_reference,
        "--data-path {data} --model shufflenet_v2_x0_5 --device cpu -b 16 -j 0 --epochs 1 "
        "--train-crop-size 64 --val-crop-size 64 --val-resize-size 64 --lr-warmup-epochs 1 "
        "--clip-grad-norm 1 --model-ema --model-ema-steps 1 --label-smoothing 0.1 "
        "--norm-weight-decay 0 --output-dir .",
        ("torch", "torchvision"),
        "gloo in place of NCCL, CPU tensors in place of CUDA's, no device_ids",
    ),
    "timm train.py": Published(
        "huggingface/pytorch-image-models",
        "train.py",
        hooks.timm_train,
        "--data-dir {data} --val-split val --model test_resnet --num-classes 10 --img-size 64 "
        "-b 16 --workers 1 --epochs 1 --device cpu --clip-grad 1 --model-ema --aa rand-m9 "
        "--drop 0.1 --log-interval 1 --output .",
        ("torch", "timm"),
        "no device_ids",
    ),
    "Accelerate cv_example.py": Published(
        "huggingface/accelerate",
        "examples/cv_example.py",
        hooks.accelerate_cv,
        "--data_dir {pets} --cpu",
        ("torch", "accelerate", "timm"),
        "test_resnet without weights in place of resnet50d; step and evaluation are restated",
    ),
    "Transformers run_image_classification.py": Published(
        "huggingface/transformers",
        "examples/pytorch/image-classification/run_image_classification.py",
        hooks.transformers_trainer,
        "--train_dir {data}/train --validation_dir {data}/val --model_name_or_path {model} "
        "--do_train --do_eval --output_dir out --num_train_epochs 1 --use_cpu "
        "--per_device_train_batch_size 16 --report_to none --save_strategy no "
        "--remove_unused_columns False --label_column_name label",
        ("torch", "transformers", "accelerate", "datasets"),
        f"{_EVALUATE}; step is restated: Trainer.training_step, clipping, optimizer.step",
    ),
    "Transformers run_image_classification_no_trainer.py": Published(
        "huggingface/transformers",
        "examples/pytorch/image-classification/run_image_classification_no_trainer.py",
        hooks.transformers_loop,
        "--dataset_name {data} --model_name_or_path {model} --num_train_epochs 1 --seed 1 "
        "--per_device_train_batch_size 8 --gradient_accumulation_steps 2 "
        "--label_column_name label",
        ("torch", "transformers", "accelerate", "datasets"),
        f"{_EVALUATE}; step and evaluation are restated",
    ),
    "Lightning imagenet.py": Published(
        "Lightning-AI/pytorch-lightning",
        "examples/pytorch/domain_templates/imagenet.py",
        hooks.lightning_imagenet,
        "fit --model.data_path {data} --model.arch shufflenet_v2_x0_5 --model.batch_size 32 "
        "--model.workers 0 --trainer.accelerator cpu --trainer.devices 2 --trainer.strategy ddp "
        "--trainer.max_epochs 1",
        ("torch", "torchvision", "lightning"),
        "step is restated: the strategy's training_step and backward, optimizer.step",
    ),
}


def make_data(folder: Path) -> dict[str, str]:
    """Write scikit-learn's digits as folders of images, and return the folders by their words."""
    digits = require_digits().load_digits()
    for label in range(CLASSES):
        own = (digits.images[digits.target == label] * 255 / 16).astype(np.uint8)
        images = [Image.fromarray(it).resize((64, 64)).convert("RGB") for it in own]
        first = 0
        for part, number in SIZES.items():
            place = folder / "data" / part / f"digit{label}"
            place.mkdir(parents=True)
            last = first + number + (part == "val" and label == 0)  # 51 in all: padded by samplers
            for count, image in enumerate(images[first:last]):
                image.save(place / f"{count}.png")
            first = last
        (folder / "pets").mkdir(exist_ok=True)
        for count, image in enumerate(images[: sum(SIZES.values())]):
            image.save(folder / "pets" / f"digit{label}_{count}.jpg")
    return {"data": str(folder / "data"), "pets": str(folder / "pets"), "model": str(folder / "m")}


def run(name: str, checkouts: Path, words: dict[str, str], folder: Path) -> dict[str, Any]:
    """Run one script on two workers; return its findings, or the error."""
    script = SCRIPTS[name]
    repository = checkouts / script.repository.partition("/")[2]
    path = repository / script.path
    arguments = script.words.format(**words).split()
    place = Path(tempfile.mkdtemp(dir=folder))
    command = [__file__, "--worker", name, str(path), str(place / "result.json"), *arguments]
    if "{model}" in script.words and not Path(words["model"]).exists():
        hooks.write_model(words["model"])
    result: dict[str, Any] = {"error": None}
    here = Path.cwd()
    os.chdir(place)  # scripts write their checkpoints here
    try:
        start_workers(command, workers=2)
    except (LargebatchError, WorkerFailedError) as error:
        result["error"] = str(error)[-2000:]
    finally:
        os.chdir(here)
    if (place / "result.json").exists():
        result |= json.loads((place / "result.json").read_text())
    return {
        "repository": script.repository,
        "path": script.path,
        "commit": commit_of(repository),
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "arguments": script.words,
        "changes": script.changes,
        "packages": {it: importlib.metadata.version(it) for it in script.packages},
        **result,
    }


def commit_of(repository: Path) -> str:
    command = ["git", "-C", str(repository), "rev-parse", "HEAD"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def be_worker(name: str, path: Path, result: Path, arguments: list[str]) -> None:
    """Run a script on this worker; worker 0 writes what the audit found."""
    require_torchvision()
    sys.argv = [str(path), *arguments]
    SCRIPTS[name].hook(path)
    (findings,) = hooks.FOUND
    if own_rank() == 0:
        content = {"findings": [asdict(it) for it in findings], "seconds": findings.seconds}
        result.write_text(json.dumps(content))


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        with reporting_errors():
            be_worker(sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]), sys.argv[5:])
        return
    parser = argparse.ArgumentParser(description="audit published training scripts")
    parser.add_argument("checkouts", type=Path, help="folder with the projects' checkouts")
    parser.add_argument("names", nargs="*", choices=[[], *SCRIPTS], help="default: all")
    args = parser.parse_args()
    results = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        words = make_data(folder)
        for script in args.names or SCRIPTS:
            results[script] = run(script, args.checkouts.resolve(), words, folder)
            print(f"{script}: {describe(results[script])}", flush=True)
    if not args.names:
        print(write(NAME, "python benchmarks/audit_published.py CHECKOUTS", {"scripts": results}))


def describe(result: dict[str, Any]) -> str:
    """Return the faults of a script, or their absence, and the number of notes."""
    if "findings" not in result:
        return f"not audited: {result['error']}"
    levels = [it["level"] for it in result["findings"]]
    lines = [f"  {it['level']}: {it['check']}: {it['text']}" for it in result["findings"]]
    return "\n".join([plural(levels.count("fault"), "fault"), *lines])


if __name__ == "__main__":
    main()
