"""The package really prints every message of docs/troubleshooting.md."""

import contextlib
import io
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from documents import DOCS
from PIL import Image
from safetensors.torch import save_file
from short_runs import a_recipe
from threads import Thread, on_threads
from torch import nn
from torch.distributed import HashStore  # type: ignore[attr-defined]  # torch's stubs
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from largebatch import accelerator
from largebatch.cli.main import DONE, main, parse
from largebatch.distributed.agreement import require_agreement, require_same_bits
from largebatch.distributed.backend import pick_device
from largebatch.distributed.horovod import open_horovod
from largebatch.distributed.torch_distributed import lost_peers_named, require_one_type
from largebatch.errors import LargebatchError, PeerLostError, WorkerFailedError
from largebatch.lab.protocols.exchange import _refusal
from largebatch.lab.studies.queue.database import Queue, open_storage
from largebatch.polish import polish
from largebatch.recipe.writing import dump_recipe
from largebatch.runs.launch import _cause
from largebatch.tracking.events import Note
from largebatch.tracking.log import JsonLines

ENTRIES = re.findall(r"^- `(.+)`$", (DOCS / "troubleshooting.md").read_text("utf-8"), re.MULTILINE)

COMMANDS = """
check mistakes.yaml
check no.yaml
check digits_96.yaml
check broken.yaml
explain optimizer.etta
train digits_96 --set peak_lr
check digits_96 --set schedule.warmup.epochs=50
plan digits_96 --workers 7
launch slurm resnet50_32768_mlperf --nodes 33
plan digits_96 --set batch.bn_span=null
plan digits_96 --set model.name=resnet5
plan digits_96 --set model.arguments.layer=3
plan digits_96 --set monitor=noise_scale --set batch.bn_span=96
check digits_96 --set "polish={swa: {over: {epochs: 5}, every: {epochs: 1}}}"
launch slrum digits_96 --nodes 1
launch mpirun digits_96_softsync --nodes 1 --gpus-per-node 6
train digits_96_softsync --workers 6 --backend horovod
train digits_96 --workers 2 --backend horovod --set reduction.dtype=bf16
lab suggest --batch 100000
lab suggest --batch 512
train resnet50_8192_mlperf
train resnet50_8192_mlperf --data nowhere
train resnet50_8192_mlperf --data images
train digits_96 --data images
data index photos
data index damaged
data import imagefolder empty --out shards
data import imagefolder damaged --out shards
data import imagefolder junk --out shards --drop-bad
data pack images --out photos
init images --out images.yaml
data verify images
init photos
train images.yaml --data changed
train images.yaml --dataset no_such_module:make
train small.yaml --out notes.pth
train small.yaml --out run
train small.yaml --out new --resume
train small.yaml --resume
train small.yaml --out run --resume --set schedule.peak_lr=0.4
train small.yaml --out run --resume --set optimizer.kind=sgd
train small.yaml --out run --resume --allow schedule.peak_lr
evaluate nowhere
evaluate empty
evaluate damaged.safetensors
evaluate run --set schedule.peak_lr=1
export run --out run
report empty
report .
lab noise run
polish run
polish --model resnet18
polish --model resnet18 --weights no.pth --data images --out p.pth
polish --model vit_tiny_patch16_224 --weights other.safetensors --data images --out p.safetensors
polish --model resnet18 --weights other.safetensors --data images --out p.safetensors
polish --model resnet18 --weights notes.pth --data images --out p.pth
train digits_96 --backend serial --workers 2
train digits_96_softsync --workers 2
lr bench settings.yaml
lr bench late.yaml
lr recommend --dataset digits --model lenet5 --target 0.9
train digits_96 --restarts 2
train digits_96 --backend torch
doctor --network
train digits_96 --set execution.kernels=apex
train small.yaml --out nan --set optimizer.kind=sgd --set schedule.peak_lr=1e30
train small.yaml --out unused --import unused --set "model={name: unused_net}" --max-steps 1
train small.yaml --out tracked --set tracking=[wandb] --max-steps 1
plan resnet50_86016_fujitsu --workers 2048 --cluster dgx-z100
plan resnet50_8192_mlperf --workers 8 --cluster dgx-a100
plan digits_96 --workers 2 --cluster dgx-a100
plan resnet50_86016_fujitsu --workers 21504 --cluster abci-v100
referee run
explain --schedule digits_96 --out rates.jpg
""".strip().splitlines()

MISTAKES = (
    "name: mistakes\nduration: {epochs: 0}\nseed: '1'\nschedule: {peak_lr: 1, warm_up: null}\n"
)

IMAGES = """
name: images
seed: 1
duration: {steps: 4}
data: {source: folder, classes: 2, train_samples: 4, val_samples: 4, image_size: 32,
       eval_resize: 32, crop_area: [0.5, 1.0], flip: true}
model: {name: resnet18}
batch: {global_batch: 2, bn_span: 2}
optimizer: {kind: sgd}
schedule: {peak_lr: 0.1, warmup: null, decay: {kind: constant}}
"""

LATE = """
name: late
recipes: {late: {recipe: digits_96_softsync}}
policies: {flat: {decay: {kind: constant}}}
search: {trials: 1, held_out: 100}
"""

UNUSED = """
from timm.models import register_model
from torch import nn

class Unused(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.norm, self.head = nn.BatchNorm2d(3), nn.Linear(3, num_classes)
        self.idle = nn.Linear(2, 2)

    def forward(self, images):
        return self.head(self.norm(images).mean((2, 3)))

@register_model
def unused_net(pretrained=False, num_classes=10, **_):
    return Unused(num_classes)
"""


def write_images(root: Path, *, splits: tuple[str, ...] = ("train", "val")) -> None:
    """Write two classes of two images each."""
    for number, name in enumerate(f"{s}/{c}/{n}.png" for s in splits for c in "ab" for n in "01"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (number, 0, 0)).save(root / name)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with one of every possible fault, for the commands."""
    root = tmp_path_factory.mktemp("place")
    for name, text in {
        "small.yaml": dump_recipe(a_recipe("statistics: {samples: 480}")),
        "mistakes.yaml": MISTAKES,
        "broken.yaml": "name: [broken\n",
        "images.yaml": IMAGES,
        "settings.yaml": "name: some\nsettings: {own: {}}\n",
        "late.yaml": LATE,
        "unused.py": UNUSED,
        "notes.pth": "no weights",
    }.items():
        (root / name).write_text(text, encoding="utf-8")
    for name in ("images", "damaged", "changed", "junk"):
        write_images(root / name)
    write_images(root / "photos", splits=("pictures",))
    for name in "01":
        (root / f"damaged/train/a/{name}.png").write_bytes(b"GIF89a")
    for image in (root / "junk/train/a").iterdir():
        image.write_bytes(b"GIF89a")
    (root / "empty").mkdir()
    save_file({"weight": torch.zeros(2, 2)}, root / "other.safetensors")
    with contextlib.chdir(root), contextlib.redirect_stdout(io.StringIO()):
        assert main(["data", "index", "changed"]) == DONE
        (root / "changed/val/b/2.png").write_bytes((root / "changed/val/b/1.png").read_bytes())
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("WANDB_RUN_ID", "my run/1")
            patch.syspath_prepend(str(root))
            assert main(["train", "small.yaml", "--out", "run", "--max-steps", "1"]) == DONE
            (checkpoint,) = (root / "run/checkpoints").glob("step-*")
            content = bytearray(checkpoint.read_bytes())
            content[len(content) // 2] ^= 1
            (root / "damaged.safetensors").write_bytes(content)
            yield root


def ended_with(command: str) -> LargebatchError:
    """Return the error that a command ends with."""
    call, _ = parse(shlex.split(command))
    try:
        call()
    except LargebatchError as error:
        return error
    raise AssertionError(f"{command}: ended without an error")


def different_recipes() -> None:
    def work(worker: Thread) -> None:
        require_agreement({"seed": worker.rank}, worker, worker.device)

    on_threads(work, workers=2)


def different_weights(*, workers: int = 3) -> None:
    def work(worker: Thread) -> None:
        weights = [torch.full((2,), float(worker.rank == 1))]
        require_same_bits(weights, worker, worker.device, when="step 9")

    on_threads(work, workers=workers)


def different_weights_of_two() -> None:
    different_weights(workers=2)


def polished_without_a_group() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RANK", "1")
        patch.setenv("WORLD_SIZE", "4")
        polish(nn.BatchNorm2d(3), [torch.zeros(2, 3, 4, 4)])


def more_workers_than_gpus() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(accelerator, "count", lambda: 1)
        pick_device(0, 2)


def two_workers_on_a_gpu() -> None:
    store = HashStore()
    store.set("unit/GPU 1", "0")
    store.add("arrived", 1)
    store.add("on/cuda", 1)
    store.add("informed", 1)
    require_one_type(store, "cuda", rank=1, world_size=2, unit="GPU 1")


def two_runs_in_a_folder() -> None:
    first = JsonLines(Path("run/log.jsonl"), resume=True)
    try:
        JsonLines(Path("run/log.jsonl"), resume=True)
    finally:
        first.close()


def a_log_that_was_replaced() -> None:
    log = JsonLines(Path("run/log.jsonl"), resume=True)
    try:
        Path("run/log.jsonl").rename("old.jsonl")
        Path("run/log.jsonl").write_bytes(Path("old.jsonl").read_bytes())
        log.record(Note(stage="train", step=0, text=""))
    finally:
        log.close()


def a_worker_that_died() -> None:
    with lost_peers_named(0):
        raise torch.distributed.DistNetworkError("Connection closed by peer [127.0.0.1]:4711")


def a_worker_that_was_killed() -> None:
    failure = ProcessFailure(local_rank=1, pid=1, exitcode=-9, error_file="no-such-file")
    raise _cause({1: failure}, stopping=False, ended=None)


def horovod_for_another_torch() -> None:
    Path("horovod").mkdir()
    Path("horovod/__init__.py").touch()
    Path("horovod/torch.py").write_text("raise ImportError('undefined symbol')", encoding="utf-8")
    there = {name for name in sys.modules if name.startswith("horovod.")}
    with pytest.MonkeyPatch.context() as patch:
        for name in there | {"horovod", "horovod.torch"}:
            patch.setitem(sys.modules, name, ModuleType(name))  # the end restores what was there
            del sys.modules[name]
        open_horovod()


def a_database_that_is_none() -> None:
    with open_storage("sqlite:///notes.pth"):
        pass


def two_studies_of_a_name() -> None:
    with open_storage("sqlite:///study.db") as storage:
        for held_out in (200, 300):
            Queue(storage, "digits/lenet5/cosine/search", {"held_out": held_out}, [])


def a_learner_that_was_given_up() -> None:
    raise PeerLostError(_refusal(1))


def a_worker_that_hangs() -> None:
    failures = {
        rank: ProcessFailure(local_rank=rank, pid=1, exitcode=code, error_file="no-such-file")
        for rank, code in enumerate([3, 3, -9])
    }
    raise _cause(failures, stopping=False, ended={0, 1})


CALLS: list[Callable[[], None]] = [
    different_recipes,
    different_weights,
    different_weights_of_two,
    polished_without_a_group,
    more_workers_than_gpus,
    two_workers_on_a_gpu,
    two_runs_in_a_folder,
    a_log_that_was_replaced,
    a_worker_that_died,
    a_worker_that_was_killed,
    a_learner_that_was_given_up,
    a_worker_that_hangs,
    a_database_that_is_none,
    two_studies_of_a_name,
    horovod_for_another_torch,
]


@pytest.fixture(scope="module")
def found(place: Path) -> dict[str, Exception]:
    """Message of every command and call."""
    ends: dict[str, Exception] = {command: ended_with(command) for command in COMMANDS}
    for call in CALLS:
        with pytest.raises((LargebatchError, PeerLostError, WorkerFailedError)) as caught:
            call()
        ends[call.__name__] = caught.value
    return ends


def is_of(entry: str, error: Exception) -> bool:
    """Return whether a message is one that an entry describes, where ... may be anything."""
    pattern = ".*?".join(map(re.escape, entry.split("...")))
    return re.fullmatch(pattern, " ".join(str(error).split())) is not None


@pytest.mark.parametrize("entry", ENTRIES)
def test_every_message_of_the_page_is_produced(entry: str, found: dict[str, Exception]) -> None:
    assert len(entry.replace("...", "").split()) >= 2, "anything would match"
    assert any(is_of(entry, error) for error in found.values())
