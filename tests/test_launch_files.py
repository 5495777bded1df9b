"""The jobs of `launch`: each parses, prints what it would do, and does it with other programs."""

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import simulated_slurm
from programs import with_default_signals
from ruamel.yaml import YAML

from largebatch.cli import launch
from largebatch.cli.launch import BY_TORCH, KINDS, KUBERNETES
from largebatch.cli.main import DONE, USER, main

ROOT = Path(__file__).parents[1]
SCHEMAS = {
    schema["properties"]["kind"]["const"]: schema
    for path in sorted((ROOT / "tests" / "support" / "kubeflow").iterdir())
    for schema in [json.loads(path.read_text())]
}
"""Published schemas of the resources that are not Kubernetes' own, by kind."""

IMAGE = ["--image", "registry:5000/team/largebatch:1@sha256:" + "0a" * 32]
DIGITS = (ROOT / "recipes/quickstart/digits_96.yaml").read_text()
OWN = DIGITS.replace("source: digits", "source: folder")
FOLDER = "digits_96 --set data.source=folder"
SHELLCHECK = Path(sysconfig.get_path("scripts"), "shellcheck")
TRAIN = "-m largebatch train digits_96 --out runs/digits-96 --resume auto"
COMMANDS = {
    "horovodrun": f"horovodrun --gloo -np 16 -H n1:8,n2:8 python3 {TRAIN}",
    "mpirun": "mpirun -np 16 -H n1:8,n2:8 --bind-to none --map-by slot -x PATH python3 " + TRAIN,
    "torchrun": "python3 -m torch.distributed.run --nnodes 2 --nproc-per-node 8 --node-rank 1 "
    f"--master-addr n1 --master-port 29500 {TRAIN}",
    "slurm": f"srun --mpi=none --kill-on-bad-exit=0 --cpus-per-task 8 python3 {TRAIN}",
    "slurm-horovod": f"horovodrun --gloo -np 16 -H n1:8,n2:8 python3 {TRAIN}",
    "pbs": "mpirun -np 3 --hostfile {nodefile} --bind-to none --map-by slot -x PATH python3 "
    "-m largebatch train digits_96 --out runs/digits-96 --time-limit 470m --resume auto",
}
"""What the script of each kind starts, for the digits on two hosts of eight GPUs."""


def without_horovod(path: str) -> str:
    """Return a PATH without the folders of a real horovodrun, such as an activated environment."""
    folders = path.split(os.pathsep)
    return os.pathsep.join(it for it in folders if not Path(it, "horovodrun").exists())


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of programs that a cluster has, which note in `calls` how they are called."""
    programs = tmp_path / "bin"
    programs.mkdir()
    add_program(programs, "scontrol", 'if [[ $1 == show ]]; then printf "n1\\nn2\\n"; fi')
    add_program(programs, "qrerun", "true")
    (tmp_path / "nodefile").write_text("n1\nn1\nn2\n")
    for name, value in {
        "PATH": f"{programs}:{without_horovod(os.environ['PATH'])}",
        "HOSTS": "n1:8,n2:8",
        "FIRST": "n1",
        "NODE": "1",
        "PBS_NODEFILE": str(tmp_path / "nodefile"),
        "PBS_O_WORKDIR": str(tmp_path),
        "PBS_JOBID": "7.head",
        "SLURM_JOB_ID": "7",
    }.items():
        monkeypatch.setenv(name, value)
    for name in os.environ:
        if re.match(
            "LD_LIBRARY_PATH|PYTHONPATH|OMP_NUM_THREADS|NCCL_|HOROVOD_|WANDB_|AWS_|AZURE_|"
            "GOOGLE_|PYTHON$|IMAGE$",
            name,
        ):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch, "LOCAL", ())  # where tests have their folders
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


def script(capsys: pytest.CaptureFixture[str], kind: str, *words: str) -> Path:
    """Write the script for the digits, on two hosts unless there are words, to job.sh.

    Its Python is the system's: beside the one of the tests there may be a real horovodrun.
    """
    job = Path("job.sh").absolute()
    printed = filled(capsys, kind, "digits_96", *(words or ("--nodes", "2")))
    job.write_text(printed.replace(f"python=({sys.executable})", "python=(python3)"))
    return job


def test_the_installer_parses_and_shellcheck_finds_nothing() -> None:
    path = ROOT / "launch" / "install_horovod.sh"
    assert os.access(path, os.X_OK)
    subprocess.run(["bash", "-n", path], check=True)
    done = subprocess.run([SHELLCHECK, path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("kind", COMMANDS)
def test_a_dry_run_prints_the_command(
    cluster: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = dry_run(script(capsys, kind))
    expected = COMMANDS[kind].format(nodefile=cluster / "nodefile")
    assert shlex.split(printed) == ["+", *expected.split()]


@pytest.mark.parametrize("kind", ["slurm", "pbs"])
def test_a_job_runs_another_command(
    cluster: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = dry_run(script(capsys, kind), "doctor", "--network")
    assert printed.endswith("-m largebatch doctor --network\n")


@pytest.mark.parametrize("kind", ["horovodrun", "slurm-horovod"])
def test_a_host_needs_horovodrun_outside_the_image(
    cluster: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    job = script(capsys, kind)
    env = os.environ | {"PATH": f"{cluster / 'bin'}:/usr/bin:/bin"}
    done = subprocess.run(["bash", job], env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (127, 1)
    assert "no horovodrun on this host" in done.stderr


@pytest.mark.parametrize("kind", ["horovodrun", "torchrun"])
def test_missing_hosts_are_an_error(
    cluster: Path,
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for variable in ("HOSTS", "FIRST"):
        monkeypatch.delenv(variable)
    job = script(capsys, kind)
    done = subprocess.run(["bash", job], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert re.search(r"name the hosts? ", done.stderr)


def test_workers_of_one_host_are_started_on_the_loopback_interface(
    cluster: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By largebatch itself: torchrun's store would take all interfaces."""
    printed = dry_run(script(capsys, "torchrun", "--nodes", "1", "--gpus-per-node", "4"))
    assert printed == f"+ python3 {TRAIN} --workers 4\n"


@pytest.mark.parametrize("kind", COMMANDS)
def test_a_job_is_filled_in_for_the_plan(
    cluster: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exported variables do not change it, and the command in its header runs."""
    recipe = cluster / "it's a {recipe}.yaml"
    recipe.write_text(OWN)
    words = ["--nodes", "3", "--gpus-per-node", "4", "--set", "batch.bn_span=24"]
    job = cluster / "job.sh"
    job.write_text(filled(capsys, kind, str(recipe), *words, "--data", "my data"))
    subprocess.run([SHELLCHECK, job], check=True)
    others = ["RECIPE", "OUT", "PYTHON", "IMAGE", "MOUNTS", "WORKERS", "NODES", "GPUS", "LIMIT"]
    printed = shlex.split(dry_run(job, SLURM_GPUS_ON_NODE="4", **dict.fromkeys(others, "other")))
    assert "other" not in printed
    (command,) = re.findall(r"^#   (DRY_RUN=1 .*?)  ", job.read_text(), re.MULTILINE)
    subprocess.run(["bash", "-c", command], check=True)
    train = printed[printed.index("train") :]
    train = train[: train.index("--time-limit")] + train[-6:] if kind == "pbs" else train
    data = str(cluster / "my data")
    options = ["--resume", "auto", "--set", "batch.bn_span=24", "--data", data]
    assert train == ["train", str(recipe), "--out", "runs/digits-96", *options]
    assert sys.executable in printed
    lines = job.read_text().splitlines()
    directives = {
        "slurm": {
            *("#SBATCH --job-name=digits-96", "#SBATCH --nodes=3"),
            *("#SBATCH --gpus-per-node=4", "#SBATCH --ntasks-per-node=4"),
        },
        "slurm-horovod": {
            *("#SBATCH --job-name=digits-96", "#SBATCH --nodes=3", "#SBATCH --gpus-per-node=4"),
        },
        "pbs": {"#PBS -N digits-96", "#PBS -l select=3:ncpus=32:ngpus=4:mpiprocs=4"},
        "torchrun": {"NODES=3", "GPUS=4"},
        "horovodrun": {"WORKERS=12"},
        "mpirun": {"WORKERS=12"},
    }[kind]
    assert directives <= set(lines)


def manifests(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    """Return the resources of a job by their kind, each valid by its schema."""
    kubernetes = pytest.importorskip(
        "kubernetes_validate", reason="kubernetes-validate is not installed"
    )
    found = list(YAML(typ="safe").load_all(filled(capsys, *words)))
    for resource in found:
        if resource["kind"] in SCHEMAS:
            jsonschema.Draft202012Validator(SCHEMAS[resource["kind"]]).validate(resource)
        else:
            kubernetes.validate(resource, "1.29", strict=True)
    for template in templates(found):
        # The trainer adds the command, and the operators a policy.
        name = {"name": found[-1]["metadata"]["name"]}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": name, "spec": template}
        kubernetes.validate(pod, "1.29", strict=True)
    return {resource["kind"]: resource for resource in found}


def templates(tree: Any) -> list[dict[str, Any]]:  # noqa: ANN401 -- any YAML
    """Return all descriptions of pods in a manifest."""
    if isinstance(tree, list):
        return [pod for part in tree for pod in templates(part)]
    if not isinstance(tree, dict):
        return []
    own = [tree] if "containers" in tree else []
    return own + [pod for part in tree.values() for pod in templates(part)]


@pytest.mark.parametrize(
    ("kind", "numbers"),
    [
        ("mpijob", ["slotsPerWorker: 8", "replicas: 1", "replicas: 3", "-np 24 "]),
        ("pytorchjob", ['nprocPerNode: "8"', "minReplicas: 3", "replicas: 3"]),
        ("trainjob", ["mlPolicy: {numNodes: 3", "numNodes: 3", "numProcPerNode: 8"]),
        ("jobset", ["completions: 3", "parallelism: 3", "replicas: 1"]),
    ],
)
def test_a_manifest_matches_its_published_schemas(
    cluster: Path, kind: str, numbers: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """With all options, a recipe of the user's and characters that YAML and Kubernetes expand."""
    (cluster / "own.yaml").write_text(OWN)
    words = [kind, "own.yaml", "--nodes", "3", "--data", "/data/$(A)$$B$", "--name", 'A "run"!']
    words += ["--namespace", "team", "--env-secret", "keys", "--rdma", "rdma/hca", "--host-ipc"]
    words += ["--cpus", "4", "--memory", "400G", "--shared-memory", "64G", "--runs-claim", "lustre"]
    words += ["--mirror", "s3://bucket/runs", "--service-account", "trainer"]
    printed = filled(capsys, *words, *IMAGE)
    assert [number for number in numbers if number not in printed] == []
    found = manifests(capsys, *words, *IMAGE)
    assert YAML(typ="safe").load(found["ConfigMap"]["data"]["recipe.yaml"]) == YAML(
        typ="safe"
    ).load(OWN)
    assert {(r["metadata"]["name"], r["metadata"]["namespace"]) for r in found.values()} == {
        ("a-run", "team")
    }
    pods = templates(list(found.values()))
    (worker,) = pods[-1]["containers"]
    trains = found["TrainJob"]["spec"]["trainer"] if kind == "trainjob" else None
    started = trains or pods[0]["containers"][0]
    train = ["largebatch", "train", "/recipe/recipe.yaml", "--out", "/runs/A-run", "--resume"]
    copied = ["--mirror", "s3://bucket/runs"]
    assert started["args"] == [*train, "auto", *copied, "--data", "/data/$$(A)$$$$B$$"]
    assert pods[-1]["serviceAccountName"] == "trainer"
    assert {pod["containers"][0]["image"] for pod in pods} == {IMAGE[1]}
    assert all(pod["containers"][0]["envFrom"] == [{"secretRef": {"name": "keys"}}] for pod in pods)
    limits = {"nvidia.com/gpu": 8, "rdma/hca": 1}
    requests = {"cpu": 32, "memory": "400Gi"}
    assert worker["resources"] == {"limits": limits, "requests": requests}
    assert worker["securityContext"] == {"capabilities": {"add": ["IPC_LOCK"]}}
    assert pods[-1]["hostIPC"] is True
    mounts = {mount["mountPath"]: mount["name"] for mount in worker["volumeMounts"]}
    volumes = {volume.pop("name"): volume for volume in pods[-1]["volumes"]}
    assert {path: volumes[name] for path, name in mounts.items()} == {
        "/runs": {"persistentVolumeClaim": {"claimName": "lustre"}},
        "/dev/shm": {"emptyDir": {"medium": "Memory", "sizeLimit": "64Gi"}},
        "/data": {"persistentVolumeClaim": {"claimName": "data", "readOnly": True}},
        "/recipe": {"configMap": {"name": "a-run"}},
    }


def test_a_protocols_jobset_has_a_pod_for_each_worker(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["jobset", "digits_96_softsync", "--nodes", "3", "--gpus-per-node", "2", *IMAGE]
    assert main(["launch", *words, "--import", "mine"]) == DONE
    assert "--import mine" in capsys.readouterr().err  # which the image may not have
    found = manifests(capsys, *words)
    assert found.keys() == {"JobSet"}  # it is an installed recipe, which the image has
    spec = found["JobSet"]["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert [v["name"] for v in spec["template"]["spec"]["volumes"]] == ["runs", "shared-memory"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 6, 6)
    assert spec["backoffLimitPerIndex"] == 0  # one that is lost ends no other
    (container,) = spec["template"]["spec"]["containers"]
    assert container["command"] == ["python3", "-m"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 1}
    index = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    env = {each["name"]: each.get("value") or each["valueFrom"] for each in container["env"]}
    assert env["RANK"] == {"fieldRef": {"fieldPath": index}}
    assert (env["WORLD_SIZE"], env["LOCAL_RANK"], env["LOCAL_WORLD_SIZE"]) == ("6", "0", "1")
    assert env["MASTER_ADDR"] == "digits-96-softsync-pods-0-0.digits-96-softsync"


@pytest.mark.parametrize("kind", ["slurm", "pbs", "mpirun", "trainjob"])
def test_a_job_reads_images_from_a_bucket(
    cluster: Path, kind: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pod then needs no volume with data; no job holds the credentials."""
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing-secret")
    place = "s3://bucket/imagenet"
    words = ["--nodes", "2", "--data", place, "--cache-dir", "/local/blocks", "--cache-gb", "500"]
    pods = kind == "trainjob"
    job = filled(capsys, kind, "resnet50_8192_mlperf", *words, *(IMAGE * pods))
    assert place in job
    assert "/local/blocks" in job
    assert "500" in job
    assert "testing-secret" not in job
    assert 'claimName: "data"' not in job
    refused = ["launch", kind, "resnet50_8192_mlperf", "--nodes", "2", "--data", "/data/a"]
    assert main([*refused, "--cache-dir", "/local/blocks", *(IMAGE * pods)]) == 2
    assert "keeps what is read from an address" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["mpirun", "pbs", "mpijob"])
def test_variables_of_libraries_are_handed_on_under_mpi(
    cluster: Path, kind: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    libraries = ["LD_LIBRARY_PATH", "PYTHONPATH"]
    libraries += [] if kind == "pbs" else ["OMP_NUM_THREADS"]  # PBS sets it to a node's cores
    names = [*libraries, "NCCL_IB_HCA", "HOROVOD_CYCLE_TIME", "WANDB_API_KEY"]
    names += ["AWS_SECRET_ACCESS_KEY"]
    names += [] if kind == "mpijob" else ["MLFLOW_TRACKING_URI", "MLPERF_X"]
    names += ["AZURE_STORAGE_KEY", "GOOGLE_SERVICE_ACCOUNT"]
    for name in names:
        monkeypatch.setenv(name, "")
    text = filled(capsys, kind, "digits_96", "--nodes", "2", *(IMAGE * (kind == "mpijob")))
    if kind == "mpijob":
        add_program(cluster / "bin", "mpirun", "true")
        launcher = templates(YAML(typ="safe").load(text))[0]["containers"][0]
        env = dict.fromkeys([*names, "NVIDIA_X", "K_MPI_X"], "") | {"PATH": os.environ["PATH"]}
        subprocess.run([*launcher["command"], *launcher["args"]], env=env, check=True)
        printed = (cluster / "calls").read_text().split()
    else:
        (cluster / "job.sh").write_text(text)
        printed = shlex.split(dry_run(cluster / "job.sh"))
    before = printed[: printed.index("train")]
    found = [name for flag, name in pairwise(before) if flag == "-x"]
    assert sorted(found) == sorted(["PATH", *names])
    assert before[-2:] == ["-m", "largebatch"]


@pytest.mark.parametrize(
    ("words", "lines"),
    [
        pytest.param(
            "slurm --partition gpu --account lab --exclusive --time 90m --cpus 4 --name n",
            ["#SBATCH --partition=gpu", "#SBATCH --account=lab", "#SBATCH --mem=0",
             "#SBATCH --exclusive", "#SBATCH --time=01:30:00", "#SBATCH --cpus-per-task=4",
             "#SBATCH --job-name=n", "OUT=runs/n"],
            id="slurm",
        ),
        pytest.param(
            "slurm --memory 2T --out /big", ["#SBATCH --mem=2048G", "OUT=/big"], id="mem"
        ),
        pytest.param(
            "pbs --partition gpu --account lab --exclusive --time 30h --memory 400G",
            ["#PBS -q gpu", "#PBS -A lab", "#PBS -l place=scatter:excl",
             "#PBS -l walltime=30:00:00", "LIMIT=1790m",
             "#PBS -l select=2:ncpus=64:ngpus=8:mpiprocs=8:mem=400gb"],
            id="pbs",
        ),
        pytest.param("pbs --time 10m", ["LIMIT=5m"], id="short"),
    ],
)  # fmt: skip
def test_options_of_a_queue_become_directives(
    words: str, lines: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    kind, *options = words.split()
    job = filled(capsys, kind, "digits_96", "--nodes", "2", *options).splitlines()
    assert set(lines) <= set(job)


def test_the_time_comes_from_the_planner(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["resnet50_8192_mlperf", "--set", "precision=fp16"]
    assert main(["plan", *words, "--workers", "64", "--cluster", "dgx-a100", "--json"]) == DONE
    longest = json.loads(capsys.readouterr().out)["high"]
    job = filled(capsys, "slurm", *words, "--nodes", "8", "--cluster", "dgx-a100", "--data", "/big")
    hours, minutes = re.findall(r"^#SBATCH --time=(\d+):(\d+):00$", job, re.MULTILINE)[0]
    assert longest + 600 <= 3600 * int(hours) + 60 * int(minutes) < longest + 900


@pytest.mark.parametrize(
    ("image", "kind", "started"),
    [
        pytest.param(
            "x.sif", "pbs",
            "apptainer exec --nv --bind {here}:{here} --bind /big:/big {here}/x.sif",
            id="apptainer",
        ),
        pytest.param(
            "nvcr.io#a/b:1", "slurm", "--container-image nvcr.io#a/b:1 --container-mounts "
            "{here}:{here},{here}:{here},/big:/big --container-workdir {here}", id="pyxis",
        ),
    ],
)  # fmt: skip
def test_a_job_runs_in_a_container_that_sees_its_files(
    cluster: Path, image: str, kind: str, started: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("w.pth", "x.sif"):
        (cluster / name).touch()
    words = [kind, "digits_96", "--nodes", "2", "--image", image, "--set", "model.weights=w.pth"]
    words += ["--out", "/big/run"]
    (cluster / "job.sh").write_text(filled(capsys, *words))
    printed = dry_run(cluster / "job.sh").replace("\\", "")
    assert f" {started.format(here=cluster)} python3 -m largebatch train " in printed
    assert printed.endswith(f" --set model.weights={cluster / 'w.pth'}\n")


TINY = shlex.split(
    "--set 'duration={steps: 2}' --set 'schedule.warmup={steps: 1}' --set polish=null --nodes 2 "
    "--gpus-per-node 1 --set 'model.arguments.channels=[8, 8, 16, 16]' --set data.image_size=16 "
    "--set evaluation={}"
)


@pytest.mark.parametrize("kind", ["slurm", pytest.param("jobset", marks=pytest.mark.long)])
def test_a_job_trains_a_recipe_of_the_users_on_two_hosts_as_it_is_printed(
    cluster: Path, kind: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm and Kubernetes are simulated: processes with the variables that they set."""
    (cluster / "own.yaml").write_text(DIGITS.replace("name: digits-96", "name: own"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.delenv("SLURM_JOB_ID")
    if kind == "slurm":
        simulated_slurm.install(cluster / "bin")
        (cluster / "job.sh").write_text(filled(capsys, "slurm", "own.yaml", "--exclusive", *TINY))
        done = subprocess.run([cluster / "bin" / "sbatch", "job.sh"], check=False)
        assert done.returncode == 0, next(cluster.glob("own-*.txt")).read_text()
    else:
        config, job = YAML(typ="safe").load_all(filled(capsys, kind, "own.yaml", *IMAGE, *TINY))
        (cluster / "recipe.yaml").write_text(config["data"]["recipe.yaml"])
        (container,) = templates(job)[0]["containers"]
        places = {"/recipe": str(cluster), "/runs": "runs"}
        command = [
            re.sub("^(/recipe|/runs)", lambda place: places[place[0]], word)
            for word in container["command"] + container["args"]
        ]
        monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
        env = os.environ | {each["name"]: each.get("value", "") for each in container["env"]}
        env |= {"PET_MASTER_ADDR": "localhost", "PET_MASTER_PORT": str(free_port())}
        pods = [
            subprocess.Popen(command, env=env | {"PET_NODE_RANK": str(index)}) for index in (0, 1)
        ]
        assert [pod.wait(timeout=120) for pod in pods] == [0, 0]
    summary = json.loads((cluster / "runs" / "own" / "summary.json").read_text())
    assert (summary["status"], summary["workers"], summary["steps"]) == ("finished", 2, 2)


def free_port() -> int:
    with socket.create_server(("localhost", 0)) as server:
        port: int = server.getsockname()[1]
        return port


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("slrm digits_96 --nodes 2", 'launch: Invalid value "slrm"'),
        ("pbs digits_96 --nodes 5", "--nodes 5 with 8 GPUs each: batch.global_batch"),
        ("pbs digit_96 --nodes 2", "digit_96: neither a file nor an installed recipe;"),
        ("slurm digits_96 --nodes 2 --namespace a", "launch slurm has no --namespace"),
        ("jobset digits_96 --nodes 2 --time 1h", "launch jobset has no --time"),
        ("mpirun digits_96 --nodes 2 --memory 1G", "launch mpirun has no --memory"),
        ("slurm digits_96 --nodes 2 --memory lots", "--memory: expected"),
        ("slurm digits_96 --nodes 2 --partition a=b;c", "--partition"),
        ("slurm digits_96 --nodes 2 --time 60s", "--time 60s"),
        ("slurm digits_96 --nodes 2 --cluster abci-v100", "--gpus-per-node 8"),
        ("slurm digits_96 --nodes 2 --cluster x --time 1h", "--cluster"),
        ("slurm digits_96 --nodes 2 --image no.sif", "--image: "),
        ("slurm digits_96 --nodes 2 --image a.io/b", "give a.io#b"),
        ("slurm digits_96 --nodes 2 --image localhost:5000/b:1", "give localhost:5000#b:1"),
        ("slurm digits_96 --nodes 2 --image ./no.sqsh", "--image: "),
        ("slurm digits_96 --nodes 2 --data d", "--data d would not be read"),
        ("jobset digits_96 --nodes 2", "--image HOST/NAME:TAG"),
        *(
            (f"jobset digits_96 --nodes 2 --image {name}", name)
            for name in ("a.io#b", "a/B", "a/b..c", "a/b:1:2", "a/x.sif")
        ),
        *(
            (f"jobset digits_96 --nodes 2 --image a/b {words}", words.split()[0])
            for words in (
                *("--namespace My_NS", "--rdma hca", "--env-secret a_b"),
                *("--data-claim a..b", "--runs-claim A"),
            )
        ),
        (f"jobset {FOLDER} --nodes 2 --image a/b --data d", "d: pods have /data "),
        ("jobset digits_96 --nodes 2 --image a/b --out /a", "/a: pods have /runs "),
        (
            "jobset digits_96 --nodes 2 --image registry/lb:1 --set model.weights=w.pth",
            "model.weights: w.pth",
        ),
        ("pbs digits_96 --nodes 2 --image registry/a:1", "--image registry/a:1"),
        ("pbs digits_96 --nodes 2 --set model.weights=w.pth", "model.weights: "),
        ("pbs {tmp}/own.yaml --nodes 2", "RECIPE: {tmp}/own.yaml: "),
        (f"slurm {FOLDER} --nodes 2 --data {{tmp}}/a", "--data: {tmp}/a: "),
        ("slurm digits_96 --nodes 2 --out {tmp}/a", "--out: {tmp}/a: "),
        ("pbs resnet50_8192_mlperf --nodes 2", "--data"),
    ],
)
def test_a_job_that_cannot_be_launched_is_a_one_line_error(
    words: str,
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "own.yaml").write_text(DIGITS)
    monkeypatch.setattr(launch, "LOCAL", (tmp_path,))
    assert main(["launch", *words.format(tmp=tmp_path).split()]) == USER
    found = capsys.readouterr()
    assert found.out == ""
    assert message.format(tmp=tmp_path) in found.err
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
    words = [*words, "--nodes", "1", "--gpus-per-node", "6", *(IMAGE * (kind in KUBERNETES))]
    assert main(["launch", kind, *words]) == expected
    found = capsys.readouterr()
    if expected == USER:
        assert found.out == ""
        assert found.err.startswith(f"largebatch: launch {kind}: {needs}")
        assert "use launch jobset, pytorchjob, slurm, torchrun or trainjob" in found.err
        assert found.err.count("\n") == 1


WORKER = """
save() { sleep 0.2; mkdir -p runs/digits-96; echo '"interrupted"' >runs/digits-96/summary.json; }
trap 'save; exit CODE' SIGNAL
touch running
for _ in {1..600}; do sleep 0.1; done
"""
"""Waits to be interrupted, then takes a moment to save."""


def interrupted(path: Path, running: Path, *, sent: int = signal.SIGTERM) -> int:
    """Start a job, send it a signal once `running` exists, and return its exit code."""
    job = subprocess.Popen(with_default_signals("bash", path), stdout=subprocess.DEVNULL)
    for _ in range(1200):
        if not running.exists():
            time.sleep(0.05)
    job.send_signal(sent)
    return job.wait(timeout=120)


def interruptible(answers: str, code: int) -> str:
    return WORKER.replace("SIGNAL", answers).replace("CODE", str(code))


@pytest.mark.parametrize(
    ("kind", "program", "again"),
    [
        pytest.param("slurm", "srun", "scontrol requeue 7", id="srun"),
        pytest.param("pbs", "mpirun", "qrerun 7.head", id="PBS"),
    ],
)
@pytest.mark.parametrize("code", [75, 1])
def test_an_interrupted_job_is_queued_again(
    cluster: Path,
    kind: str,
    program: str,
    again: str,
    code: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The warning reaches the run, and only its exit code 75 asks for another turn."""
    add_program(cluster / "bin", program, interruptible("USR1", code))
    assert interrupted(script(capsys, kind), cluster / "running") == code
    assert ((cluster / "calls").read_text().splitlines()[-1] == again) == (code == 75)


def test_a_signal_after_the_end_of_the_run_does_not_change_the_exit_code(
    cluster: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    add_program(cluster / "bin", "srun", "exit 75")
    add_program(cluster / "bin", "scontrol", "touch queuing; sleep 1")
    assert interrupted(script(capsys, "slurm"), cluster / "queuing") == 75


def test_a_signal_before_horovods_first_worker_ends_nothing(
    cluster: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    add_program(cluster / "bin", "horovodrun", "touch running; sleep 2; touch over; exit 7")
    assert interrupted(script(capsys, "slurm-horovod"), cluster / "running") == 7
    assert (cluster / "over").exists()


@pytest.mark.parametrize("saves", [True, False], ids=["saves", "saved long ago"])
def test_horovods_job_is_queued_again_based_on_the_run_folder(
    cluster: Path, saves: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """horovodrun makes a 1 of 75; a summary that is older than this start proves nothing."""
    folder = cluster / "runs" / "digits-96"
    folder.mkdir(parents=True)
    (folder / "summary.json").write_text('{"status": "interrupted"}')
    os.utime(folder / "summary.json", (0, 0))
    add_program(cluster / "bin", "worker", interruptible("TERM", 75))
    worker = f"(exec -a 'python3 -m largebatch ' bash {cluster / 'bin' / 'worker'}) & wait $!"
    other = subprocess.Popen(["bash", "-c", "exec -a 'python3 -m largebatch ' sleep 600"])
    start = worker if saves else "touch running"
    add_program(cluster / "bin", "horovodrun", f"{start}; exit 1")
    sent = signal.SIGTERM if saves else 0
    assert interrupted(script(capsys, "slurm-horovod"), cluster / "running", sent=sent) == 1
    calls = (cluster / "calls").read_text().splitlines()
    assert ("scontrol requeue 7" in calls) == saves
    assert other.poll() is None  # a run of another job is left alone
    other.kill()
    other.wait()


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
    (torch,) = re.findall(r"^TORCH := (.*)", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    for text in (docker, definition):
        assert f"pip install --no-cache-dir {torch} '.[dali,wandb]'" in text
    for script in (*commands, *(parts[part] for part in ("post", "environment", "runscript"))):
        subprocess.run([SHELLCHECK, "-s", "sh", "-"], input=script, text=True, check=True)


@pytest.mark.long
def test_the_image_is_built(tmp_path: Path) -> None:
    """In half an hour and 30 GB, where there is a builder and a registry with the base image."""
    builder = shutil.which("buildah") or shutil.which("podman")
    if builder is None:
        pytest.skip("an image is built by buildah or podman: apt-get install buildah")
    store = [builder, "--root", str(tmp_path / "images"), "--runroot", str(tmp_path)]
    store += ["--storage-driver", "vfs"]
    docker = ROOT / "launch" / "Dockerfile"
    base = re.findall(r"^FROM (.*)", docker.read_text(), flags=re.MULTILINE)[0]
    if subprocess.run([*store, "pull", base], check=False).returncode:
        pytest.skip(f"no registry has the image {base}")
    subprocess.run([*store, "build", "--isolation", "chroot", "-f", docker, ROOT], check=True)
