"""What tests share: where real data lies, one thread, since problems are small, an end to hangs."""

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import settings

from largebatch.report import write_report

# Triton's kernels run on the CPU where there is no GPU; Triton reads this when it is imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # Triton 3.9 warns where it is unset

# `init` would download weights for the photographs of a test.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# Several workers and tests share few cores, where waiting for threads costs more than it gives.
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")

# How long an example takes on a shared machine says nothing about the code.
settings.register_profile("short", deadline=None, max_examples=25)
settings.register_profile("long", deadline=None, max_examples=200)  # make test-all
settings.load_profile("short")


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder of real data sets; tests that need it are skipped where there is none."""
    folder = os.environ.get("LARGEBATCH_DATA")
    if not folder:
        pytest.skip("LARGEBATCH_DATA is not set: it names the folder of real data sets")
    return Path(folder)


@pytest.fixture
def ends() -> Iterator[None]:
    """Fail a test that would otherwise wait indefinitely; no test depends on its speed."""

    def end(*_: object) -> None:
        raise TimeoutError("still waiting after ten minutes")

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(600)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="session", autouse=True)
def no_report() -> Iterator[None]:
    """Make runs without a report, which takes longer than a short run; `draws` enables it.

    What other processes run is drawn.
    """
    with mock.patch("largebatch.runs.folder.write_report", return_value=None):
        yield


@pytest.fixture
def draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write the report of each run."""
    monkeypatch.setattr("largebatch.runs.folder.write_report", write_report)


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty folder for caches, `cache` in tmp_path, where nothing is found decoded."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `plan` print an estimate of this machine without the seconds that measuring takes."""
    from largebatch.lab.measure.estimate import Estimate

    found = Estimate(
        "cpu", "fp32", 8, step_seconds=0.25, run_seconds=150, memory_bytes=2**30
    )  # fmt: skip
    monkeypatch.setattr("largebatch.lab.measure.estimate.estimate", lambda *_: found)


@pytest.fixture
def compiler() -> None:
    """A C++ compiler, as torch.compile needs on a CPU; tests are skipped where there is none."""
    names = [os.environ.get("CXX", ""), "g++", "c++", "clang++"]
    if not any(name and shutil.which(name) for name in names):
        pytest.skip("no C++ compiler was found, which torch.compile needs on a CPU")
