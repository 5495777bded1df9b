"""The command `launch`: print the script or manifest that starts a run on a cluster. It prints.

The templates are the files of launch/. Its scripts also run by themselves and read variables; a
job has values on the lines of their settings instead, so that it runs as printed. The manifests are
Jinja's, and share pod.yaml. The plan is made first, so that a batch which cannot be divided is
never submitted.
"""

import json
import math
import posixpath
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from importlib.resources import files
from pathlib import Path, PurePosixPath
from typing import Annotated, Literal, get_args

from cyclopts import Parameter, Token
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from largebatch.cli.recipe import ClusterName
from largebatch.errors import LargebatchError, PlanError, RecipeError
from largebatch.formatting import duration, plural
from largebatch.lab.planner.cluster import load_cluster
from largebatch.recipe.arithmetic.plan import make_plan
from largebatch.recipe.loading import load_recipe, read_text
from largebatch.recipe.recipe import Recipe
from largebatch.runs.options import Changes, Count, Given, RecipeFile, Seconds

Kind = Literal[
    "slurm", "slurm-horovod", "pbs", "mpijob", "pytorchjob", "trainjob", "jobset", "torchrun",
    "horovodrun", "mpirun",
]  # fmt: skip

BY_TORCH = ("slurm", "pytorchjob", "trainjob", "jobset", "torchrun")
"""Kinds of jobs whose workers torch.distributed connects; Horovod connects the others."""

SCHEDULERS = ("slurm", "slurm-horovod", "pbs")
KUBERNETES = ("mpijob", "pytorchjob", "trainjob", "jobset")

KINDS = {
    kind: f"{kind.replace('-', '_')}.{'yaml' if kind in KUBERNETES else 'sh'}"
    for kind in get_args(Kind)
}
"""Templates in launch/, by kind of job."""

LOCAL = tuple(map(Path, ("/tmp", "/var/tmp", "/dev/shm", "/run")))  # noqa: S108 -- refused
"""Folders that every host has for itself."""

SHORTEST, SAVING = 300, 600
"""Shortest time of a job, and what PBS keeps of it for saving, at most half; in seconds."""


def describe_kubernetes(word: str) -> str:
    """Return the kinds that a word such as k8s stands for, in a message; empty for other words."""
    if word.lower() not in {"k8s", "kubernetes", "kubectl", "kubeflow"}:
        return ""
    return (
        f"launch: on Kubernetes {word!r} is one of: trainjob (TrainJob of Kubeflow Trainer 2), "
        "pytorchjob (PyTorchJob of Kubeflow's Training Operator), mpijob (MPIJob), jobset (JobSet)"
    )


def _gibibytes(_: object, tokens: Sequence[Token]) -> int:
    found = re.fullmatch(r"([1-9]\d*)([GT])", tokens[0].value)
    if found is None:
        raise ValueError(f"expected such as 400G or 2T, got {tokens[0].value!r}")
    return int(found[1]) * (1024 if found[2] == "T" else 1)


def _matching(pattern: str, expected: str) -> Parameter:
    def check(_: object, value: str | None) -> None:
        if value is not None and not re.fullmatch(pattern, value):
            raise ValueError(f"expected {expected}")

    return Parameter(validator=check, metavar="NAME")


_LABEL = r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"  # of DNS
_LABELS = rf"(?=.{{1,253}}$){_LABEL}(\.{_LABEL})*"
_FILE = re.compile(r"[./]|.*\.sif$")
_PATH = r"[a-z0-9]+((\.|__?|-+|/)[a-z0-9]+)*"
_IN_REGISTRY = rf"(?a)\w[\w.-]*(:\d+)?/{_PATH}(:\w[\w.-]{{0,127}})?(@sha256:[\da-f]{{64}})?"

Word = Annotated[str, _matching(r"[\w.:/@%+,=#-]+", "a name without spaces")]
Namespace = Annotated[str, _matching(_LABEL, "lower-case letters, digits and -, at most 63")]
Named = Annotated[str, _matching(_LABELS, "lower-case letters, digits, - and .")]
Resource = Annotated[str, _matching(rf"{_LABELS}/\w[\w.-]{{0,62}}", "such as rdma/hca")]
Memory = Annotated[int, Parameter(converter=_gibibytes, metavar="SIZE")]


@dataclass(frozen=True, kw_only=True)
class Node:
    """What Slurm, PBS and Kubernetes reserve."""

    cpus: Count | None = None
    """CPU cores of a worker (8 under Slurm and PBS)."""

    memory: Memory | None = None
    """Memory of a node, such as 400G."""


@dataclass(frozen=True, kw_only=True)
class Queue:
    """Options of Slurm and PBS."""

    time: Seconds | None = None
    """Longest time, such as 90m (8h); a longer run saves, is queued again and resumes."""

    cluster: ClusterName | None = None
    """Cluster that the time is predicted for: a name of `lab clusters`, or a file."""

    partition: Word | None = None
    """Partition of Slurm, or queue of PBS."""

    account: Word | None = None
    """Account that pays."""

    exclusive: bool = False
    """Reserve whole nodes, under Slurm with all of their memory."""


@dataclass(frozen=True, kw_only=True)
class Pods:
    """Options of Kubernetes."""

    namespace: Namespace | None = None
    """Namespace of the job."""

    env_secret: Named | None = None
    """Secret whose keys become variables, such as WANDB_API_KEY."""

    data_claim: Named = "data"
    """PersistentVolumeClaim that is mounted at /data, if the recipe reads a folder."""

    runs_claim: Named = "runs"
    """PersistentVolumeClaim that is mounted at /runs."""

    shared_memory: Memory | None = None
    """Largest /dev/shm (unlimited)."""

    host_ipc: bool = False
    """Share memory with the node's other pods, as NCCL does between GPUs of one node."""

    rdma: Resource | None = None
    """Resource of an RDMA card, such as rdma/hca_shared_devices_a."""


@dataclass(frozen=True, kw_only=True)
class Job(Changes):
    """Options of `launch`."""

    nodes: Count
    """Number of hosts."""

    gpus_per_node: Count = 8
    """Workers of each host."""

    data: Annotated[Path | None, Parameter(metavar="DIR")] = None
    """Images, as for `train`; in pods a folder below /data, which is the default."""

    out: Annotated[Path | None, Parameter(metavar="DIR")] = None
    """Run folder (runs/NAME); in pods a folder below /runs."""

    name: Annotated[str | None, Parameter(metavar="NAME")] = None
    """Name of the job (the recipe's)."""

    image: Word | None = None
    """Container image: a file .sif of Apptainer, under Slurm one of pyxis; pods need one."""

    node: Annotated[Node, Parameter(name="*", group="Slurm, PBS and Kubernetes")] = Node()
    queue: Annotated[Queue, Parameter(name="*", group="Slurm and PBS")] = Queue()
    pods: Annotated[Pods, Parameter(name="*", group="Kubernetes")] = Pods()


def launch(kind: Kind, recipe: RecipeFile, /, *, job: Annotated[Job, Given]) -> None:
    """Print the job that trains a recipe on a cluster.

    Args:
        kind: Kind of job.
    """
    owners: dict[tuple[str, ...], Node | Queue | Pods] = {
        ("slurm", "pbs", *KUBERNETES): job.node, SCHEDULERS: job.queue, KUBERNETES: job.pods,
    }  # fmt: skip
    for kinds, options in owners.items():
        for field in fields(options):
            if kind not in kinds and getattr(options, field.name) != field.default:
                flag = f"--{field.name.replace('_', '-')}"
                raise LargebatchError(f"launch {kind} has no {flag}; it is for {', '.join(kinds)}")
    if job.queue.time and job.queue.cluster:
        raise LargebatchError("--time and --cluster each choose the time; leave one out")
    loaded = load_recipe(recipe, job.changes)
    if kind not in BY_TORCH:
        use = f"launch {', '.join(BY_TORCH[:-1])} or {BY_TORCH[-1]}"
        try:
            loaded.require_backend("horovod", use=use)
        except RecipeError as error:
            raise RecipeError(f"launch {kind}: {error}") from None
    loaded.refuse_folder(job.data)
    gpus = job.gpus_per_node
    name = re.sub(r"[^\w.-]+", "-", job.name or loaded.name).strip("-.") or "run"
    try:
        make_plan(loaded, workers=job.nodes * gpus, backend="torch")
    except PlanError as error:
        raise PlanError(f"--nodes {job.nodes} with {plural(gpus, 'GPU')} each: {error}") from None
    render = _manifest if kind in KUBERNETES else _script
    sys.stdout.write(render(kind, recipe, loaded, replace(job, name=name)))


def _predict_time(job: Job, recipe: Recipe, name: str) -> float:
    """Print and return the seconds to reserve for a run on a cluster."""
    from largebatch.lab.planner.prediction import predict, workload

    cluster = load_cluster(name)
    if job.gpus_per_node != cluster.gpus_per_node:
        raise LargebatchError(
            f"--gpus-per-node {job.gpus_per_node}: a node of {cluster.name} has "
            f"{cluster.gpus_per_node}; give that, or leave out --cluster"
        )
    found = predict(workload(recipe, workers=job.nodes * job.gpus_per_node), cluster)
    time = SHORTEST * math.ceil((found.high + SAVING) / SHORTEST)
    print(
        f"largebatch: --time {time // 60}m: {duration(found.seconds)} predicted on {cluster.name} "
        f"({duration(found.low)} to {duration(found.high)}), 10 min to start and save",
        file=sys.stderr,
    )
    return time


def _places(kind: str, source: Path, weights: str | None, job: Job) -> dict[str, Path]:
    """Return the files and folders of this host that a job uses, by option or key."""
    files_of_job = {
        "RECIPE": source if source.is_file() else None,
        "model.weights": Path(weights) if weights else None,
        "--image": Path(job.image) if job.image and _FILE.match(job.image) else None,
    }
    given = files_of_job | {"--data": job.data, "--out": job.out}
    places = {
        key: Path(posixpath.normpath(place.absolute()))
        for key, place in given.items()
        if place is not None
    }
    for key, place in places.items():
        if key in files_of_job and not place.is_file():
            raise LargebatchError(f"{key}: {place}: there is no such file; correct the path")
        is_remote = job.nodes > 1 or (key in files_of_job and kind in SCHEDULERS)
        if is_remote and any(place.is_relative_to(folder) for folder in LOCAL):
            raise LargebatchError(
                f"{key}: {place}: each host has this folder for itself; use a shared file system"
            )
    return places


def _script(kind: str, source: Path, recipe: Recipe, job: Job) -> str:
    """Return a script whose settings have the job's values; each key is the start of a line."""
    gpus, node, queue = job.gpus_per_node, job.node, job.queue
    places = _places(kind, source, recipe.model.weights, job)
    options = _options(job)
    if weights := places.get("model.weights"):
        options += ["--set", f"model.weights={weights}"]
    if data := places.get("--data"):
        options += ["--data", str(data)]
    elif recipe.data.source == "folder":
        raise LargebatchError(f"launch {kind}: {recipe.name} reads a folder of images; give --data")
    if places.get("--out", Path()).is_relative_to(Path.cwd()):
        del places["--out"]  # its folder may not exist yet
    image_file = places.pop("--image", None)
    folders = [place if key == "--data" else place.parent for key, place in places.items()]
    mounts = [f"{folder}:{folder}" for folder in dict.fromkeys(folders)]
    python, image = [sys.executable], str(image_file or job.image or "")
    if image.endswith(".sif"):
        binds = [word for mount in mounts for word in ("--bind", mount)]
        python = ["apptainer", "exec", "--nv", *binds, image, "python3"]
        image = ""
    elif image:
        python = ["python3"]
        if kind != "slurm":
            raise LargebatchError(
                f"--image {image}: launch {kind} takes a file .sif of Apptainer; other images are "
                f"for slurm, {', '.join(KUBERNETES)}"
            )
        if found := re.fullmatch(r"((?:docker://)?[\w.-]+(?:\.[\w-]+|:\d+))/([^#]+)", image):
            raise LargebatchError(
                f"--image {image}: pyxis expects REGISTRY#IMAGE; give {found[1]}#{found[2]}"
            )
    seconds, cpus = queue.time or 8 * 3600, node.cpus or 8
    if queue.cluster is not None:
        seconds = _predict_time(job, recipe, queue.cluster)
    if seconds < SHORTEST:
        raise LargebatchError(f"--time {seconds:g}s: too short to start and save; give 5m or more")
    hours, minutes = divmod(math.ceil(seconds / 60), 60)
    name = job.name or ""
    reserved = {"partition": queue.partition, "account": queue.account}
    reserved["mem"] = f"{node.memory}G" if node.memory else "0" if queue.exclusive else None
    slurm = [f"\n#SBATCH --{key}={value}" for key, value in reserved.items() if value]
    slurm += ["\n#SBATCH --exclusive"] * queue.exclusive
    place = "place=scatter:excl" if queue.exclusive else None
    reserved = {"q": queue.partition, "A": queue.account, "l": place}
    pbs = [f"\n#PBS -{key} {value}" for key, value in reserved.items() if value]
    settings = {
        "RECIPE=": shlex.quote(str(places.get("RECIPE", source))),
        "OUT=": shlex.quote(str(job.out or f"runs/{name}")),
        "OPTIONS=": f"({shlex.join(options)})",
        "python=": f"({shlex.join(python)})",
        "IMAGE=": image and shlex.quote(image),
        "MOUNTS=": ",".join(["$PWD:$PWD", *map(shlex.quote, mounts)]),
        "WORKERS=": job.nodes * gpus,
        "NODES=": job.nodes,
        "GPUS=": gpus,
        "LIMIT=": f"{int(max(seconds - SAVING, seconds / 2)) // 60}m",
        "#SBATCH --job-name=": "".join([name, *slurm]),
        "#SBATCH --nodes=": job.nodes,
        "#SBATCH --gpus-per-node=": gpus,
        "#SBATCH --ntasks-per-node=": gpus,
        "#SBATCH --cpus-per-task=": cpus,
        "#SBATCH --time=": f"{hours:02}:{minutes:02}:00",
        "#PBS -N ": "".join([name, *pbs]),
        "#PBS -l select=": f"{job.nodes}:ncpus={cpus * gpus}:ngpus={gpus}:mpiprocs={gpus}"
        + (f":mem={node.memory}gb" if node.memory else ""),
        "#PBS -l walltime=": f"{hours:02}:{minutes:02}:00",
    }
    template = (files("largebatch") / "launch" / KINDS[kind]).read_text(encoding="utf-8")
    template = template.replace("node1:8,node2:8", f"node1:{gpus},node2:{gpus}")
    template = re.sub(r".*\$\{PYTHON.*\n", "", template)  # a job has its own
    return re.sub(
        rf"^({'|'.join(map(re.escape, settings))}).*$",
        lambda line: f"{line[1]}{settings[line[1]]}",
        template.replace(f"launch/{KINDS[kind]}", "job.sh"),  # in its comments
        flags=re.MULTILINE,
    )


def _manifest(kind: str, source: Path, recipe: Recipe, job: Job) -> str:
    """Return a manifest of Kubernetes; data are mounted at /data, runs at /runs."""
    own, weights, gpus = source.is_file(), recipe.model.weights or "", job.gpus_per_node
    options, out = _options(job), PurePosixPath("/runs", job.out or job.name or "")
    reads_data = recipe.data.source == "folder"
    options += ["--data", str(job.data or "/data")] * reads_data
    if not re.fullmatch(_IN_REGISTRY, job.image or "") or _FILE.match(job.image or ""):
        raise LargebatchError(
            f"launch {kind}: pods need --image HOST/NAME:TAG, built from launch/Dockerfile; "
            f"found {job.image or 'none'}"
        )
    for module in job.imports:
        print(f"largebatch: --import {module}: the image has to contain it", file=sys.stderr)
    for option, path, folders, remedy in (
        ("model.weights:", weights, ("/data", "/runs"), "copy it there, --set model.weights=PATH"),
        ("--data", str(job.data or ""), ("/data",), "give a folder there"),
        ("--out", str(out), ("/runs",), "give a folder there"),
    ):
        if path and not _inside(path, *folders):
            places = " and ".join(folders)
            raise LargebatchError(f"{option} {path}: pods have {places} for it; {remedy}")
    label = re.sub(r"[^a-z0-9]+", "-", (job.name or "").lower())[:40].strip("-")
    manifests = Environment(  # noqa: S701 -- YAML, whose words are quoted
        loader=FileSystemLoader(str(files("largebatch") / "launch")), undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    manifests.filters["word"] = lambda word: json.dumps(word.replace("$", "$$"), ensure_ascii=False)
    return manifests.get_template(KINDS[kind]).render(
        vars(job) | vars(job.pods) | vars(job.node),
        name=label if label[:1].isalpha() else f"run-{label}".rstrip("-"),
        recipe="/recipe/recipe.yaml" if own else str(source),
        recipe_text=read_text(source, what="recipe").rstrip() if own else "",
        reads_data=reads_data or _inside(weights, "/data"),
        protocol=recipe.protocol is not None,
        out=str(out),
        options=options,
        workers=job.nodes * gpus,
    )


def _options(job: Job) -> list[str]:
    words = ["--resume", "auto"]
    words += [word for change in job.changes for word in ("--set", change)]
    return words + [word for module in job.imports for word in ("--import", module)]


def _inside(path: str, *folders: str) -> bool:
    """Return True if a path in a pod is in one of these folders, or is one."""
    found = PurePosixPath(posixpath.normpath(path))
    return any(found.is_relative_to(folder) for folder in folders)
