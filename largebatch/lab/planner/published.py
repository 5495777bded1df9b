"""Published MLPerf runs of ResNet-50, read from CSV, and their work on a cluster."""

import csv
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from itertools import takewhile

from largebatch.lab.planner.cluster import (
    Cluster,
    ClusterError,
    Generation,
    Gpu,
    Software,
    installed_clusters,
)
from largebatch.lab.planner.model import Constants, Load, evaluation_seconds, machine, step_seconds

IMAGES, VALIDATION = 1_281_167, 50_000
EVALUATE_EVERY = 4
"""Epochs between two evaluations, by MLPerf's rules."""

_BEFORE_80GB = {"v0.6", "v0.7"}
"""Rounds before the A100 with 80 GB was announced (November 2020)."""

_FORMS = re.compile("SXM|PCIE|NVL|OAM")
"""Form factors of a chip, which decide its power and bandwidth."""

_CTS_WATTS = 500.0
"""Watts of an A100 with custom thermal solution (MLPerf v2.0 system description)."""

_GRAPHS_SINCE = 1.0
"""The first round in which NVIDIA's entries capture their steps as CUDA graphs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """Result of one system, and the work of its steps."""

    round: str
    submitter: str
    system: str
    cluster: Cluster
    workers: int
    global_batch: int
    epochs: float
    seconds: float
    bn_span: int
    overlap: bool

    @property
    def device_batch(self) -> int:
        """Images on each GPU."""
        return self.global_batch // self.workers

    @property
    def generation(self) -> Generation:
        """Generation of its GPUs."""
        assert self.cluster.gpu is not None
        return self.cluster.gpu.generation

    @property
    def software(self) -> Software:
        """How its steps were launched."""
        return "graphs" if float(self.round.lstrip("v")) >= _GRAPHS_SINCE else "launched"

    @property
    def load(self) -> Load:
        """Work of a step."""
        return Load(
            workers=self.workers,
            device_batch=self.device_batch,
            overlap=self.overlap,
            sync_workers=max(1, self.bn_span // self.device_batch),
        )


def predicted_seconds(run: Published, constants: Constants) -> float:
    """Return the time of a run: its start, whole steps of every epoch, and its evaluations.

    The entries start each epoch with a new batch, so an epoch has ceil(images / batch) steps; their
    learning-rate schedules, which count steps, confirm it.
    """
    on = machine(run.cluster, constants, software=run.software)
    steps = run.epochs * math.ceil(IMAGES / run.global_batch)
    one = evaluation_seconds(on, workers=run.workers, samples=VALIDATION)
    evaluations = run.epochs / EVALUATE_EVERY * one
    return on.start + steps * step_seconds(on, run.load).seconds + evaluations


@cache
def published_runs() -> tuple[Published, ...]:
    """Return the installed runs, each system once."""
    file = files("largebatch") / "lab" / "planner" / "mlperf_resnet50_runs.csv"
    runs = parse_runs(file.read_text(encoding="utf-8").splitlines())
    return tuple({(run.submitter, run.system, run.seconds): run for run in runs}.values())


def parse_runs(lines: Iterable[str]) -> list[Published]:
    """Return the runs in lines of CSV; one that starts with # is a comment.

    Raises ClusterError for a GPU that no installed cluster has.
    """
    return [_run(row) for row in csv.DictReader(line for line in lines if line[:1] != "#")]


def _run(row: dict[str, str]) -> Published:
    workers, nodes = int(row["accelerators"]), int(row["nodes"])
    cluster = _cluster(row, workers // nodes, nodes=nodes)
    return Published(
        round=row["round"],
        submitter=row["submitter"],
        system=row["system"],
        cluster=cluster.model_copy(update={"sharp": row["sharp"] == "yes"}),
        workers=workers,
        global_batch=int(row["global_batch"]),
        epochs=(float(row["epochs_min"]) + float(row["epochs_max"])) / 2,
        seconds=float(row["seconds"]),
        bn_span=int(row["bn_span"]),
        overlap=row["overlap"] == "yes",
    )


def _cluster(row: dict[str, str], gpus_per_node: int, *, nodes: int = 1) -> Cluster:
    """Return the installed cluster with these GPUs and as many in a node, or the most similar one.

    For several nodes, one with a network is preferred.

    >>> row = {"round": "v0.7", "system": "2xC4140", "accelerator": "V100-SXM2"}
    >>> _cluster(row, 4).name
    'c4140-v100'
    """
    named = re.sub(r"^\d+x|[^a-z0-9]", "", row["system"].lower())
    found = re.sub(r"NVIDIA|TESLA|[^A-Z0-9]", "", row["accelerator"].upper())
    found = found.replace("A100SXM80", "A100SXM480").replace("A100SXM40", "A100SXM440")
    if row["round"] in _BEFORE_80GB:
        found = found.replace("A100SXM480GB", "A100SXM440GB")

    def likeness(one: Cluster) -> tuple[bool, bool, int, bool]:
        assert one.gpu is not None
        letters = zip(one.gpu.name.upper().replace("-", ""), found, strict=False)
        common = len(list(takewhile(lambda pair: pair[0] == pair[1], letters)))
        form = _FORMS.search(found)
        place = named.startswith(one.name.partition("-")[0])
        fits = common >= len("V100") and (form is None or form.group() in one.gpu.name)
        linked = nodes == 1 or one.network_gigabytes_per_second is not None
        return fits, linked, common + 3 * place, one.gpus_per_node == gpus_per_node

    best = max(installed_clusters().values(), key=likeness)
    if not likeness(best)[0]:
        raise ClusterError(f"{row['system']}: no installed cluster has {row['accelerator']}")
    assert best.gpu is not None
    gpu = _with_watts(best.gpu, row["accelerator"].upper())
    return best.model_copy(update={"gpus_per_node": gpus_per_node, "gpu": gpu})


def _with_watts(gpu: Gpu, accelerator: str) -> Gpu:
    named = re.search(r"(\d{3,4})W\b", accelerator)
    watts = float(named[1]) if named else _CTS_WATTS if "CTS" in accelerator else gpu.watts
    if watts == gpu.watts:
        return gpu
    return gpu.model_copy(update={"watts": watts, "peak_watts": gpu.peak_watts or gpu.watts})
