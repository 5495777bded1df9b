"""Cluster files: the description of a machine, from data sheets or measured.

Every figure of an installed file names its source in a comment. Bandwidths are in gigabytes (1e9
bytes) a second in one direction, as an all-reduce uses them; data sheets of links give the sum of
both directions, in bits or in bytes.
"""

from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, JsonValue, PositiveFloat, PositiveInt, ValidationError, model_validator

from largebatch.errors import LargebatchError, nearest
from largebatch.formatting import plural
from largebatch.recipe.loading import parse_yaml, read_text
from largebatch.recipe.problems import explain_problems
from largebatch.recipe.section import Section

Generation = Literal["volta", "ampere", "hopper", "blackwell"]
Software = Literal["launched", "graphs"]


class ClusterError(LargebatchError):
    """A cluster is unknown or too small, or its file cannot be used."""


Gigabytes = Annotated[float, Field(gt=0, le=10_000)]
"""Memory of one GPU in gigabytes."""

Bandwidth = Annotated[float, Field(ge=0.01, le=100_000)]
"""Bandwidth of a link or a network in gigabytes a second."""

Watts = Annotated[float, Field(ge=1, le=100_000)]


class Gpu(Section):
    """One accelerator, by its data sheet.

    The bounds are far from any GPU: a figure beyond them is in other units.
    """

    name: str
    generation: Generation
    memory_gigabytes: Gigabytes
    tensor_teraflops: Annotated[float, Field(ge=1, le=1_000_000)]
    """Peak of dense fp16 matrix products."""

    memory_gigabytes_per_second: Annotated[float, Field(ge=10, le=1_000_000)]
    watts: Watts
    peak_watts: Watts | None = None
    """Watts of the variant of the chip whose tensor peak is given; null: this one."""

    link_gigabytes_per_second: Bandwidth
    """Bandwidth to the other GPUs of its node, in one direction."""


class Measured(Section):
    """Measurement of a machine by `largebatch plan --calibrate`, for one recipe."""

    settings: dict[str, JsonValue]
    """Settings that decide the times, by their keys (planner.prediction.SETTINGS)."""

    device: str
    seconds_per_image: PositiveFloat
    """Forward and backward of one more image in a device batch."""

    seconds_per_pass: Annotated[float, Field(ge=0)]
    """Fixed seconds of a device batch."""

    seconds_per_update: Annotated[float, Field(ge=0)]
    gradient_bytes: PositiveFloat
    """Bytes that each worker sends in an update."""

    messages: PositiveInt
    """All-reduces of an update: the groups of gradients, and the loss."""

    norm_layers: Annotated[int, Field(ge=0)]
    exchange_seconds: Annotated[float, Field(ge=0)]
    """Fixed seconds of an all-reduce between two workers."""

    exchange_gigabytes_per_second: PositiveFloat | None
    """Bandwidth of an all-reduce; null if measured on one device."""

    images_per_second_read: PositiveFloat
    """Images a second that one worker reads and augments."""

    error: Annotated[float, Field(gt=0, lt=1)] = 0.15
    """Half the width of the interval of predictions, as a ratio."""


class Cluster(Section):
    """Nodes with equal GPUs, or with measured workers, and the network between them."""

    name: str = ""
    """Name of its file."""

    gpu: Gpu | None = None
    measured: Measured | None = None
    gpus_per_node: PositiveInt
    """Workers that share a node; on CPUs, its cores."""

    nodes: PositiveInt
    network_gigabytes_per_second: Bandwidth | None = None
    """Bandwidth of a node, in one direction; null for one node."""

    sharp: bool = False
    """true: switches sum gradients, so that half the bytes cross the network."""

    cpu_cores: PositiveInt
    """CPU cores of a node."""

    software: Software = "graphs"
    """launched: the CPU starts every kernel, as until MLPerf v0.7. graphs: CUDA graphs."""

    price_per_gpu_hour: PositiveFloat | None = None
    """Price in any currency."""

    @model_validator(mode="after")
    def _check_origin(self) -> Self:
        measured = self.measured
        if (self.gpu is None) == (measured is None):
            raise ValueError("give either gpu (from a data sheet) or measured (by --calibrate)")
        if self.nodes > 1 and self.network_gigabytes_per_second is None:
            raise ValueError("network_gigabytes_per_second: missing, and there are several nodes")
        if measured is not None and measured.device == "cpu" and self.nodes > 1:
            raise ValueError(f"nodes: {self.nodes}: measured on CPUs, which predict one; give 1")
        alone = measured is not None and measured.exchange_gigabytes_per_second is None
        if alone and self.gpus_per_node > 1:
            raise ValueError(f"gpus_per_node: {self.gpus_per_node}: measured with one; give 1")
        return self

    @property
    def workers(self) -> int:
        """Number of workers that it has room for."""
        return self.nodes * self.gpus_per_node


@cache
def installed_clusters() -> dict[str, Cluster]:
    """Return the installed clusters by name."""
    folder = files("largebatch") / "lab" / "planner" / "clusters"
    names = sorted(file.name for file in folder.iterdir() if file.name.endswith(".yaml"))
    clusters = [parse_cluster((folder / name).read_text("utf-8"), source=name) for name in names]
    return {cluster.name: cluster for cluster in clusters}


def load_cluster(name: str) -> Cluster:
    """Return the cluster in a YAML file, or the installed one of this name.

    Raises ClusterError or RecipeError where there is neither, or the file is invalid.
    """
    path = Path(name)
    if path.suffix in {".yaml", ".yml"} or path.is_file():
        return parse_cluster(read_text(path, what="cluster"), source=name)
    known = installed_clusters()
    if name not in known:
        hint = nearest(name, known, otherwise=f"known: {', '.join(known)}; or a YAML file")
        raise ClusterError(f"--cluster {name}: not known; {hint}")
    return known[name]


def parse_cluster(text: str, *, source: str) -> Cluster:
    """Validate the text of a cluster file; its name is that of the file.

    Raises ClusterError with every mistake, each by its dotted path.
    """
    tree: Any = parse_yaml(text, source=source)
    if not isinstance(tree, dict):
        raise ClusterError(f"{source}: expected the keys of a cluster, such as nodes: 2")
    try:
        return Cluster.model_validate({**tree, "name": Path(source).stem})
    except ValidationError as error:
        raise ClusterError(explain_problems(error, Cluster, source=source)) from None


def require_workers(cluster: Cluster, workers: int) -> None:
    """Raise ClusterError where a cluster has fewer workers, or not whole nodes of them."""
    per_node = cluster.gpus_per_node
    if workers > cluster.workers:
        raise ClusterError(
            f"--workers {workers:,}: {cluster.name} has {cluster.workers:,} "
            f"({plural(cluster.nodes, 'node')} of {per_node}); give at most that, or a larger "
            "cluster"
        )
    if workers > per_node and workers % per_node:
        below = workers - workers % per_node
        raise ClusterError(
            f"--workers {workers:,}: {cluster.name} has {per_node} workers in a node, and several "
            f"nodes are used whole; give {below:,} or {below + per_node:,}"
        )
