"""Three hosts train the digits to the weights of one, by the scripts of `launch` and over ssh.

The hosts are network namespaces (support/hosts.py). LARGEBATCH_MPI_PYTHON names a Python with
a Horovod that was built with MPI, as `make test-hosts` makes one, whose mpirun lies beside it.
"""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from hosts import lacking, on_first_host
from short_runs import DIGITS, log, weights
from torch import Tensor

ROOT = Path(__file__).parents[1]
WORDS = [
    *("train", str(DIGITS), "--set", "batch.bn_span=32", "--set", "duration={steps: 8}"),
    *("--set", "schedule.warmup={steps: 2}", "--set", "evaluation={}"),
    *("--set", "polish={statistics: {samples: 480}}", "--set", "data.image_size=16"),
    *("--set", "execution.cache=memory"),
]
TRAIN = shlex.join(WORDS)
MPI_PYTHON = os.environ.get("LARGEBATCH_MPI_PYTHON", "")
AS_ROOT = {
    **{f"OMPI_ALLOW_RUN_AS_ROOT{more}": "1" for more in ("", "_CONFIRM")},
    **{f"PRTE_ALLOW_RUN_AS_ROOT{more}": "1" for more in ("", "_CONFIRM")},
    "OMPI_MCA_mpi_yield_when_idle": "1",  # there are more workers than cores
}
VARIABLES = {
    "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests" / "support")]),
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "TERM": "dumb",
}
EVERYWHERE = """
number=0
for host in a b c; do
    ssh $host "cd {root} && env {variables} {own} {command}" &
    number=$((number + 1))
done
wait
"""
"""Starts a command on each host; what stands in `own` counts them."""

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(bool(reason := lacking()), reason=reason or "nothing is lacking"),
]
mpi = pytest.mark.skipif(
    not MPI_PYTHON, reason="LARGEBATCH_MPI_PYTHON is not set; make test-hosts builds such a Horovod"
)


def job(folder: Path, *words: str, python: str = sys.executable) -> Path:
    """Write the script that `launch` prints for these words; it runs another command, too."""
    command = [python, "-m", "largebatch", "launch", *words]
    printed = subprocess.run(
        command, cwd=ROOT, env=os.environ | VARIABLES, check=True, capture_output=True, text=True
    )
    path = folder / "job.sh"
    path.write_text(printed.stdout)
    return path


def everywhere(command: str, own: str) -> str:
    given = " ".join(f"{name}={value}" for name, value in VARIABLES.items())
    return EVERYWHERE.format(root=ROOT, variables=given, own=own, command=command)


def trained(folder: Path, script: str, **variables: str) -> dict[str, Tensor]:
    """Run a script on the first of three hosts; return the weights in the run folder."""
    done = on_first_host(script, **VARIABLES, **variables)
    assert (folder / "summary.json").exists(), done.stdout + done.stderr
    return weights(folder)


def alone(folder: Path, *words: str) -> dict[str, Tensor]:
    """Train on three workers of this machine."""
    command = [sys.executable, "-m", "largebatch", *WORDS, "--out", str(folder), *words]
    subprocess.run(command, check=True, timeout=900, env=os.environ | VARIABLES)
    return weights(folder)


@pytest.fixture(scope="module")
def of_one_host(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("one") / "run"
    alone(folder, "--workers", "3")
    return folder


def same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(one[name].equal(other[name]) for name in one)


def test_torchrun_trains_on_three_hosts(of_one_host: Path, tmp_path: Path) -> None:
    path = job(tmp_path, "torchrun", "digits_96", "--nodes", "3", "--gpus-per-node", "1")
    script = everywhere(f"bash {path} {TRAIN} --out {tmp_path / 'run'}", "FIRST=a NODE=$number")
    assert same_bits(trained(tmp_path / "run", script), weights(of_one_host))


def test_horovodrun_trains_on_three_hosts(of_one_host: Path, tmp_path: Path) -> None:
    pytest.importorskip("horovod.torch", reason="horovod is not installed")
    path = job(tmp_path, "horovodrun", "digits_96", "--nodes", "3", "--gpus-per-node", "1")
    found = trained(
        tmp_path / "run",
        f"cd {ROOT} && bash {path} {TRAIN} --out {tmp_path / 'run'}",
        HOSTS="a:1,b:1,c:1",
        PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    )
    assert same_bits(found, weights(of_one_host))


def test_tasks_of_srun_meet_at_the_address_of_the_first_host(
    of_one_host: Path, tmp_path: Path
) -> None:
    """As srun would start them."""
    own = (
        "SLURM_JOB_ID=7 SLURM_STEP_ID=0 SLURM_NTASKS=3 SLURM_NNODES=3 SLURM_NODELIST=a,b,c "
        "'SLURM_TASKS_PER_NODE=1(x3)' SLURM_LOCALID=0 SLURM_PROCID=$number SLURM_NODEID=$number"
    )
    tasks = everywhere(f"{sys.executable} -m largebatch {TRAIN} --out {tmp_path / 'run'}", own)
    assert same_bits(trained(tmp_path / "run", tasks), weights(of_one_host))


@mpi
def test_mpirun_trains_to_the_weights_of_torch(tmp_path: Path) -> None:
    """On two workers: the sum of two numbers has one order only."""
    out = tmp_path / "mpi"
    words = ["mpirun", "digits_96", "--nodes", "1", "--gpus-per-node", "2"]
    subprocess.run(
        ["bash", job(tmp_path, *words, python=MPI_PYTHON), *WORDS, "--out", str(out)],
        cwd=ROOT,
        env=os.environ | VARIABLES | mpis_variables() | {"HOSTS": "localhost:2"},
        check=True,
        timeout=900,
    )
    assert same_bits(weights(out), alone(tmp_path / "torch", "--workers", "2"))


@mpi
def test_mpirun_trains_on_three_hosts(of_one_host: Path, tmp_path: Path) -> None:
    """MPI sums in another order on other hosts, and training amplifies what that rounds."""
    words = ["mpirun", "digits_96", "--nodes", "3", "--gpus-per-node", "1"]
    path = job(tmp_path, *words, python=MPI_PYTHON)
    script = f"cd {ROOT} && bash {path} {TRAIN} --out {tmp_path / 'run'}"
    trained(tmp_path / "run", script, **mpis_variables(), HOSTS="a:1,b:1,c:1")
    ours, theirs = (
        [step["loss"] for step in log(folder, "step")] for folder in (tmp_path / "run", of_one_host)
    )
    assert ours[:5] == pytest.approx(theirs[:5], rel=1e-4)
    assert len(ours) == len(theirs) == 8


def mpis_variables() -> dict[str, str]:
    programs = Path(MPI_PYTHON).parent
    return AS_ROOT | {"PATH": f"{programs}:{os.environ['PATH']}"}
