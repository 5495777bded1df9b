"""The decisions of launch/install_horovod.sh, with fake programs; nothing is built."""

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "launch" / "install_horovod.sh"
BASH = shutil.which("bash") or "bash"


@dataclass
class Machine:
    """A folder of programs, a folder of Python packages and an empty home."""

    root: Path

    def __post_init__(self) -> None:
        self.programs = self.root / "bin"
        self.packages = self.root / "packages"
        self.cache = self.root / "cache" / "largebatch" / "wheels"
        self.programs.mkdir()
        self.packages.mkdir()
        for name in ("env", "head", "mkdir", "rm"):
            (self.programs / name).symlink_to(shutil.which(name) or name)
        self.add_program("python", f'exec "{sys.executable}" -S "$@"')

    def add_program(self, name: str, script: str = "exit 0") -> None:
        path = self.programs / name
        path.write_text(f"#!{BASH}\n{script}\n")
        path.chmod(0o755)

    def add_torch(self, version: str, *, cuda: str | None = None, standard: int = 20) -> None:
        config = self.packages / "cmake" / "Torch" / "TorchConfig.cmake"
        config.parent.mkdir(parents=True)
        config.write_text(f"set_target_properties(torch PROPERTIES CXX_STANDARD {standard})\n")
        (self.packages / "torch.py").write_text(
            "from types import SimpleNamespace as Namespace\n"
            f"__version__, version = {version!r}, Namespace(cuda={cuda!r})\n"
            f"utils = Namespace(cmake_prefix_path={str(self.packages / 'cmake')!r})\n"
        )

    def add_nccl(self) -> None:
        header = self.packages / "nvidia" / "nccl" / "include" / "nccl.h"
        header.parent.mkdir(parents=True)
        header.touch()

    def install(self, python: str = "python", **settings: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [BASH, SCRIPT, python],
            env={
                "PATH": str(self.programs),
                "PYTHONPATH": str(self.packages),
                "XDG_CACHE_HOME": str(self.root / "cache"),
                "CUDA_HOME": str(self.root / "cuda"),
                **settings,
            },
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.mark.parametrize(
    ("cuda", "programs", "label", "options"),
    [
        pytest.param(None, [], "torch2.13.0.cpu", ["WITHOUT_MPI=1"], id="CPU"),
        pytest.param(None, ["nvcc"], "torch2.13.0.cpu", ["WITHOUT_MPI=1"], id="nvcc, CPU torch"),
        pytest.param(None, ["mpicxx"], "torch2.13.0.cpu", ["WITHOUT_MPI=1"], id="half of MPI"),
        pytest.param(
            None, ["mpicxx", "mpirun"], "torch2.13.0.cpu.mpi", ["WITH_MPI=1"], id="all of MPI"
        ),
        pytest.param(
            "13.0", ["nvcc"], "torch2.13.0.cu130.nccl", ["GPU_OPERATIONS=NCCL"], id="CUDA"
        ),
        pytest.param(
            "13.0",
            ["nvcc", "mpicxx", "mpirun"],
            "torch2.13.0.cu130.mpi.nccl",
            ["GPU_OPERATIONS=NCCL", "WITH_MPI=1"],
            id="CUDA and MPI",
        ),
        pytest.param("13.0", [], "torch2.13.0.cu130", ["WITHOUT_MPI=1"], id="CUDA without nvcc"),
    ],
)
def test_horovod_is_built_with_the_machines_libraries(
    machine: Machine, cuda: str | None, programs: list[str], label: str, options: list[str]
) -> None:
    for name in ["c++", *programs]:
        machine.add_program(name)
    machine.add_torch("2.13.0+cu130" if cuda else "2.13.0+cpu", cuda=cuda)
    machine.add_nccl()
    done = machine.install(DRY_RUN="1")
    assert done.returncode == 0, done.stderr
    assert f"/horovod-0.28.1+{label}-cp{sys.version_info.major}{sys.version_info.minor}-" in (
        done.stdout
    )
    for option in options:
        assert f" HOROVOD_{option} " in done.stdout
    assert ("NCCL_HOME" in done.stdout) == label.endswith("nccl")
    assert ("Without GPU support" in done.stdout) == (cuda is not None and "nvcc" not in programs)
    assert not machine.cache.exists()


def test_the_cpp_standard_is_that_of_torch(machine: Machine) -> None:
    machine.add_program("c++", '[[ "$*" == *-std=c++17* ]]')
    machine.add_torch("2.4.1", standard=17)
    done = machine.install(DRY_RUN="1")
    assert done.returncode == 0, done.stderr
    assert "for torch 2.4.1, C++17" in done.stdout


def test_a_wheel_in_the_cache_is_not_built_again(machine: Machine) -> None:
    machine.add_program("c++")
    machine.add_torch("2.13.0+cpu")
    first = machine.install(DRY_RUN="1").stdout
    wheel = Path([word for word in first.split() if word.endswith(".whl")][-1])
    wheel.parent.mkdir(parents=True)
    wheel.touch()
    assert " wheel " in first
    (machine.programs / "c++").unlink()
    second = machine.install(DRY_RUN="1")
    assert second.returncode == 0, second.stderr
    assert [line for line in second.stdout.splitlines() if line.startswith("+ ")] == [
        f"+ python -m pip install --quiet {wheel}",
        "+ python -c from horovod.torch import init",
    ]


def test_a_failed_build_leaves_nothing_behind(machine: Machine) -> None:
    machine.add_program("c++")
    machine.add_torch("2.13.0+cpu")
    machine.add_program("python", f'[[ $1 == - ]] && exec "{sys.executable}" -S "$@"; exit 5')
    done = machine.install()
    assert done.returncode == 5
    assert list(machine.cache.iterdir()) == []


@pytest.mark.parametrize(
    ("programs", "torch", "python", "message"),
    [
        pytest.param([], False, "pythonX", "there is no Python at 'pythonX'", id="no Python"),
        pytest.param(["c++"], False, "python", "has no torch to build for", id="no torch"),
        pytest.param(
            [], True, "python", "needs a C++20 compiler and the headers", id="no compiler"
        ),
    ],
)
def test_a_missing_tool_is_a_one_line_error(
    machine: Machine, programs: list[str], torch: bool, python: str, message: str
) -> None:
    for name in programs:
        machine.add_program(name)
    if torch:
        machine.add_torch("2.13.0+cpu")
    done = machine.install(python)
    assert done.returncode == 1
    assert done.stderr.startswith("install_horovod: ")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert not machine.cache.exists()
