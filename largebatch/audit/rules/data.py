"""What can be wrong with samples, their order and their draws, in tables of rules.

An epoch of one process reads each sample once, in a new order, and draws new random numbers for
each. Draws that workers share leave the mean gradient as it is: only the noise of augmentation and
dropout no longer averages out over the workers, so that is a note. Draws that each epoch repeats
are a fault: a sample then has one augmentation only.
"""

from dataclasses import dataclass
from typing import NamedTuple

from largebatch.formatting import percent, plural
from largebatch.rules import Rule

_SMALL_PART = 0.01
"""Part of an epoch that `drop_last` may leave out without a note: an epoch's order changes, so each
sample misses one epoch in 100 at most. Also the part of a validation set below which copies of
training images are a note: published data sets have some."""

MOST_BATCHES = 64  # batches of a worker that are read where samples have no numbers

# Samples of an epoch.


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """Readings of samples in an epoch, over all workers."""

    size: int
    """Number of samples that some worker's data set has; those that it repeats count again."""

    twice: int
    """Number of readings of a sample after as many as the data sets have of it."""

    never: int
    is_one_set: bool
    """True if all workers have the same data set."""

    equal: bool
    """True if all of several workers read the same samples in the same order."""

    everything: bool
    """True if each of several workers reads all samples."""

    global_batch: int
    """Largest number of samples of an update's batches, one from each worker."""

    workers: int
    sampler: str
    """Name of the sampler's class."""

    draws_again: bool
    """True if the sampler repeats samples by design."""

    @property
    def usual_rest(self) -> int:
        """Most samples that drop_last on all workers leaves out, and the sampler."""
        return self.global_batch + self.workers - 2

    @property
    def is_divided_once(self) -> bool:
        """True unless so few samples are read as by two divisions over the workers."""
        read = self.size - self.never
        return self.workers == 1 or read > self.size / self.workers + self.usual_rest

    @property
    def never_share(self) -> float:
        """Part of the samples that is never read."""
        return self.never / max(1, self.size)


def _coverage_text(e: Coverage) -> str:
    part = f" ({percent(e.never_share)} %)" * bool(e.never)
    text = f"{plural(e.size, 'sample')}: {e.never:,} never read in an epoch{part}, "
    text += f"{e.twice:,} read again"
    return text + ", of data sets that differ between workers" * (not e.is_one_set)


COVERAGE: tuple[Rule[Coverage], ...] = (
    Rule(
        check="samples",
        level="note",
        # Equal draws on all workers are a fault in the division, whatever the sampler is.
        when=lambda e: e.draws_again and not e.equal,
        text=lambda e: f"{_coverage_text(e)}, as {e.sampler} draws them",
        remedy="nothing if this is wanted; then an epoch is not one pass over the data",
    ),
    Rule(
        check="samples",
        level="fault",
        when=lambda e: e.everything,
        text=lambda e: f"every worker reads all {plural(e.size, 'sample')} in an epoch",
        remedy="divide the data: DataLoader(..., sampler=DistributedSampler(data))",
        figure=lambda e: float(e.workers),
    ),
    Rule(
        check="samples",
        level="fault",
        when=lambda e: e.equal,
        text=lambda e: (
            f"every worker reads the same draws of {e.sampler} from {plural(e.size, 'sample')} in "
            "an epoch"
        ),
        remedy="divide the draws: give worker r of W those with the numbers r, r + W, ...",
        figure=lambda e: float(e.workers),
    ),
    Rule(
        check="samples",
        level="note",
        when=lambda e: (
            e.never > e.usual_rest and not e.twice and e.is_one_set and e.is_divided_once
        ),
        text=_coverage_text,
        remedy="nothing if the sampler leaves them out on purpose; else read the rest too",
        figure=lambda e: e.never_share,
    ),
    Rule(
        check="samples",
        level="fault",
        when=lambda e: (
            e.never > e.usual_rest or e.twice > (e.workers - 1 if e.never else e.usual_rest)
        ),
        text=_coverage_text,
        remedy="divide one permutation once, with one seed, epoch and order of files on all",
        figure=lambda e: e.never_share if e.never else float(e.twice),
    ),
    Rule(
        check="samples",
        level="fine",
        when=lambda e: e.never <= _SMALL_PART * e.size and e.twice < e.workers,
        text=_coverage_text,
    ),
    Rule(
        check="samples",
        level="note",
        text=_coverage_text,
        remedy="choose a batch that divides the data, or pad, not drop_last",
    ),
)


class NumbersOfBatches(NamedTuple):
    """Smallest and largest number of batches of a worker."""

    fewest: int
    most: int


NUMBERS_OF_BATCHES: tuple[Rule[NumbersOfBatches], ...] = (
    Rule(
        check="samples",
        level="fault",
        when=lambda e: e.fewest < e.most,
        text=lambda e: (
            f"workers have {e.fewest:,} to {e.most:,} batches in an epoch: the last updates wait"
        ),
        remedy="give all workers as many batches: DistributedSampler, drop_last, or DDP's join()",
        figure=lambda e: float(e.most - e.fewest),
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchContents:
    """First batches of each worker, where samples have no numbers."""

    problem: str
    """Why they have none."""

    counts: tuple[int, ...]
    """Batches that each worker read, at most one more than MOST_BATCHES."""

    workers: int
    equal: int
    """Largest number of workers whose batches are the same."""

    again: int
    """Largest number of batches that a worker read before."""

    processes: int
    """Number of processes of a worker's loader."""

    @property
    def compared(self) -> int:
        """Number of batches of each worker that were compared."""
        return min(*self.counts, MOST_BATCHES)

    @property
    def fewest(self) -> int:
        """Number of batches of the worker that has fewest."""
        return min(self.counts)

    @property
    def most(self) -> int:
        """Number of batches of the worker that has most."""
        return max(self.counts)


def _batches_of(e: BatchContents) -> str:
    return plural(e.compared, "batch", "batches")


def _numbers_of_batches(e: BatchContents) -> str:
    most = f"more than {MOST_BATCHES}" if e.most > MOST_BATCHES else f"{e.most}"
    return f"workers have {e.fewest} to {most} batches in an epoch: the last updates wait"


BATCHES: tuple[Rule[BatchContents], ...] = (
    Rule(
        check="samples",
        level="unknown",
        when=lambda e: e.compared == 0 or e.workers == 1,
        text=lambda e: e.problem,
        remedy="give the audit a DataLoader whose data set has a length",
    ),
    Rule(
        check="samples",
        level="fault",
        when=lambda e: e.again > 0 and e.processes > 1,
        text=lambda e: (
            f"{e.again} of {e.compared} batches are read by several processes of a worker's loader"
        ),
        remedy="divide an iterable data set by loader process too: get_worker_info()",
        figure=lambda e: float(e.again),
    ),
    Rule(
        check="samples",
        level="fault",
        when=lambda e: e.equal > 1,
        text=lambda e: (
            f"{e.equal} of {e.workers} workers read the same {_batches_of(e)}: the data are not "
            "divided"
        ),
        remedy="divide an iterable data set by rank: split_dataset_by_node, or its own shards",
        figure=lambda e: float(e.equal),
    ),
    Rule(
        check="samples",
        level="fault",
        when=lambda e: e.fewest <= MOST_BATCHES and e.fewest < e.most,
        text=_numbers_of_batches,
        remedy="give all workers as many batches: DistributedSampler, drop_last, or DDP's join()",
        figure=lambda e: float(min(e.most, MOST_BATCHES) - e.fewest),
    ),
    Rule(
        check="samples",
        level="unknown",
        when=lambda e: e.fewest > MOST_BATCHES,
        text=lambda e: (
            f"the first {_batches_of(e)} differ between workers; the end was not seen: {e.problem}"
        ),
        remedy="give the data set a length, or count its batches yourself",
    ),
    Rule(
        check="samples",
        level="fine",
        text=lambda e: (
            f"{_batches_of(e)} on each worker, which differ; more cannot be seen: {e.problem}"
        ),
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """Orders of two epochs."""

    equal: int
    """Number of workers that read both epochs in one order."""

    workers: int
    is_shuffled: bool
    """False if that is the order of the data set."""

    may_be_set: bool
    """True if no function that sets the epoch was given, and the script may call one."""


ORDERS: tuple[Rule[Orders], ...] = (
    Rule(
        check="epoch order",
        level="fine",
        when=lambda e: not e.equal,
        text="the second epoch has another order than the first",
    ),
    Rule(
        check="epoch order",
        level="note",
        when=lambda e: not e.is_shuffled,
        text="both epochs have the order of the data set: nothing is shuffled",
        remedy="shuffle the training data: shuffle=True",
    ),
    Rule(
        check="epoch order",
        level="unknown",
        when=lambda e: e.may_be_set,
        text=lambda e: (
            f"{e.equal} of {e.workers} workers read both epochs in one shuffled order, without "
            "set_epoch"
        ),
        remedy="to check what your loop does: audit(..., set_epoch=sampler.set_epoch)",
    ),
    Rule(
        check="epoch order",
        level="fault",
        text=lambda e: f"{e.equal} of {e.workers} workers read both epochs in one shuffled order",
        remedy="call sampler.set_epoch(epoch) before each epoch",
        figure=lambda e: float(e.equal),
    ),
)

# Validation samples that are trained on.

_DIVIDE_BEFORE = (
    "divide the data once, before training, and validate on samples that are not trained on"
)


class CommonNumbers(NamedTuple):
    """Sample numbers of one data set that both loaders read."""

    common: int
    validated: int


COMMON_NUMBERS: tuple[Rule[CommonNumbers], ...] = (
    Rule(
        check="held-out samples",
        level="fault",
        when=lambda e: e.common > 0,
        text=lambda e: (
            f"{e.common:,} of {e.validated:,} validation samples are trained on: both loaders "
            "read these numbers of one data set"
        ),
        remedy=_DIVIDE_BEFORE,
        figure=lambda e: e.common / e.validated,
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CommonImages:
    """Validation images that are training images too."""

    common: int
    validated: int
    repeated: float
    """Largest part of a worker's training images that repeats others."""

    are_files: bool
    """True if files were compared."""

    is_whole: bool
    """True if all images were read in time."""

    seconds: float
    """Time for which a worker reads images of a data set."""

    @property
    def share(self) -> float:
        """Part of the validation images."""
        return self.common / max(1, self.validated)

    @property
    def is_usual(self) -> bool:
        """True if data of few possible values explain it: one-hot vectors, blank images."""
        return self.repeated >= self.share / 2 and not self.are_files


def _common_images(e: CommonImages) -> str:
    return (
        f"{e.common:,} of {e.validated:,} validation images are training images too, byte by byte"
    )


COMMON_IMAGES: tuple[Rule[CommonImages], ...] = (
    Rule(
        check="held-out samples",
        level="unknown",
        when=lambda e: not e.common and not e.is_whole,
        text=lambda e: (
            f"{_common_images(e)}, of those that were read in {e.seconds:g} s; the others were not "
            "compared"
        ),
        remedy="compare the hashes of all images once yourself",
    ),
    Rule(
        check="held-out samples",
        level="fine",
        when=lambda e: not e.common,
        text=_common_images,
        figure=lambda _: 0.0,
    ),
    Rule(
        check="held-out samples",
        level="note",
        when=lambda e: e.share < _SMALL_PART or e.is_usual,
        text=_common_images,
        remedy=_DIVIDE_BEFORE,
        figure=lambda e: e.share,
    ),
    Rule(
        check="held-out samples",
        level="fault",
        text=_common_images,
        remedy=_DIVIDE_BEFORE,
        figure=lambda e: e.share,
    ),
)

# Random numbers.

_SEED_BY_WORKER = "seed by worker, after the model is built: torch.manual_seed(seed + rank)"


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochOfData:
    """A data set that draws by its epoch, where all draws of two epochs of the loader are equal."""

    draws: int
    changes_by_given: bool
    """True if the function that sets the epoch changes a sample of the data set."""

    changes_by_own: bool
    """True if the data set's own one does."""

    may_be_set: bool
    """True if the script may call that one: not all that sets the epoch was given."""


EPOCH_OF_DATA: tuple[Rule[EpochOfData], ...] = (
    Rule(
        check="augmentation",
        level="fault",
        when=lambda e: e.changes_by_given,
        text="the data set draws by its epoch, and each epoch of the loader repeats the first one",
        remedy="its processes keep their copies: persistent_workers=False, or share the epoch",
        figure=lambda e: float(e.draws),
    ),
    Rule(
        check="augmentation",
        level="unknown",
        when=lambda e: e.changes_by_own and e.may_be_set,
        text="the data set draws by its epoch, and what sets that was not given",
        remedy="give set_epoch= with all that your loop sets",
    ),
    Rule(
        check="augmentation",
        level="fault",
        when=lambda e: e.changes_by_own,
        text="the data set draws by its epoch, which set_epoch leaves as it is: all epochs repeat",
        remedy="set the epoch of the data set too, before each epoch",
        figure=lambda e: float(e.draws),
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawsOfOneSample:
    """Draws of one sample, in two epochs of all processes of all workers' loaders."""

    number: int
    """Number of draws of a worker in an epoch."""

    in_all: int
    """Number of draws of a worker in both epochs."""

    nothing_random: bool
    """True if each worker's draws are all equal."""

    by_epoch: bool
    """True if each worker's draws of an epoch are equal."""

    repeating: int
    """Number of workers whose two epochs are equal."""

    sharing: int
    """Number of workers whose draws are those of worker 0, with it."""

    workers: int
    processes: int
    """Number of a loader's processes that draw the same; 0 if they differ."""


DRAWS: tuple[Rule[DrawsOfOneSample], ...] = (
    Rule(
        check="augmentation",
        level="fine",
        when=lambda e: e.nothing_random,
        text=lambda e: f"{plural(e.in_all, 'draw')} of a sample are identical: nothing is random",
    ),
    Rule(
        check="augmentation",
        level="fine",
        when=lambda e: e.by_epoch,
        text="draws follow from the sample's number and the epoch",
    ),
    Rule(
        check="augmentation",
        level="fault",
        when=lambda e: e.repeating > 0,
        text=lambda e: (
            f"{e.number} draws of a sample are equal in two epochs on "
            f"{plural(e.repeating, 'worker')}"
        ),
        remedy="seed workers from torch.initial_seed(), not with a constant (worker_init_fn)",
        figure=lambda e: float(e.number),
    ),
    Rule(
        check="augmentation",
        level="note",
        when=lambda e: e.sharing > 1,
        text=lambda e: (
            f"{e.number} draws of a sample are equal on {e.sharing} of {e.workers} workers"
        ),
        remedy=f"{_SEED_BY_WORKER}, and random's and NumPy's generators equally",
        figure=lambda e: float(e.sharing),
    ),
    Rule(
        check="augmentation",
        level="note",
        when=lambda e: e.processes > 1,
        text=lambda e: f"{e.processes} processes of a loader draw the same augmentations",
        remedy="seed workers from torch.initial_seed(), not with a constant (worker_init_fn)",
        figure=lambda e: float(e.processes),
    ),
    Rule(
        check="augmentation",
        level="fine",
        text=lambda e: (
            f"{e.number} draws of a sample differ between workers, loader processes and epochs"
        ),
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawsOfStep:
    """Libraries from which a step draws random numbers on all workers."""

    drawn: tuple[str, ...]
    equal: tuple[str, ...]
    """Libraries from which all workers draw the same numbers."""

    workers: int


DRAWS_OF_STEP: tuple[Rule[DrawsOfStep], ...] = (
    Rule(
        check="dropout",
        level="note",
        when=lambda e: bool(e.equal),
        text=lambda e: (
            f"{e.workers} of {e.workers} workers draw the same random numbers in a step "
            f"({', '.join(e.equal)}): dropout, mixup or noise"
        ),
        remedy=_SEED_BY_WORKER,
        figure=lambda e: float(e.workers),
    ),
    Rule(
        check="dropout",
        level="fine",
        when=lambda e: bool(e.drawn),
        text=lambda e: f"workers draw different numbers ({', '.join(e.drawn)}) in a step",
    ),
)
