"""The command `launch`: print the script or manifest that starts a run on a cluster. It prints.

Each kind of job is a Jinja template of its name, in the folder of the library that connects its
workers: launch/torch or launch/horovod. Manifests of Kubernetes (.yaml) share pod.yaml. A kind
takes the options whose variables are in its template. The plan is made first, so that a batch which
cannot be divided is never submitted.
"""

import json
import math
import posixpath
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from importlib.resources import files
from pathlib import Path, PurePosixPath
from typing import Annotated

from cyclopts import Parameter, Token
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from jinja2.meta import find_referenced_templates, find_undeclared_variables

from largebatch.address import Address
from largebatch.cli.recipe import ClusterName
from largebatch.errors import LargebatchError, PlanError, RecipeError, nearest
from largebatch.formatting import duration, plural
from largebatch.lab.planner.cluster import load_cluster
from largebatch.recipe.arithmetic.plan import make_plan
from largebatch.recipe.loading import load_recipe, read_text
from largebatch.recipe.recipe import Recipe
from largebatch.runs.options import (
    Changes,
    Count,
    DataPlace,
    Given,
    MirrorAddress,
    Number,
    RecipeFile,
    Seconds,
    require_cached_address,
)

TEMPLATES = Path(str(files("largebatch") / "launch"))
BY_TORCH = sorted(path.stem for path in (TEMPLATES / "torch").iterdir())
"""Kinds of jobs whose workers torch.distributed connects; Horovod connects the others."""

KINDS = {
    path.stem: path for path in sorted(TEMPLATES.glob("*/*"), key=lambda template: template.stem)
}
"""Templates by kind of job."""

_LOADER = FileSystemLoader([TEMPLATES, TEMPLATES / "torch", TEMPLATES / "horovod"])

KUBERNETES = [kind for kind, template in KINDS.items() if template.suffix == ".yaml"]

LOCAL = tuple(map(Path, ("/tmp", "/var/tmp", "/dev/shm", "/run")))  # noqa: S108 -- refused
"""Folders that every host has for itself."""

DEFAULT_SECONDS = 8 * 3600  # time of a job without --time
SHORTEST_SECONDS = 300  # shortest time of a job

SAVING_SECONDS = 600
"""What PBS keeps of a job's time for saving, at most half of it."""


def _require_kind(_: object, word: str) -> None:
    if word in KINDS:
        return
    if word.lower() in {"k8s", "kubernetes", "kubectl", "kubeflow"}:
        raise ValueError(f"on Kubernetes it is one of: {', '.join(KUBERNETES)}")
    expected = f"expected one of: {', '.join(KINDS)}"
    raise ValueError(nearest(word, KINDS, otherwise=expected, most=1))


JobKind = Annotated[
    str, Parameter(validator=_require_kind, help=f"Kind of job: {', '.join(KINDS)}.")
]


def _gibibytes(_: object, tokens: Sequence[Token]) -> int:
    size = re.fullmatch(r"([1-9]\d*)([GT])", tokens[0].value)
    if size is None:
        raise ValueError(f"expected such as 400G or 2T, got {tokens[0].value!r}")
    return int(size[1]) * (1024 if size[2] == "T" else 1)


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
ObjectName = Annotated[str, _matching(_LABELS, "lower-case letters, digits, - and .")]
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

    env_secret: ObjectName | None = None
    """Secret whose keys become variables, such as WANDB_API_KEY."""

    service_account: ObjectName | None = None
    """Service account of the pods, which may give them access to storage."""

    data_claim: ObjectName = "data"
    """PersistentVolumeClaim that is mounted at /data, if the recipe reads a folder."""

    runs_claim: ObjectName = "runs"
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

    data: DataPlace | None = None
    """Images, as for `train`; in pods a folder below /data, which is the default, or an address."""

    cache_dir: Annotated[Path | None, Parameter(metavar="DIR")] = None
    """Folder on each host's own disk that keeps what is read from the address of --data."""

    cache_gb: Annotated[Number | None, Parameter(metavar="N")] = None
    """Bytes of --cache-dir on a host, in 10^9 (all)."""

    out: Annotated[Path | None, Parameter(metavar="DIR")] = None
    """Run folder (runs/NAME); in pods a folder below /runs."""

    mirror: MirrorAddress | None = None
    """Copy the run folder below this address, from which the job continues on other machines."""

    name: Annotated[str | None, Parameter(metavar="NAME")] = None
    """Name of the job (the recipe's)."""

    image: Word | None = None
    """Container image: a file .sif of Apptainer, under Slurm one of pyxis; pods need one."""

    node: Annotated[Node, Parameter(name="*", group="Slurm, PBS and Kubernetes")] = Node()
    queue: Annotated[Queue, Parameter(name="*", group="Slurm and PBS")] = Queue()
    pods: Annotated[Pods, Parameter(name="*", group="Kubernetes")] = Pods()


def launch(kind: JobKind, recipe: RecipeFile, /, *, job: Annotated[Job, Given]) -> None:
    """Print the job that trains a recipe on a cluster."""
    if job.queue.time and job.queue.cluster:
        raise LargebatchError("--time and --cluster each choose the time; leave one out")
    # An option that its template does not use would be lost silently.
    _refuse_unused_options(kind, job)
    loaded = load_recipe(recipe, job.changes)
    if kind not in BY_TORCH:
        use = f"launch {', '.join(BY_TORCH[:-1])} or {BY_TORCH[-1]}"
        try:
            loaded.require_backend("horovod", use=use)
        except RecipeError as error:
            raise RecipeError(f"launch {kind}: {error}") from None
    loaded.refuse_folder(job.data)
    gpus = job.gpus_per_node
    # Schedulers refuse spaces and signs in names of jobs.
    name = re.sub(r"[^\w.-]+", "-", job.name or loaded.name).strip("-.") or "run"
    # A batch that the workers cannot divide is refused here, not in a queue a day later.
    try:
        make_plan(loaded, workers=job.nodes * gpus, backend="torch")
    except PlanError as error:
        raise PlanError(f"--nodes {job.nodes} with {plural(gpus, 'GPU')} each: {error}") from None
    job = replace(job, name=name)
    values = _values_of_all_kinds(job)
    if kind in KUBERNETES:
        values |= _values_of_manifest(kind, recipe, loaded, job)
    else:
        values |= _values_of_script(kind, recipe, loaded, job)
    template = _templates().get_template(KINDS[kind].name)
    sys.stdout.write(template.render(values))


def _templates() -> Environment:
    """Return Jinja's environment of all templates; a variable that is not given is an error."""
    templates = Environment(  # noqa: S701 -- no HTML: words are quoted for the shell or for YAML
        loader=_LOADER,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    del templates.globals["namespace"]  # a function of Jinja; here the option is meant
    templates.filters["quote"] = shlex.quote
    # The words of JSON are words of YAML, too.
    # A string of YAML. Kubernetes expands $(NAME) in it, and reads $$ as $.
    templates.filters["word"] = lambda word: json.dumps(word.replace("$", "$$"), ensure_ascii=False)
    return templates


@cache
def _variables(kind: str) -> set[str]:
    """Return the variables of a template and of those that it imports."""
    templates = _templates()
    names: set[str | None] = {KINDS[kind].name}
    variables: set[str] = set()
    while names:
        source, _, _ = _LOADER.get_source(templates, names.pop() or "")
        syntax = templates.parse(source)
        variables |= find_undeclared_variables(syntax)
        names |= set(find_referenced_templates(syntax))
    return variables


def _refuse_unused_options(kind: str, job: Job) -> None:
    for options in (job.node, job.queue, job.pods):
        for field in fields(options):
            if getattr(options, field.name) == field.default:
                continue
            # --cluster chooses the time.
            variable = "time" if field.name == "cluster" else field.name
            if variable not in _variables(kind):
                flag = f"--{field.name.replace('_', '-')}"
                kinds = [other for other in KINDS if variable in _variables(other)]
                raise LargebatchError(f"launch {kind} has no {flag}; it is for {', '.join(kinds)}")


def _predict_time(job: Job, recipe: Recipe, name: str) -> float:
    """Print and return the seconds to reserve for a run on a cluster."""
    from largebatch.lab.planner.prediction import predict, workload

    cluster = load_cluster(name)
    if job.gpus_per_node != cluster.gpus_per_node:
        raise LargebatchError(
            f"--gpus-per-node {job.gpus_per_node}: a node of {cluster.name} has "
            f"{cluster.gpus_per_node}; give that, or leave out --cluster"
        )
    prediction = predict(workload(recipe, workers=job.nodes * job.gpus_per_node), cluster)
    time = SHORTEST_SECONDS * math.ceil((prediction.high + SAVING_SECONDS) / SHORTEST_SECONDS)
    print(
        f"largebatch: --time {time // 60}m: {duration(prediction.seconds)} predicted on "
        f"{cluster.name} ({duration(prediction.low)} to {duration(prediction.high)}), 10 min to "
        "start and save",
        file=sys.stderr,
    )
    return time


def _values_of_all_kinds(job: Job) -> dict[str, object]:
    """Return the values of variables that have the names of options, and the number of workers."""
    options = {**vars(job.node), **vars(job.queue), **vars(job.pods)}
    return {
        **options,
        "name": job.name,
        "nodes": job.nodes,
        "gpus_per_node": job.gpus_per_node,
        "workers": job.nodes * job.gpus_per_node,
    }


def _absolute_paths(kind: str, source: Path, weights: str | None, job: Job) -> dict[str, Path]:
    """Return the files and folders of this host that a job uses, by option or key."""
    files_of_job = {
        "RECIPE": source if source.is_file() else None,
        "model.weights": Path(weights) if weights else None,
        "--image": Path(job.image) if job.image and _FILE.match(job.image) else None,
    }
    folder = job.data if isinstance(job.data, Path) else None  # an address is no path
    named = files_of_job | {"--data": folder, "--out": job.out}
    paths = {
        key: Path(posixpath.normpath(path.absolute()))
        for key, path in named.items()
        if path is not None
    }
    # A scheduler starts even a job of one node on another host.
    is_scheduled = "time" in _variables(kind)
    for key, path in paths.items():
        if key in files_of_job and not path.is_file():
            raise LargebatchError(f"{key}: {path}: there is no such file; correct the path")
        is_remote = job.nodes > 1 or (key in files_of_job and is_scheduled)
        if is_remote and any(path.is_relative_to(folder) for folder in LOCAL):
            raise LargebatchError(
                f"{key}: {path}: each host has this folder for itself; use a shared file system"
            )
    return paths


def _values_of_script(kind: str, source: Path, recipe: Recipe, job: Job) -> dict[str, object]:
    paths = _absolute_paths(kind, source, recipe.model.weights, job)
    options = _options(job)
    if weights := paths.get("model.weights"):
        options += ["--set", f"model.weights={weights}"]
    if data := paths.get("--data", job.data):
        options += ["--data", str(data)]
    elif recipe.data.source == "folder":
        raise LargebatchError(f"launch {kind}: {recipe.name} reads a folder of images; give --data")
    python, image, mounts = _container(kind, paths, job)
    seconds = job.queue.time or DEFAULT_SECONDS
    if job.queue.cluster is not None:
        seconds = _predict_time(job, recipe, job.queue.cluster)
    if seconds < SHORTEST_SECONDS:
        raise LargebatchError(f"--time {seconds:g}s: too short to start and save; give 5m or more")
    # Schedulers count whole minutes; rounded up, so that a run is not cut off.
    hours, minutes = divmod(math.ceil(seconds / 60), 60)
    return {
        "recipe": str(paths.get("RECIPE", source)),
        "out": str(job.out or f"runs/{job.name}"),
        "options": options,
        "python": python,
        "image": image,
        "mounts": mounts,
        "time": f"{hours:02}:{minutes:02}:00",
        "time_limit": f"{int(max(seconds - SAVING_SECONDS, seconds / 2)) // 60}m",
    }


def _container(kind: str, paths: dict[str, Path], job: Job) -> tuple[list[str], str, list[str]]:
    """Return the command of Python, the image of pyxis or an empty string, and what it mounts."""
    folders = [
        path if key == "--data" else path.parent
        for key, path in paths.items()
        if key != "--image"
        # A folder below the current one is seen with it, and may not exist yet.
        and not (key == "--out" and path.is_relative_to(Path.cwd()))
    ]
    if job.cache_dir is not None:
        folders.append(job.cache_dir)
    mounts = [f"{folder}:{folder}" for folder in dict.fromkeys(folders)]
    image = str(paths.get("--image") or job.image or "")
    if not image:
        return [sys.executable], "", mounts
    if image.endswith(".sif"):
        binds = [word for mount in mounts for word in ("--bind", mount)]
        return ["apptainer", "exec", "--nv", *binds, image, "python3"], "", mounts
    if "image" not in _variables(kind):
        kinds = [other for other in KINDS if "image" in _variables(other)]
        raise LargebatchError(
            f"--image {image}: launch {kind} takes a file .sif of Apptainer; other images are "
            f"for {', '.join(kinds)}"
        )
    if match := re.fullmatch(r"((?:docker://)?[\w.-]+(?:\.[\w-]+|:\d+))/([^#]+)", image):
        raise LargebatchError(
            f"--image {image}: pyxis expects REGISTRY#IMAGE; give {match[1]}#{match[2]}"
        )
    return ["python3"], image, mounts


def _values_of_manifest(kind: str, source: Path, recipe: Recipe, job: Job) -> dict[str, object]:
    """Return the values of a manifest of Kubernetes; data are mounted at /data, runs at /runs."""
    weights = recipe.model.weights or ""
    out = PurePosixPath("/runs", job.out or job.name or "")
    options = _options(job)
    folder = "" if job.data is None or isinstance(job.data, Address) else str(job.data)
    reads_folder = recipe.data.source == "folder" and not isinstance(job.data, Address)
    if recipe.data.source == "folder":
        options += ["--data", str(job.data or "/data")]
    if not re.fullmatch(_IN_REGISTRY, job.image or "") or _FILE.match(job.image or ""):
        raise LargebatchError(
            f"launch {kind}: pods need --image HOST/NAME:TAG, built from launch/Dockerfile; "
            f"found {job.image or 'none'}"
        )
    for module in job.imports:
        print(f"largebatch: --import {module}: the image has to contain it", file=sys.stderr)
    for option, path, folders, remedy in (
        ("model.weights:", weights, ("/data", "/runs"), "copy it there, --set model.weights=PATH"),
        ("--data", folder, ("/data",), "give a folder there"),
        ("--out", str(out), ("/runs",), "give a folder there"),
    ):
        if path and not _inside(path, *folders):
            expected = " and ".join(folders)
            raise LargebatchError(f"{option} {path}: pods have {expected} for it; {remedy}")
    # Names of Kubernetes are labels of DNS, which begin with a letter; it adds suffixes to them.
    label = re.sub(r"[^a-z0-9]+", "-", (job.name or "").lower())[:40].strip("-")
    is_file = source.is_file()
    return {
        "name": label if label[:1].isalpha() else f"run-{label}".rstrip("-"),
        "image": job.image,
        "recipe": "/recipe/recipe.yaml" if is_file else str(source),
        "recipe_text": read_text(source, what="recipe").rstrip() if is_file else "",
        "reads_data": reads_folder or _inside(weights, "/data"),
        "protocol": recipe.protocol is not None,
        "out": str(out),
        "options": options,
    }


def _options(job: Job) -> list[str]:
    words = ["--resume", "auto"]
    if job.mirror is not None:
        words += ["--mirror", str(job.mirror)]
    words += [word for change in job.changes for word in ("--set", change)]
    require_cached_address(job.data, job.cache_dir, job.cache_gb)
    if job.cache_dir is not None:
        words += ["--cache-dir", str(job.cache_dir)]
    if job.cache_gb is not None:
        words += ["--cache-gb", f"{job.cache_gb:g}"]
    return words + [word for module in job.imports for word in ("--import", module)]


def _inside(path: str, *folders: str) -> bool:
    """Return True if a path in a pod is in one of these folders, or is one."""
    normal = PurePosixPath(posixpath.normpath(path))
    return any(normal.is_relative_to(folder) for folder in folders)
