"""Check what is installed by using it, and print how to install the rest."""

import importlib.metadata
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import torch

from largebatch import accelerator, models
from largebatch.data.datasets import digits
from largebatch.data.decoders import dali, torchvision
from largebatch.data.index import index
from largebatch.data.types import Decode, Request, Resources, View
from largebatch.distributed import horovod
from largebatch.distributed.backend import Backend
from largebatch.distributed.network import bandwidth, measure_network
from largebatch.errors import LargebatchError
from largebatch.formatting import aligned, plural
from largebatch.lab.studies.namespaces import lacking
from largebatch.models.compiled import require_compiler
from largebatch.optional import (
    require_mlflow,
    require_mlperf,
    require_optuna,
    require_psutil,
    require_schedulefree,
    require_shampoo,
    require_simpy,
    require_tensorboard,
    require_wandb,
    torchvision_lacks_operators,
)


def examine() -> Iterator[tuple[str, str]]:
    """Yield each package: its name, and that it works and its version, or how to fix it."""
    yield "torch", f"works  {torch.__version__}, {_devices()}"
    checks: dict[str, tuple[str, Callable[[], object]]] = {
        "torchvision": ("torchvision", lambda: _decode_one(torchvision.open_decoder)),
        "timm": ("timm", lambda: models.build("resnet18", num_classes=2)),
        "compiler": ("torch", lambda: require_compiler(accelerator.current())),
        "DALI": ("nvidia-dali-cuda120", lambda: _decode_one(dali.open_decoder)),
        "Horovod": ("horovod", lambda: horovod.open_horovod().close()),
        "W&B": ("wandb", require_wandb),
        "MLPerf": ("mlperf-logging", lambda: require_mlperf("mllog.mllog", "tracking: [mlperf]")),
        "TensorBoard": ("tensorboard", require_tensorboard),
        "MLflow": ("mlflow-skinny", require_mlflow),
        "psutil": ("psutil", require_psutil),
        "Shampoo": ("pytorch-optimizer", require_shampoo),
        "schedulefree": ("schedulefree", require_schedulefree),
        "Optuna": ("optuna", require_optuna),
        "SimPy": ("simpy", require_simpy),
        "scikit-learn": ("scikit-learn", digits.write_digits),
    }
    for name, (package, use) in checks.items():
        yield name, _outcome(package, use)
    missing = lacking()
    yield "hosts", f"absent  those of studies need {missing}" if missing else "works  in namespaces"


def examine_network(backend: Backend) -> Iterator[str]:
    """Yield the time of sums over all workers, and over every two hosts.

    Raises LargebatchError for a single worker.
    """
    workers = backend.world_size
    if workers < 2:
        raise LargebatchError(
            "doctor --network measures between workers, and there is only one; start it as a run "
            "is started, by launch/*.sh, torchrun, horovodrun, srun or with --workers N"
        )
    found = measure_network(backend)
    hosts = plural(len(found.hosts), "host")
    yield f"{hosts}, {workers} workers of {backend.name} on {backend.device.type}"
    rows = [("sum over", "KiB", "ms", "MB/s", "")]
    for size, seconds in found.seconds.items():
        rate = bandwidth(size, workers=workers, seconds=seconds)
        rows.append(("all", f"{size // 1024:,}", f"{1e3 * seconds:,.2f}", f"{rate / 1e6:,.0f}", ""))
    for pair in found.pairs:
        remark = "slow" if pair in found.slow_pairs else ""
        rows.append((" - ".join(pair.hosts), "", "", f"{pair.bandwidth / 1e6:,.0f}", remark))
    yield aligned(rows, right=(1, 2, 3))
    for host in found.slow_hosts:
        yield f"{host} is slow with both of its neighbours: look at its network, or leave it out"


def _outcome(package: str, use: Callable[[], object]) -> str:
    try:
        use()
    except LargebatchError as error:
        return f"absent  {error}"
    except Exception as error:  # whatever a broken installation raises is the finding
        return f"BROKEN  {type(error).__name__}: {error}"
    version = importlib.metadata.version(package)
    if package == "horovod":
        version += f", HOROVOD_FUSION_THRESHOLD={os.environ['HOROVOD_FUSION_THRESHOLD']}"
    if package == "torchvision" and torchvision_lacks_operators():
        version += (
            f", built for another torch than {torch.__version__}: enough for largebatch, and a "
            "plain `import torchvision` fails"
        )
    return f"works  {version}"


def _decode_one(open_decoder: Callable[..., AbstractContextManager[Decode]]) -> None:
    """Decode a small image made for this check."""
    from PIL import Image

    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "train" / "grey"
        place.mkdir(parents=True)
        Image.new("RGB", (8, 8), "grey").save(place / "one.png")
        found = index.read_folder(Path(folder), "train")
        box = np.array([[0, 0, 8, 8]])
        request = Request(samples=np.array([0]), boxes=box, flips=np.array([False]))
        view = View(
            image_size=8,
            mean=(0.0, 0.0, 0.0),
            std=(1.0, 1.0, 1.0),
            interpolation="bilinear",
        )
        resources = Resources(torch.device("cpu"), threads=1, batch_size=1)
        with open_decoder(found, view, resources) as decode:
            next(decode([request]))


def _devices() -> str:
    names = accelerator.names()
    if not names:
        return "no GPU, the CPU is used"
    return f"{len(names)} GPU: {', '.join(sorted(set(names)))}"
