"""Check what is installed by using it, and print how to install the rest."""

import importlib.metadata
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from largebatch import optional
from largebatch.cli.printing import print_json, print_rows
from largebatch.distributed.environment import available_cores, own_rank, world_size
from largebatch.errors import LargebatchError, WrongCardError
from largebatch.formatting import plural, table
from largebatch.runs.options import AsJson, Given, MachineOptions, Number, RecipeFile

if TYPE_CHECKING:
    import torch

    from largebatch.runs.device_check import DeviceCheck

_MINUTES = 5.0
_NETWORK = "digits_96"
"""Recipe of --replay without another one: its images are installed, and its network is small."""

_DEVICE_BATCH = 48
_UPDATES = 1000


def doctor(
    recipe: RecipeFile | None = None,
    /,
    *,
    network: bool = False,
    replay: bool = False,
    minutes: Number | None = None,
    json: AsJson = False,
    options: Annotated[MachineOptions, Given] = MachineOptions(),
) -> None:
    """Check the installation, measure the network between hosts, or compare devices.

    Args:
        recipe: Recipe whose passes --replay compares; digits_96 if it is left out.
        network: Measure the network between the workers.
        replay: Compute passes of each worker again on the others, and name a wrong device.
        minutes: Minutes of --replay (5).
    """
    if json and (network or replay):
        raise LargebatchError("--json is of the installation: leave out --network and --replay")
    if network and replay:
        raise LargebatchError("--network and --replay are two checks: give one of them")
    only_workers = MachineOptions(
        workers=options.workers, backend=options.backend, timeout=options.timeout
    )
    if not replay and (recipe is not None or minutes is not None or options != only_workers):
        raise LargebatchError("a recipe, its options and --minutes are those of --replay: add that")
    if json:
        print_json({name: _as_json(finding) for name, finding in examine()})
    elif network:
        _show_network(options)
    elif replay:
        _show_devices(recipe, options, minutes=_MINUTES if minutes is None else minutes)
    else:
        for name, finding in examine():
            print_rows({name: finding}, width=12)


def changes_for(workers: int) -> tuple[str, ...]:
    """Return the changes of digits_96 for any number of workers.

    Workers that share a BatchNorm span compute a pass together, so each has a span of its own.
    """
    return (
        f"batch.global_batch={_DEVICE_BATCH * workers}",
        f"batch.bn_span={_DEVICE_BATCH}",
        f"duration={{steps: {max(_UPDATES, workers)}}}",  # a partner for each update
        "polish=null",
    )


def _show_devices(recipe: Path | None, options: MachineOptions, *, minutes: float) -> None:
    """Print how often each worker's passes differed; raise WrongCardError if any did."""
    from largebatch.recipe.loading import load_recipe
    from largebatch.runs.device_check import checked_devices

    if recipe is None:
        changes = (*changes_for(world_size()), *options.changes)
        loaded = load_recipe(Path(_NETWORK), changes)
    else:
        loaded = load_recipe(recipe, options.changes)
    with checked_devices(loaded, options, seconds=60 * minutes) as check:
        rows = [("worker", "host", "device", "unit", "passes", "wrong", "one of several wrong")]
        for suspect in check.devices:
            wrong, maybe = check.count_wrong(suspect.worker)
            counts = f"{check.replays:,}", f"{wrong:,}", f"{maybe:,}"
            rows.append(
                (str(suspect.worker), suspect.host, suspect.device, suspect.unit or "", *counts)
            )
        if own_rank() == 0:
            print(table(rows, right=(0, 4, 5, 6)))
            print(_describe_partners(check), flush=True)
    if check.wrong:
        raise WrongCardError(
            f"passes over the same samples differ, first at {check.wrong[0].place}; leave the "
            "devices that the table calls wrong out of runs"
        )
    if own_rank() == 0:
        print("no pass differed", flush=True)


def _describe_partners(check: "DeviceCheck") -> str:
    """Return which partners each worker had, and what no partner means."""
    if check.most_distances:
        partners = f"{plural(check.distances, 'partner')} of {check.most_distances}"
        return f"each worker had {partners}; give more --minutes for more passes"
    if len(check.devices) == 1:
        reason = "there is one worker"
    else:
        reason = "all workers share a BatchNorm span (give a smaller --set batch.bn_span=N)"
    return (
        f"no worker had a partner: {reason}, so passes are compared with their own repetitions "
        "only, and a device that is wrong each time is not found"
    )


def _show_network(options: MachineOptions) -> None:
    from largebatch.distributed.connection import connect
    from largebatch.lab.measure.calibrate import bandwidth, measure_network

    backend = connect(options.backend, timeout=options.timeout)
    workers = backend.world_size
    if workers < 2:
        raise LargebatchError(
            "doctor --network measures between workers, and there is only one; start it as a run "
            "is started, by launch/*.sh, torchrun, horovodrun, srun or with --workers N"
        )
    if backend.rank == 0:
        print(f"{plural(workers, 'worker')} of {backend.name} on {backend.device.type}", flush=True)
    rows = [("sum of KiB", "ms", "MB/s")]
    for size, seconds in measure_network(backend).items():
        rate = bandwidth(size, workers=workers, seconds=seconds)
        rows.append((f"{size // 1024:,}", f"{1e3 * seconds:,.2f}", f"{rate / 1e6:,.0f}"))
    if backend.rank == 0:
        print(table(rows, right=(0, 1, 2)), flush=True)
    backend.close()


def examine() -> Iterator[tuple[str, str]]:
    """Yield each package: its name, and that it works and its version, or how to fix it."""
    import torch

    from largebatch import accelerator, models
    from largebatch.data.decoders import dali, torchvision
    from largebatch.distributed import horovod
    from largebatch.lab.studies.namespaces import lacking
    from largebatch.models.compiled import require_compiler

    names = accelerator.names()
    devices = f"{len(names)} GPU: {', '.join(sorted(set(names)))}"
    yield "torch", f"works  {torch.__version__}, {devices if names else 'no GPU, the CPU is used'}"
    checks: dict[str, tuple[str, Callable[[], object]]] = {
        "torchvision": ("torchvision", lambda: _decode_one(torchvision.open_decoder)),
        "timm": ("timm", lambda: models.build("resnet18", num_classes=2)),
        "compiler": ("torch", lambda: require_compiler(accelerator.current())),
        "DALI": ("nvidia-dali-cuda120", lambda: _decode_one(dali.open_decoder)),
        "Horovod": ("horovod", lambda: horovod.open_horovod().close()),
        "W&B": ("wandb", optional.require_wandb),
        "MLPerf": ("mlperf-logging", lambda: optional.require_mlperf("mllog.mllog", "doctor")),
        "TensorBoard": ("tensorboard", optional.require_tensorboard),
        "MLflow": ("mlflow-skinny", optional.require_mlflow),
        "obstore": ("obstore", optional.require_obstore),
        "psutil": ("psutil", optional.require_psutil),
        "Shampoo": ("pytorch-optimizer", optional.require_shampoo),
        "schedulefree": ("schedulefree", optional.require_schedulefree),
        "Optuna": ("optuna", optional.require_optuna),
        "SimPy": ("simpy", optional.require_simpy),
    }
    for name, (package, use) in checks.items():
        yield name, _outcome(package, use)
    yield from examine_kernels(accelerator.current())
    cores = available_cores()
    yield "cores", f"{cores}; more --workers than these slow each other down"
    missing = lacking()
    yield "hosts", f"absent  those of studies need {missing}" if missing else "works  in namespaces"


def examine_kernels(device: "torch.device") -> Iterator[tuple[str, str]]:
    """Yield the result of a trial of each kernel and of a graph on this machine's GPU."""
    from largebatch import proof
    from largebatch.recipe.loading import load_recipe
    from largebatch.runs.proving import prove_again

    if reason := proof.switched_off():
        yield "kernels", f"absent  {reason}"
        return
    findings = prove_again(load_recipe("digits_96"), device)
    if not findings:
        yield "kernels", "absent  no GPU that has some: PyTorch's operations are used"
    for part, finding in findings.items():
        status = "works" if finding.refused is None or finding.is_slow else "BROKEN"
        yield part, f"{status}  {finding.describe()}"


def _as_json(finding: str) -> dict[str, str | None]:
    """Return the status, which is works, absent, broken or null, and the text of a finding."""
    status, _, text = finding.rpartition("  ")
    return {"status": status.lower() or None, "finding": text}


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
    if package == "torchvision" and optional.torchvision_lacks_operators():
        version += ", built for another torch: enough here, and a plain `import torchvision` fails"
    return f"works  {version}"


def _decode_one(open_decoder: Callable[..., AbstractContextManager[Any]]) -> None:
    import numpy as np
    import torch
    from PIL import Image

    from largebatch.data.augment import clean_request
    from largebatch.data.index.index import read_folder
    from largebatch.data.types import Resources, View

    with tempfile.TemporaryDirectory() as folder:
        class_folder = Path(folder) / "train" / "grey"
        class_folder.mkdir(parents=True)
        Image.new("RGB", (8, 8), "grey").save(class_folder / "one.png")
        index = read_folder(Path(folder), "train")
        # A whole small image through the decoder itself: an import alone does not show a missing
        # library.
        request = clean_request(index, np.array([0]), image_size=8, resize=None)
        view = View(image_size=8, mean=(0.0,) * 3, std=(1.0,) * 3, interpolation="bilinear")
        resources = Resources(torch.device("cpu"), threads=1, batch_size=1)
        with open_decoder(index, view, resources) as decode:
            next(decode([request]))
