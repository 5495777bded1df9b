"""Call a function on several workers, forked from a process that has imported all packages.

Starting Python and loading PyTorch, torchvision and timm takes longer than most tests. The fork
server of multiprocessing does that once for all tests of a process. The real start of workers is
tested in runs/test_launch.py.
"""

import multiprocessing
import os
import pickle
import sys
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from typing import TypeVar
from unittest import mock

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch's stubs

T = TypeVar("T")

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["preloaded"])


def on_forked_workers(function: Callable[..., T], *args: object, workers: int) -> T:
    """Call `function(*args)` on each of several workers and return worker 0's result.

    They have this process's environment and draw no report. If one fails, the others are ended and
    its traceback is raised.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environments = [environment_of(rank, workers, store.port) for rank in range(workers)]
    with tempfile.TemporaryDirectory() as name:
        processes = [
            SERVER.Process(target=be_worker, args=(environment, Path(name), function, args))
            for environment in environments
        ]
        with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)):  # for the server
            for process in processes:
                process.start()
        while running := [process.sentinel for process in processes if process.is_alive()]:
            wait(running)
            if any(process.exitcode for process in processes):
                for process in processes:
                    process.kill()
        for process in processes:
            process.join()
        if any(process.exitcode for process in processes):
            errors = [path.read_text(encoding="utf-8") for path in Path(name).glob("error *")]
            raise RuntimeError("\n".join(errors) or [process.exitcode for process in processes])
        if (skipped := Path(name, "skipped")).exists():
            pytest.skip(skipped.read_text(encoding="utf-8"))
        result: T = pickle.loads(Path(name, "result").read_bytes())
    return result


def be_worker(
    environment: dict[str, str], folder: Path, function: Callable[..., object], args: tuple[object]
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    rank = environment["RANK"]
    try:
        with mock.patch("largebatch.runs.folder.write_report"):
            result = function(*args)
    except pytest.skip.Exception as skipped:
        (folder / "skipped").write_text(str(skipped), encoding="utf-8")
        return
    except BaseException:
        (folder / f"error {rank}").write_text(traceback.format_exc(), encoding="utf-8")
        raise
    if rank == "0":
        (folder / "result").write_bytes(pickle.dumps(result))


def environment_of(rank: int, workers: int, port: int) -> dict[str, str]:
    return {
        **os.environ,
        **{name: str(rank) for name in ("RANK", "LOCAL_RANK")},
        **{name: str(workers) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")},
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # worker 0 opens none
    }
