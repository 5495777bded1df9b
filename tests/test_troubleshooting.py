"""The package really prints every message of docs/troubleshooting.md."""

import contextlib
import io
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from documents import DOCS
from PIL import Image
from safetensors.torch import save_file
from short_runs import a_recipe
from threads import Thread, on_threads
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from largebatch.cli.main import DONE, main, parse
from largebatch.distributed.agreement import require_agreement, require_same_bits
from largebatch.errors import LargebatchError, WorkerFailedError
from largebatch.polish import polish
from largebatch.recipe.writing import dump_yaml
from largebatch.runs.launch import _cause
from largebatch.tracking.events import Note
from largebatch.tracking.log import JsonLines

ENTRIES = re.findall(r"^- `(.+)`$", (DOCS / "troubleshooting.md").read_text("utf-8"), re.MULTILINE)

COMMANDS = """
train resnet50_8192_mlperf --data images
data import imagefolder images --out photos
train images.yaml --data changed
train images.yaml --dataset no_such_module:make
polish --model resnet18 --weights other.safetensors --data images --out p.safetensors
polish --model resnet18 --weights notes.pth --data images --out p.pth
train small.yaml --out nan --set optimizer.kind=sgd --set schedule.peak_lr=1e30
train small.yaml --out unused --import unused --set "model={name: unused_net}" --max-steps 1
""".strip().splitlines()

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


def write_images(root: Path) -> None:
    """Write two classes of two images each, for training and validation."""
    for number, name in enumerate(
        f"{s}/{c}/{n}.png" for s in ("train", "val") for c in "ab" for n in "01"
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (number, 0, 0)).save(root / name)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the faults that the commands meet."""
    root = tmp_path_factory.mktemp("place")
    for name, text in {
        "small.yaml": dump_yaml(a_recipe("statistics: {samples: 480}")),
        "images.yaml": IMAGES,
        "unused.py": UNUSED,
        "notes.pth": "no weights",
    }.items():
        (root / name).write_text(text, encoding="utf-8")
    for name in ("images", "changed"):
        write_images(root / name)
    (root / "photos").mkdir()
    (root / "photos" / "0.tar").touch()
    save_file({"weight": torch.zeros(2, 2)}, root / "other.safetensors")
    with contextlib.chdir(root), contextlib.redirect_stdout(io.StringIO()):
        assert main(["data", "index", "changed"]) == DONE
        (root / "changed/val/b/2.png").write_bytes((root / "changed/val/b/1.png").read_bytes())
        with pytest.MonkeyPatch.context() as patch:
            patch.syspath_prepend(str(root))
            assert main(["train", "small.yaml", "--out", "run", "--max-steps", "1"]) == DONE
            yield root


def ended_with(command: str) -> LargebatchError:
    """Return the error that a command ends with."""
    call, _ = parse(shlex.split(command))
    with pytest.raises(LargebatchError) as caught:
        call()
    return caught.value


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


def a_worker_that_was_killed() -> None:
    failure = ProcessFailure(local_rank=1, pid=1, exitcode=-9, error_file="no-such-file")
    raise _cause({1: failure}, stopping=False, ended=None)


CALLS: list[Callable[[], None]] = [
    different_recipes,
    different_weights,
    different_weights_of_two,
    polished_without_a_group,
    two_runs_in_a_folder,
    a_log_that_was_replaced,
    a_worker_that_was_killed,
]


@pytest.fixture(scope="module")
def messages(place: Path) -> list[str]:
    """Messages of all commands and calls, on one line each."""
    errors: list[Exception] = [ended_with(command) for command in COMMANDS]
    for call in CALLS:
        with pytest.raises((LargebatchError, WorkerFailedError)) as caught:
            call()
        errors.append(caught.value)
    return [" ".join(str(error).split()) for error in errors]


@pytest.mark.parametrize("entry", ENTRIES)
def test_every_message_of_the_page_is_produced(entry: str, messages: list[str]) -> None:
    assert len(entry.replace("...", "").split()) >= 2, "anything would match"
    pattern = ".*?".join(map(re.escape, entry.split("...")))
    assert any(re.fullmatch(pattern, message) for message in messages)
