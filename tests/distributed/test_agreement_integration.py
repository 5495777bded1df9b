"""Two real processes that were started differently end with one message, and neither waits."""

import os
import socket
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from on_forked_workers import on_forked_workers

import largebatch
from largebatch.cli.main import USER
from largebatch.distributed import torch_distributed
from largebatch.distributed.environment import own_rank
from largebatch.errors import MismatchError

DIGITS = Path(__file__).parents[2] / "recipes" / "quickstart" / "digits_96.yaml"
RATES = ["schedule.peak_lr=2.0", "schedule.peak_lr=1.0"]
MESSAGE = "workers disagree on schedule.peak_lr: 2.0 on worker 0 and 1.0 on worker 1; start"
LIMIT = 600
"""Seconds after which a process hangs; it takes a few."""


def write_worker(folder: Path) -> list[str]:
    """Write a program that trains with different overrides on each worker; return its command."""
    path = folder / "worker.py"
    words = ["train", str(DIGITS), "--max-steps", "1", "--out", str(folder / "run"), "--set"]
    path.write_text(
        "import sys\n"
        "from largebatch.cli.main import main\n"
        "from largebatch.distributed.environment import own_rank\n"
        f"sys.exit(main([*{words}, {RATES}[own_rank()]]))\n"
    )
    return [sys.executable, str(path)]


def environment(**more: str) -> dict[str, str]:
    here = str(Path(largebatch.__file__).parents[1])
    same = {"PYTHONPATH": here, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return os.environ | same | more


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def torch_workers(command: list[str]) -> list[tuple[int, str]]:
    """Start two processes like torchrun; return their exit codes and output."""
    group = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    workers = [
        subprocess.Popen(
            command, env=environment(RANK=rank, **group), stderr=subprocess.PIPE, text=True
        )
        for rank in "01"
    ]
    try:
        said = [worker.communicate(timeout=LIMIT)[1] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    return [(worker.returncode, text) for worker, text in zip(workers, said, strict=True)]


@pytest.mark.long
def test_different_torch_workers_end_with_one_message(tmp_path: Path) -> None:
    (code, said), other = torch_workers(write_worker(tmp_path))
    assert MESSAGE in said
    assert said.count("largebatch:") == 1
    assert (code, other) == (USER, (USER, ""))
    assert not (tmp_path / "run").exists()


def leave_the_gpu_to_worker_0(folder: Path) -> None:
    device = torch.device(["cuda", "cpu"][own_rank()])
    with (
        mock.patch.object(torch_distributed, "pick_device", return_value=device),
        mock.patch("largebatch.accelerator.uuid", return_value=None),
        pytest.raises(MismatchError) as caught,
    ):
        torch_distributed.TorchDistributed()
    (folder / str(own_rank())).write_text(str(caught.value), encoding="utf-8")


@pytest.mark.long
def test_a_gpu_on_only_one_worker_is_a_one_line_error(tmp_path: Path) -> None:
    """NCCL and Gloo would wait for each other until they time out."""
    on_forked_workers(leave_the_gpu_to_worker_0, tmp_path, workers=2)
    for rank in "01":
        said = (tmp_path / rank).read_text(encoding="utf-8")
        assert 'workers disagree on device: "cuda" on worker 0 and "cpu" on worker 1; start' in said
