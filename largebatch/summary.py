"""What a run leaves to be compared with others: summary.json."""

import importlib.metadata
import json
import platform
import resource
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from largebatch.tracking.jsonl import finite

Status = Literal["finished", "interrupted", "stopped", "failed"]

_PACKAGES = (
    "largebatch",
    "torch",
    "torchvision",
    "timm",
    "numpy",
    "horovod",
    "nvidia-dali-cuda120",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """One run in numbers. Accuracies are parts of 1, times seconds, on worker 0."""

    recipe: str
    commit: str | None
    """Of the source tree that ran, with `+` where it had changes; null outside a git checkout."""

    versions: dict[str, str]
    backend: str
    workers: int
    global_batch: int
    device_batch: int
    accumulation: int
    steps: int
    """Optimizer updates made, skipped ones included."""

    skipped_steps: int
    """Those whose gradients overflowed in fp16; nothing changed in them."""

    samples: int
    """Training samples they took, over all workers."""

    seconds: float
    """The whole run, over all its parts."""

    images_per_second: float | None
    """Training samples over the time spent training, evaluation left out."""

    peak_memory_bytes: int
    """Worker 0's: of the GPU's memory where there is one, else of the process."""

    top1: float | None
    top5: float | None
    loss: float | None
    """Accuracy and loss after the last stage that ended."""

    stages: list[dict[str, Any]]
    status: Status
    """interrupted: saved where it ends; stopped: at once, by a second request."""

    def write(self, path: Path) -> None:
        """Write the summary as JSON."""
        write_json(path, asdict(self))


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write JSON for a person; a number that is not finite becomes null, for JSON has none."""
    text = json.dumps(finite(content), indent=2, allow_nan=False)
    path.write_text(text + "\n", encoding="utf-8")


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that can change a result."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def source_commit() -> str | None:
    """Return the git commit this package runs from, `+` behind it if files are changed."""
    folder = Path(__file__).parent

    def git(*words: str) -> str:
        command = ["git", "-C", str(folder), *words]
        done = subprocess.run(  # noqa: S603 -- the words are ours
            command, capture_output=True, text=True, check=True, timeout=10
        )
        return done.stdout

    try:
        git("ls-files", "--error-unmatch", "--", Path(__file__).name)  # else it is another's
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ".").strip()
        return git("rev-parse", "HEAD").strip() + ("+" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return None


def peak_memory_bytes(device: torch.device) -> int:
    """Return the most memory this worker has held so far."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, Linux kilobytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
