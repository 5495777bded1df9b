"""Call a function of a test module on several workers, through the package's own launcher."""

import importlib.util
import pickle
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

from largebatch.distributed.environment import own_rank
from largebatch.runs.launch import reporting_errors, start_workers

T = TypeVar("T")

has_horovod = pytest.mark.skipif(
    importlib.util.find_spec("horovod") is None,
    reason="horovod is not installed; launch/install_horovod.sh builds it",
)


def on_workers(function: Callable[..., T], *args: object, workers: int, horovod: bool = False) -> T:
    """Call `function(*args)` on each of several workers and return worker 0's result."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "call").write_bytes(pickle.dumps((function, args)))
        start_workers([__file__, name], workers=workers, horovod=horovod)
        result: T = pickle.loads((folder / "result").read_bytes())
    return result


def be_worker(folder: Path) -> None:
    function, args = pickle.loads((folder / "call").read_bytes())
    result = function(*args)
    if own_rank() == 0:
        (folder / "result").write_bytes(pickle.dumps(result))


if __name__ == "__main__":
    with reporting_errors():
        be_worker(Path(sys.argv[1]))
