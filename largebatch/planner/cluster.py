"""What a machine is: a cluster file, from data sheets or measured, and those that are installed.

Every figure of an installed file names its source in a comment. Bandwidths are in gigabytes (1e9
bytes) a second in one direction, as an all-reduce uses them; data sheets of links give the sum of
both directions, in bits or in bytes.
"""

from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import Field, JsonValue, PositiveFloat, PositiveInt, ValidationError, model_validator

from largebatch.errors import LargebatchError, nearest
from largebatch.recipe.loading import parse_yaml
from largebatch.recipe.problems import explain_problems
from largebatch.recipe.sections import Section

Generation = Literal["volta", "ampere", "hopper", "blackwell"]
GENERATIONS: tuple[Generation, ...] = get_args(Generation)
Software = Literal["launched", "graphs"]

LARGEST_FILE = 2**16
"""Of a cluster file, in bytes."""


class ClusterError(LargebatchError):
    """A cluster is not known, too small, or its file cannot be used."""


Gigabytes = Annotated[float, Field(gt=0, le=10_000)]
"""Of one GPU's memory."""

Bandwidth = Annotated[float, Field(ge=0.01, le=100_000)]
"""In gigabytes a second, of a link or of a network."""

Watts = Annotated[float, Field(ge=1, le=100_000)]


class Gpu(Section):
    """One accelerator, by its data sheet.

    Bounds are far from any GPU, so that a figure beyond them is one in other units.
    """

    name: str
    generation: Generation
    memory_gigabytes: Gigabytes
    tensor_teraflops: Annotated[float, Field(ge=1, le=1_000_000)]
    """Peak of dense fp16 matrix products."""

    memory_gigabytes_per_second: Annotated[float, Field(ge=10, le=1_000_000)]
    watts: Watts
    peak_watts: Watts | None = None
    """Of the variant of the same chip whose tensor peak is given; null: its own."""

    link_gigabytes_per_second: Bandwidth
    """To the other GPUs of its node, in one direction."""

    decoded_images_per_second: PositiveFloat | None = None
    """ImageNet's JPEG files, by DALI; null: not known, and taken to limit nothing."""


class Measured(Section):
    """What `largebatch plan --calibrate` found on a machine, for one model."""

    model: str
    arguments: dict[str, JsonValue]
    """Of the model."""

    classes: PositiveInt
    image_size: PositiveInt
    precision: str
    settings: dict[str, JsonValue]
    """What else decides the times, by the keys of the recipe (planner.known.SETTINGS)."""

    device: str
    seconds_per_image: PositiveFloat
    """Forward and backward, a further image of a device batch."""

    seconds_per_pass: Annotated[float, Field(ge=0)]
    """Of each device batch, however small."""

    seconds_per_update: Annotated[float, Field(ge=0)]
    gradient_bytes: PositiveFloat
    """That each worker sends in an update."""

    reduction: str
    """Type of what is sent."""

    groups: dict[str, JsonValue]
    """How gradients are put into groups, as execution.groups."""

    messages: PositiveInt
    """All-reduces of an update: the groups of gradients, and the loss."""

    norm_layers: Annotated[int, Field(ge=0)]
    exchange_seconds: Annotated[float, Field(ge=0)]
    """Of an all-reduce between two workers, however small."""

    exchange_gigabytes_per_second: PositiveFloat | None
    """Null where there was one device, and so nothing to measure."""

    images_per_second_read: PositiveFloat
    """That one worker reads and augments."""

    oversubscription: Annotated[float, Field(ge=1)] = 1.0
    """How much longer an update of more workers than cores takes than the sum of their turns."""

    error: Annotated[float, Field(gt=0, lt=1)] = 0.15
    """Half the width of the interval of predictions, as a ratio."""


class Cluster(Section):
    """Nodes with equal GPUs, or with measured workers, and the network between them."""

    name: str = ""
    """That of its file."""

    gpu: Gpu | None = None
    measured: Measured | None = None
    gpus_per_node: PositiveInt
    """Workers that share a node; on CPUs, its cores."""

    nodes: PositiveInt
    network_gigabytes_per_second: Bandwidth | None = None
    """Of a node, in one direction; null where there is one node."""

    sharp: bool = False
    """Switches add up what passes through them, so half the bytes cross the network."""

    cpu_cores: PositiveInt
    """Of a node."""

    software: Software = "graphs"
    """launched: the CPU starts every kernel, as until MLPerf v0.7. graphs: CUDA graphs."""

    node_watts: Annotated[float, Field(ge=1, le=1_000_000)] | None = None
    price_per_gpu_hour: PositiveFloat | None = None
    """In any currency."""

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        if (self.gpu is None) == (self.measured is None):
            raise ValueError("give either gpu (from a data sheet) or measured (by --calibrate)")
        if self.nodes > 1 and self.network_gigabytes_per_second is None:
            raise ValueError("network_gigabytes_per_second: missing, and there are several nodes")
        if self.measured is not None:
            self._check_measured(self.measured)
        return self

    def _check_measured(self, found: Measured) -> None:
        if found.device == "cpu" and self.nodes > 1:
            raise ValueError(
                f"nodes: {self.nodes}: measured on CPUs, which says nothing of other nodes; give 1"
            )
        if found.exchange_gigabytes_per_second is None and self.gpus_per_node > 1:
            raise ValueError(
                f"gpus_per_node: {self.gpus_per_node}: measured with one, so "
                "measured.exchange_gigabytes_per_second is null; give 1, or measure again"
            )

    @property
    def workers(self) -> int:
        """How many workers it has room for."""
        return self.nodes * self.gpus_per_node


@cache
def installed_clusters() -> dict[str, Cluster]:
    """Return the clusters that come with the package, by name."""
    folder = files("largebatch") / "planner" / "clusters"
    texts = {
        file.name.removesuffix(".yaml"): file.read_text(encoding="utf-8")
        for file in folder.iterdir()
        if file.name.endswith(".yaml")
    }
    return {name: parse_cluster(texts[name], source=name) for name in sorted(texts)}


def load_cluster(name: str) -> Cluster:
    """Return the cluster in a YAML file, or the installed one of this name.

    Raises ClusterError where there is neither, or the file says what a cluster cannot be.
    """
    path = Path(name)
    if path.suffix in {".yaml", ".yml"} or path.is_file():
        try:
            if path.stat().st_size > LARGEST_FILE:
                raise ClusterError(f"{name}: longer than a cluster file, {LARGEST_FILE:,} bytes")
            text = path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ClusterError(f"{name}: cannot read this cluster file: {error}") from None
        return parse_cluster(text, source=name)
    known = installed_clusters()
    if name not in known:
        hint = nearest(name, known, otherwise=f"known: {', '.join(known)}; or a YAML file")
        raise ClusterError(f"--cluster {name}: not known; {hint}")
    return known[name]


def parse_cluster(text: str, *, source: str) -> Cluster:
    """Validate the text of a cluster file; its name is that of the file.

    Raises ClusterError naming every mistake at once, each by its dotted path.
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
    each = cluster.gpus_per_node
    if workers > cluster.workers:
        raise ClusterError(
            f"--workers {workers:,}: {cluster.name} has {cluster.workers:,} "
            f"({cluster.nodes:,} nodes of {each}); give at most that, or a larger cluster"
        )
    if workers > each and workers % each:
        below = workers - workers % each
        raise ClusterError(
            f"--workers {workers:,}: {cluster.name} has {each} workers in a node, and several "
            f"nodes are used whole; give {below:,} or {below + each:,}"
        )
