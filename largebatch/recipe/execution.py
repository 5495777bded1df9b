"""The section `execution`: the settings of the machine."""

from typing import Annotated, Literal, Self, TypeAlias

from pydantic import Field, model_validator

from largebatch.recipe.choices import Compile, DecoderName, Kernels
from largebatch.recipe.section import Batch, Positive, Section, Updates

Cache: TypeAlias = Literal["memory", "device", "none"]
"""Where decoded pixels are kept."""

OnWrongCard: TypeAlias = Literal["stop", "continue", "leave_out"]
"""What a run does when a worker computes wrong numbers."""

DEFAULT_DECODER = "torchvision"


class CubicGroups(Section):
    """3 (k+1)^3 - 3 k^3 tensors: 3, 21, 57, 111 ... (Fujitsu's MLPerf v0.6 entry)."""

    kind: Literal["cubic"]


class GroupsByBytes(Section):
    """As many tensors as fill a number of bytes, at least one."""

    kind: Literal["bytes"]

    megabytes: Positive
    """A group is complete when it has at least this many million bytes of fp32 gradients, whatever
    type they are sent in."""


Groups: TypeAlias = CubicGroups | GroupsByBytes
"""The ways to put gradients into groups; each group is sent as one tensor."""


class Checkpoints(Section):
    """Checkpoints besides those after every evaluation and stage, and which of them are kept."""

    every_steps: Updates | None = None
    every_minutes: Positive | Literal["auto"] | None = "auto"
    """Updates, and minutes, between two checkpoints; null: not by this unit. `auto`: 2 minutes, or
    so many that checkpoints take at most 1 % of the time."""

    keep_last: Updates = 2
    """Number of newest checkpoints to keep; that of the best evaluation is kept too."""


class Execution(Section):
    """The machine: settings that change the numbers of a run by rounding at most.

    A resumed run may change them. With the protocols softsync and asynchronous `checkpoints`
    changes more: gradients are less stale after each.
    """

    device_batch: Batch | None = None
    """Samples a worker holds at a time (--device-batch). null: the largest that divides its share
    of the global batch and fits 80 % of a GPU's free memory, as measured at the start; on a CPU
    the largest up to 256."""

    decoder: DecoderName | None = None
    """Decodes and resizes the images (--decoder). `dali`: NVIDIA DALI, on the GPU where there is
    one; pixels differ from torchvision's by 1/255 at most, in the outermost rows and columns by up
    to 32/255, in the four corners and with bicubic interpolation anywhere by up to 60/255. These
    are bounds: the largest difference in 100 photographs is 28/255, at 32 pixels. null:
    torchvision."""

    reads: Annotated[int, Field(gt=0, le=1024)] | None = None
    """Images that a worker reads at a time, at most. Storage with a high latency needs many; how
    many threads read is adapted to the time that reads take. null: 64."""

    cache: Cache | None = None
    """Decode small data sets once and keep their pixels. `memory`: in one file that all workers of
    a machine map, in the user's cache. `device`: also on every worker's GPU, if all images have
    one size; on a CPU that is `memory`. `none`: decode each time. null: in runs of two epochs or
    more, if the pixels take at most half of the free disk and can be written, `device` on a GPU if
    they take at most an eighth of its free memory; else `memory` if at most a quarter of the
    host's and 2 GiB a split, on a CPU only if nothing is resized; else `none`."""

    memory_format: Literal["contiguous", "channels_last"] | None = None
    """Order of images, weights and feature maps in memory, by torch's name; which one is faster on
    a CPU depends on the model. null: channels_last on GPUs, contiguous on CPUs."""

    groups: Annotated[Groups, Field(discriminator="kind")] = CubicGroups(kind="cubic")
    """Which gradients are sent together, counted from the last layer."""

    checkpoints: Checkpoints = Checkpoints()

    compare_every: Updates | None = 100
    """Updates between comparisons of the workers' weights, which must be the same bits; null: never
    compare them."""

    replay_every: Updates | None = None
    """Updates between two replays: in every N-th update each worker also computes the first
    micro-batch of another worker, a different one each time, and the bits of the gradients are
    compared; between devices of different models, the difference must be within rounding. If they
    differ, a third worker decides which of the two is wrong. Costs 1 / (N x accumulation) of the
    passes, and with the digests 1.2 to 1.6 times that in processor time on a CPU; on a GPU the
    convolutions are deterministic ones. Refused in bf16 and fp16 on a CPU, where convolutions do
    not repeat. null: never."""

    on_wrong_card: OnWrongCard = "stop"
    """What a run does when `replay_every` has found a wrong worker. `stop`: it ends before that
    update, and names the worker's host and device. `continue`: a record in the log names them.
    `leave_out`: it ends, and --restarts starts it again without that device, if --min-workers
    allows one worker less."""

    kernels: Kernels = "auto"
    """Kernels of BatchNorm, of LARS and SGD, and of crops of cached images. `auto`: on a GPU those
    of this package, if a trial before the first update showed that they are right and faster; else
    PyTorch's. `torch`: PyTorch's for all, and no graph unless `graph` is true. `apex`: as `auto`,
    but NVIDIA apex's multi-tensor kernels for LARS, on CUDA only. The environment variable
    LARGEBATCH_KERNELS=torch switches everything off, on all workers if one of them has it."""

    compile: Compile = False
    """Train with fused kernels, by torch.compile; results differ by rounding. `reduce-overhead` is
    another name for `compile: true` with `graph`. `max-autotune` adds a search for the fastest
    kernels, which takes minutes. The first update of each image size takes seconds to minutes
    longer. Evaluation and polishing run uncompiled."""

    graph: Literal["auto"] | bool = "auto"
    """Record an update once for each shape in a CUDA graph and replay it: the host launches one
    graph in place of hundreds of kernels, and results are the same bits. Parts that cannot be
    recorded run without, and the log says why. `auto`: on a GPU, if the network and the optimizer
    allow it, and a trial showed that it has the same numbers and is faster; true: required of the
    passes; false: never."""

    def channels_last(self, device: str) -> bool:
        """Return True if `memory_format` is channels_last on this type of device."""
        if self.memory_format is None:
            return device != "cpu"
        return self.memory_format == "channels_last"

    @model_validator(mode="after")
    def _graph_is_allowed(self) -> Self:
        if self.graph is False and isinstance(self.compile, str):
            raise ValueError(
                f"compile: {self.compile} has a graph, and graph is false; give one of the two"
            )
        return self

    @model_validator(mode="after")
    def _decoder_is_used(self) -> Self:
        if self.cache in {"memory", "device"}:
            for key, value in (("decoder", self.decoder), ("reads", self.reads)):
                if value is not None:
                    raise ValueError(
                        f"{key}: {value} would not be used: cache: {self.cache} decodes images once"
                    )
        return self
