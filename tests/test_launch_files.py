"""The files of launch/: each parses, prints what it would do, and does it with other programs."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sysconfig
import time
from pathlib import Path

import jsonschema
import pytest
from ruamel.yaml import YAML

from largebatch.cli.launch import BY_TORCH, KINDS
from largebatch.cli.main import DONE, USER, main

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "launch").iterdir())
SCRIPTS = [path for path in FILES if path.suffix == ".sh"]
SCHEMAS = {
    kind: json.loads((ROOT / "tests" / "support" / "kubeflow" / name).read_text())
    for kind, name in (("mpijob", "mpijob_v2beta1.json"), ("pytorchjob", "pytorchjob_v1.json"))
}
SHELLCHECK = Path(sysconfig.get_path("scripts"), "shellcheck")
TRAIN = "-m largebatch train digits_96 --out runs/digits_96 --resume auto"
COMMANDS = {
    "horovodrun.sh": f"horovodrun --gloo -np 16 -H n1:8,n2:8 python3 {TRAIN}",
    "mpirun.sh": f"mpirun -np 16 -H n1:8,n2:8 --bind-to none --map-by slot -x PATH python3 {TRAIN}",
    "torchrun.sh": "python3 -m torch.distributed.run --nnodes 2 --nproc-per-node 8 --node-rank 1 "
    f"--master-addr n1 --master-port 29500 {TRAIN}",
    "slurm.sh": f"srun --mpi=none --kill-on-bad-exit=0 --cpus-per-task 8 python3 {TRAIN}",
    "slurm_horovod.sh": f"horovodrun --gloo -np 16 -H n1:8,n2:8 python3 {TRAIN}",
    "pbs.sh": "mpirun -np 3 --hostfile {nodefile} --bind-to none --map-by slot -x PATH python3 "
    "-m largebatch train digits_96 --out runs/digits_96 --time-limit 470m --resume auto",
}


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of programs that a cluster has, which note in `calls` how they are called."""
    programs = tmp_path / "bin"
    programs.mkdir()
    add_program(programs, "scontrol", 'if [[ $1 == show ]]; then printf "n1\\nn2\\n"; fi')
    add_program(programs, "qrerun", "true")
    (tmp_path / "nodefile").write_text("n1\nn1\nn2\n")
    for name, value in {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "HOSTS": "n1:8,n2:8",
        "FIRST": "n1",
        "NODE": "1",
        "PBS_NODEFILE": str(tmp_path / "nodefile"),
        "PBS_O_WORKDIR": str(tmp_path),
        "PBS_JOBID": "7.head",
        "SLURM_JOB_ID": "7",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def add_program(programs: Path, name: str, does: str) -> None:
    path = programs / name
    calls = programs.parent / "calls"
    path.write_text(f'#!{shutil.which("bash")}\necho "{name} $*" >>{calls}\n{does}\n')
    path.chmod(0o755)


def dry_run(path: Path, *words: str, **variables: str) -> str:
    done = subprocess.run(
        ["bash", path, *words],
        env=os.environ | {"DRY_RUN": "1"} | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def filled(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    capsys.readouterr()
    assert main(["launch", *words]) == DONE
    return capsys.readouterr().out


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_a_script_parses_and_shellcheck_finds_nothing(path: Path) -> None:
    assert os.access(path, os.X_OK)
    subprocess.run(["bash", "-n", path], check=True)
    done = subprocess.run([SHELLCHECK, path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_a_dry_run_prints_the_command(cluster: Path, name: str) -> None:
    printed = dry_run(ROOT / "launch" / name)
    expected = COMMANDS[name].format(nodefile=cluster / "nodefile")
    assert shlex.split(printed) == ["+", *expected.split()]


@pytest.mark.parametrize("name", ["slurm.sh", "pbs.sh"])
def test_another_command_and_program_can_be_substituted(cluster: Path, name: str) -> None:
    printed = dry_run(
        ROOT / "launch" / name, "doctor", "--network", PYTHON="apptainer exec --nv x.sif python3"
    )
    assert printed.endswith("-m largebatch doctor --network\n")
    assert " apptainer exec --nv x.sif python3 -m " in printed


@pytest.mark.parametrize("name", ["horovodrun.sh", "torchrun.sh"])
def test_missing_hosts_are_an_error(
    cluster: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("HOSTS", "FIRST"):
        monkeypatch.delenv(variable)
    done = subprocess.run(
        ["bash", ROOT / "launch" / name], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert re.search(r"name the hosts? ", done.stderr)


def test_workers_of_one_host_are_started_on_the_loopback_interface(cluster: Path) -> None:
    """By largebatch itself: torchrun's store would take all interfaces."""
    printed = dry_run(ROOT / "launch" / "torchrun.sh", NODES="1", GPUS="4")
    assert printed == f"+ python3 {TRAIN} --workers 4\n"


@pytest.mark.parametrize("kind", [kind for kind in KINDS if KINDS[kind].endswith(".sh")])
def test_a_job_is_filled_in_for_the_plan(
    cluster: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = cluster / "it's a {recipe}.yaml"
    recipe.write_text((ROOT / "recipes" / "quickstart" / "digits_96.yaml").read_text())
    words = ["--nodes", "3", "--gpus-per-node", "4", "--set", "batch.bn_span=24"]
    job = cluster / "job.sh"
    job.write_text(filled(capsys, kind, str(recipe), *words, "--data", "my data"))
    subprocess.run([SHELLCHECK, job], check=True)
    printed = shlex.split(dry_run(job, SLURM_GPUS_ON_NODE="4"))
    train = printed[printed.index("train") :]
    train = train[: train.index("--time-limit")] + train[-6:] if kind == "pbs" else train
    options = ["--resume", "auto", "--set", "batch.bn_span=24", "--data", "my data"]
    assert train == ["train", str(recipe), "--out", "runs/digits-96", *options]
    template = (ROOT / "launch" / KINDS[kind]).read_text().splitlines()
    changed = set(job.read_text().splitlines()) - set(template)
    directives = {
        "slurm": {
            *("#SBATCH --job-name=digits-96", "#SBATCH --nodes=3"),
            *("#SBATCH --gpus-per-node=4", "#SBATCH --ntasks-per-node=4"),
        },
        "slurm-horovod": {
            *("#SBATCH --job-name=digits-96", "#SBATCH --nodes=3", "#SBATCH --gpus-per-node=4"),
        },
        "pbs": {"#PBS -N digits-96", "#PBS -l select=3:ncpus=32:ngpus=4:mpiprocs=4"},
        "torchrun": {"NODES=${NODES:-3}", "GPUS=${GPUS:-4}"},
        "horovodrun": {"WORKERS=${WORKERS:-12}"},
        "mpirun": {"WORKERS=${WORKERS:-12}"},
    }[kind]
    assert directives <= changed
    assert len(changed) == len(directives) + 3  # recipe, folder and options


def test_an_indexed_job_has_a_pod_for_each_worker_that_the_first_one_connects(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["indexedjob", "digits_96_softsync", "--nodes", "3", "--gpus-per-node", "2"]
    service, job = YAML(typ="safe").load_all(filled(capsys, *words, "--data", "$(A)"))
    assert (service["kind"], job["apiVersion"], job["kind"]) == ("Service", "batch/v1", "Job")
    name = job["metadata"]["name"]
    pod = job["spec"]["template"]["spec"]
    assert service["metadata"]["name"] == pod.pop("subdomain") == name
    assert service["spec"]["selector"] == {"job-name": name}
    spec = job["spec"]
    template = SCHEMAS["pytorchjob"]["properties"]["spec"]["properties"]["pytorchReplicaSpecs"]
    template = template["additionalProperties"]["properties"]["template"]
    (container,) = pod["containers"]
    (rank,) = container.pop("env")  # the operator's schema here has neither
    jsonschema.Draft202012Validator(template).validate(spec["template"])
    index = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    assert rank == {"name": "RANK", "valueFrom": {"fieldRef": {"fieldPath": index}}}
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 6, 6)
    assert spec["backoffLimitPerIndex"] == 0  # one that is lost ends no other
    assert pod["restartPolicy"] == "Never"
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 1}
    words = container["command"] + container["args"]
    assert f"MASTER_ADDR={name}-0.{name}" in words
    train = ["train", "digits_96_softsync", "--out", "/runs/digits-96-softsync"]
    assert words[words.index("train") :] == [*train, "--resume", "auto", "--data", "$$(A)"]


@pytest.mark.parametrize("kind", SCHEMAS)
def test_a_manifest_matches_its_operators_schema(
    kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [kind, "digits_96", "--nodes", "3", "--data", "$(A)$$B$"]
    job = YAML(typ="safe").load(filled(capsys, *words))
    jsonschema.Draft202012Validator(SCHEMAS[kind]).validate(job)
    replicas = job["spec"]["mpiReplicaSpecs" if kind == "mpijob" else "pytorchReplicaSpecs"]
    assert replicas["Worker"]["replicas"] == 3
    first = replicas["Launcher" if kind == "mpijob" else "Worker"]
    (container,) = first["template"]["spec"]["containers"]
    words = container["command"] + container.get("args", [])
    train = ["train", "digits_96", "--out", "/runs/digits-96", "--resume", "auto"]
    assert words[words.index("train") :] == [*train, "--data", "$$(A)$$$$B$$"]
    (worker,) = replicas["Worker"]["template"]["spec"]["containers"]
    assert worker["resources"]["limits"] == {"nvidia.com/gpu": 8}
    assert {"name": "shared-memory", "mountPath": "/dev/shm"} in worker["volumeMounts"]
    volumes = replicas["Worker"]["template"]["spec"]["volumes"]
    assert {"name": "shared-memory", "emptyDir": {"medium": "Memory"}} in volumes
    if kind == "mpijob":
        assert job["spec"]["slotsPerWorker"] == 8
        assert words[words.index("-np") + 1] == "24"
    else:
        assert job["spec"]["nprocPerNode"] == "8"
        assert job["spec"]["elasticPolicy"]["minReplicas"] == 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["slrm", "digits_96", "--nodes", "2"], 'launch: Invalid value "slrm"'),
        (
            ["pbs", "digits_96", "--nodes", "5"],
            "--nodes 5 with 8 GPUs each: batch.global_batch",
        ),
        (["pbs", "digit_96", "--nodes", "2"], "digit_96: neither a file nor an installed recipe;"),
    ],
)
def test_a_job_that_cannot_be_launched_is_a_one_line_error(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["launch", *words]) == USER
    found = capsys.readouterr()
    assert found.out == ""
    assert found.err.startswith(f"largebatch: {message}")
    assert found.err.count("\n") == 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("words", "needs"),
    [
        (["digits_96_softsync"], "protocol: Horovod cannot send to one worker alone"),
        (["digits_96", "--set", "reduction.dtype=bf16"], "reduction.dtype: bf16: Horovod has no"),
    ],
    ids=["protocol", "bf16"],
)
def test_a_recipe_that_horovod_cannot_train_has_no_horovod_job(
    kind: str, words: list[str], needs: str, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = DONE if kind in BY_TORCH else USER
    assert main(["launch", kind, *words, "--nodes", "1", "--gpus-per-node", "6"]) == expected
    found = capsys.readouterr()
    if expected == USER:
        assert found.out == ""
        assert found.err.startswith(f"largebatch: launch {kind}: {needs}")
        assert "use launch slurm, pytorchjob, indexedjob or torchrun" in found.err
        assert found.err.count("\n") == 1


WORKER = """
save() { sleep 0.2; mkdir -p runs/digits_96; echo '"interrupted"' >runs/digits_96/summary.json; }
trap 'save; exit CODE' SIGNAL
touch running
for _ in {1..600}; do sleep 0.1; done
"""
"""Waits to be interrupted, then takes a moment to save."""


def interruptible(answers: str, code: int) -> str:
    return WORKER.replace("SIGNAL", answers).replace("CODE", str(code))


@pytest.mark.parametrize(
    ("name", "program", "answers", "again"),
    [
        pytest.param("slurm.sh", "srun", "USR1", "scontrol requeue 7", id="srun"),
        pytest.param("pbs.sh", "mpirun", "USR1", "qrerun 7.head", id="PBS"),
    ],
)
@pytest.mark.parametrize("code", [75, 1])
def test_an_interrupted_job_is_queued_again(
    cluster: Path, name: str, program: str, answers: str, again: str, code: int
) -> None:
    """The warning reaches the run, and only its exit code 75 asks for another turn."""
    add_program(cluster / "bin", program, interruptible(answers, code))
    job = subprocess.Popen(["bash", ROOT / "launch" / name], stdout=subprocess.DEVNULL)
    wait_for(cluster / "running")
    job.send_signal(signal.SIGTERM)
    assert job.wait(timeout=120) == code
    assert ((cluster / "calls").read_text().splitlines()[-1] == again) == (code == 75)


@pytest.mark.parametrize(
    ("name", "program", "queues"),
    [
        pytest.param("slurm.sh", "srun", "scontrol", id="srun"),
    ],
)
def test_a_signal_after_the_end_of_the_run_does_not_change_the_exit_code(
    cluster: Path, name: str, program: str, queues: str
) -> None:
    add_program(cluster / "bin", program, "exit 75")
    add_program(cluster / "bin", queues, "touch queuing; sleep 1")
    job = subprocess.Popen(["bash", ROOT / "launch" / name], stdout=subprocess.DEVNULL)
    wait_for(cluster / "queuing")
    job.send_signal(signal.SIGTERM)
    assert job.wait(timeout=120) == 75


def test_a_signal_before_horovods_first_worker_ends_nothing(cluster: Path) -> None:
    add_program(cluster / "bin", "horovodrun", "touch running; sleep 2; touch over; exit 7")
    job = subprocess.Popen(
        ["bash", ROOT / "launch" / "slurm_horovod.sh"], stdout=subprocess.DEVNULL
    )
    wait_for(cluster / "running")
    job.send_signal(signal.SIGTERM)
    assert job.wait(timeout=120) == 7
    assert (cluster / "over").exists()


@pytest.mark.parametrize("saves", [True, False], ids=["saves", "saved long ago"])
def test_horovods_job_is_queued_again_based_on_the_run_folder(cluster: Path, saves: bool) -> None:
    """horovodrun makes a 1 of 75; a summary that is older than this start proves nothing."""
    folder = cluster / "runs" / "digits_96"
    folder.mkdir(parents=True)
    (folder / "summary.json").write_text('{"status": "interrupted"}')
    os.utime(folder / "summary.json", (0, 0))
    add_program(cluster / "bin", "worker", interruptible("TERM", 75))
    worker = f"(exec -a 'python3 -m largebatch ' bash {cluster / 'bin' / 'worker'}) & wait $!"
    other = subprocess.Popen(["bash", "-c", "exec -a 'python3 -m largebatch ' sleep 600"])
    start = worker if saves else "touch running"
    add_program(cluster / "bin", "horovodrun", f"{start}; exit 1")
    job = subprocess.Popen(
        ["bash", ROOT / "launch" / "slurm_horovod.sh"], stdout=subprocess.DEVNULL
    )
    wait_for(cluster / "running")
    if saves:
        job.send_signal(signal.SIGTERM)
    assert job.wait(timeout=120) == 1
    calls = (cluster / "calls").read_text().splitlines()
    assert ("scontrol requeue 7" in calls) == saves
    assert other.poll() is None  # a run of another job is left alone
    other.kill()
    other.wait()


def wait_for(path: Path) -> None:
    for _ in range(1200):
        if path.exists():
            return
        time.sleep(0.05)
    raise TimeoutError(path)


def test_images_copy_existing_files_and_their_commands_pass_shellcheck() -> None:
    docker = (ROOT / "launch" / "Dockerfile").read_text().replace("\\\n", " ")
    steps = [line.split(" ", 1) for line in docker.splitlines() if line and line[0] != "#"]
    copied = [word for step, rest in steps if step == "COPY" for word in rest.split()[:-1]]
    commands = [rest for step, rest in steps if step == "RUN"]
    definition = (ROOT / "launch" / "apptainer.def").read_text()
    parts = dict(re.findall(r"^%(\w+)\n((?:(?:    .*)?\n)+)", definition, flags=re.MULTILINE))
    copied += [line.split()[0] for line in parts["files"].splitlines() if line]
    assert len(copied) == 14
    for name in copied:
        assert (ROOT / name).exists(), name
    assert steps[0][1] == re.findall(r"^From: (.*)", definition, flags=re.MULTILINE)[0]
    for script in (*commands, *(parts[part] for part in ("post", "environment", "runscript"))):
        subprocess.run([SHELLCHECK, "-s", "sh", "-"], input=script, text=True, check=True)
