"""What a resumed run reads and draws that the whole does not, in tables of rules.

Updates, epochs and batches are counted from 1, as those of the whole run.
"""

import math
from dataclasses import dataclass
from typing import Literal

from largebatch.formatting import plural
from largebatch.rules import Rule

# Samples.


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A batch of the whole run, all counted from 1."""

    update: int
    epoch: int
    batch: int
    """Number in its epoch."""

    def __str__(self) -> str:
        return f"batch {self.batch:,} of epoch {self.epoch:,}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Samples that the rest reads where the whole continues."""

    updates: int
    samples: int
    """Number of samples of the whole in these updates, over all workers; 0 if none was seen."""

    update: int = 0
    """First update with other samples, counted from 1; 0 if there is none."""

    expected: Place | None = None
    """What the whole reads in it; None without batches there."""

    read: Place | None = None
    """Where the whole has what the rest reads in it; None if it has that nowhere."""

    twice: int = 0
    """Readings of a sample in this epoch, before and after the stop, above those of the whole."""

    never: int = 0
    """Readings of the whole in this epoch that are missing."""

    are_same_sets: bool = False
    """True if all updates have the samples of the whole, in another order or on other workers."""

    accumulation: int = 1
    """Micro-batches of an update."""

    workers: int = 1
    other_workers: int | None = None
    """Number of workers of the rest; None if it has as many."""

    epoch_set: int | None = None
    """Epoch that the whole passes to set_epoch; None without a call."""

    epoch_set_by_rest: int | None = None
    generators: tuple[str, ...] = ()
    """Generators of the rest whose states are not those of the whole."""

    follows: tuple[str, ...] = ()
    """What else differs by these generators."""

    @property
    def is_ordered(self) -> bool:
        """True if samples were seen, and are those of the whole in its order."""
        return self.samples > 0 and self.update == 0

    @property
    def is_drawn(self) -> bool:
        """True if the order differs by generators that were not restored."""
        return self.update > 0 and not self.are_same_sets and self.epoch_set is None

    @property
    def begins_epoch_again(self) -> bool:
        """True if the rest reads the epoch in which the first part stopped from its beginning."""
        return (
            self.read is not None
            and self.expected is not None
            and self.read.batch == 1 < self.expected.batch
            and self.read.epoch == self.expected.epoch
        )

    @property
    def factor(self) -> float:
        """Batches that are skipped over those that were read; NaN if it is not known."""
        if self.read is None or self.expected is None or self.read.epoch != self.expected.epoch:
            return math.nan
        return (self.read.batch - 1) / max(1, self.expected.batch - 1)

    @property
    def is_by_accumulation(self) -> bool:
        """True if the rest takes batches for updates, or updates for batches."""
        factors = {self.accumulation, 1 / self.accumulation}
        return self.other_workers is None and self.accumulation > 1 and self.factor in factors

    @property
    def is_by_workers(self) -> bool:
        """True if the rest takes batches of all workers for its own, or its own for those."""
        factors = {self.workers, 1 / self.workers}
        return self.other_workers is None and self.workers > 1 and self.factor in factors


def _reading_text(e: Reading) -> str:
    text = f"update {e.update:,} has other samples than in the whole"
    if e.read is not None:
        text = f"update {e.update:,} reads {e.read} (update {e.read.update:,}) of the whole"
        text += f", not {e.expected}"
    elif e.expected is not None:
        text += f", which reads {e.expected}"
    if e.twice or e.never:
        text += f"; in this epoch {e.twice:,} samples are read again, {e.never:,} never"
    return text


def generators_of(names: tuple[str, ...]) -> str:
    """Name generators.

    >>> generators_of(("numpy", "torch"))
    "numpy's and torch's generators"
    """
    noun = "generator" if len(names) == 1 else "generators"
    return " and ".join(f"{name}'s" for name in names) + f" {noun}"


def _generators_text(generators: tuple[str, ...], follows: tuple[str, ...]) -> str:
    if not generators:
        return ""
    text = f"; the state of {generators_of(generators)} is not restored"
    if follows:
        text += f", from which {' and '.join(follows)} are drawn too"
    return text


def restore_generators(generators: tuple[str, ...]) -> str:
    """Return the code that saves and loads the states of these generators."""
    code = {
        "torch": "torch.set_rng_state(checkpoint['torch']), saved by torch.get_rng_state()",
        "numpy": "numpy.random.set_state(checkpoint['numpy']), saved by numpy.random.get_state()",
        "python": "random.setstate(checkpoint['python']), saved by random.getstate()",
    }
    for generator in generators:
        kind = generator.partition(":")[0]  # of a device, such as cuda:0
        of_devices = f"torch.{kind}.set_rng_state_all(checkpoint['{kind}'])"
        code.setdefault(generator, f"{of_devices}, saved by torch.{kind}.get_rng_state_all()")
    return "; ".join(dict.fromkeys(code[generator] for generator in generators))


_SKIP = (
    "save how many batches of the epoch were read and skip them: torchdata's StatefulDataLoader, "
    "accelerate.skip_first_batches, or a sampler that begins there"
)

SAMPLES: tuple[Rule[Reading], ...] = (
    Rule(
        check="samples",
        level="unknown",
        when=lambda e: not e.samples,
        text="the samples of the updates were not seen",
        remedy="read them from a torch DataLoader",
    ),
    Rule(
        check="samples",
        level="fine",
        when=lambda e: e.update == 0,
        text=lambda e: (
            f"{plural(e.samples, 'sample')} of {plural(e.updates, 'update')}, as in the whole"
            + (", over all workers" if e.other_workers else "")
        ),
    ),
    Rule(
        check="samples",
        level="note",
        when=lambda e: e.are_same_sets,
        text=lambda e: (
            f"all updates have the samples of the whole, from update {e.update:,} on in another "
            "order or on other workers"
        ),
        remedy="nothing if augmentation and BatchNorm may depend on it; else divide them as before",
    ),
    Rule(
        check="samples",
        level="fault",
        when=lambda e: e.is_by_accumulation,
        text=_reading_text,
        remedy=lambda e: (
            f"an update has {e.accumulation} batches: skip updates x {e.accumulation} of them"
        ),
        figure=lambda e: float(max(e.twice, e.never)),
    ),
    Rule(
        check="samples",
        level="fault",
        when=lambda e: e.is_by_workers,
        text=lambda e: f"{_reading_text(e)}; {e.workers} workers",
        remedy="count one worker's batches, or divide those of all by the number of workers",
        figure=lambda e: float(max(e.twice, e.never)),
    ),
    Rule(
        check="samples",
        level="fault",
        when=lambda e: e.begins_epoch_again and e.twice + e.never > 0,
        text=lambda e: f"{_reading_text(e)}: the rest begins the epoch again",
        remedy=_SKIP,
        figure=lambda e: float(max(e.twice, e.never)),
    ),
    Rule(
        check="samples",
        level="note",
        when=lambda e: (
            e.other_workers is not None and e.read is None and e.twice + e.never < e.other_workers
        ),
        text=lambda e: f"{_reading_text(e)}, on {plural(e.other_workers or 0, 'worker')}",
        remedy="nothing if each sample is read once an epoch; else one order for any workers",
    ),
    Rule(
        check="samples",
        level="fault",
        when=lambda e: e.other_workers is not None and e.twice + e.never > 0,
        text=lambda e: f"{_reading_text(e)}, on {plural(e.other_workers or 0, 'worker')}",
        remedy="save the number of samples that all workers read, and divide what is left of one "
        "order over the new workers",
        figure=lambda e: float(max(e.twice, e.never)),
    ),
    Rule(
        check="samples",
        level="fault",
        when=lambda e: e.twice + e.never > 0 and e.expected is not None and e.expected.batch > 1,
        text=lambda e: f"{_reading_text(e)}{_generators_text(e.generators, e.follows)}",
        remedy=lambda e: (
            f"{_SKIP}, in the order that the epoch had"
            + (f": {restore_generators(e.generators)} before its begin" if e.generators else "")
        ),
        figure=lambda e: float(max(e.twice, e.never)),
    ),
    Rule(
        check="epoch order",
        level="fault",
        when=lambda e: e.epoch_set is not None and e.epoch_set_by_rest is None,
        text=lambda e: (
            f"{_reading_text(e)}: the rest does not call set_epoch, the whole has set_epoch"
            f"({e.epoch_set})"
        ),
        remedy="call sampler.set_epoch(epoch) before each epoch, after a resume too",
        figure=lambda e: float(e.samples),
    ),
    Rule(
        check="epoch order",
        level="fault",
        when=lambda e: e.epoch_set != e.epoch_set_by_rest,
        text=lambda e: (
            f"{_reading_text(e)}: the rest has set_epoch({e.epoch_set_by_rest}), the whole has "
            f"set_epoch({e.epoch_set})"
        ),
        remedy="count epochs from the saved one: for epoch in range(checkpoint['epoch'] + 1, "
        "epochs): sampler.set_epoch(epoch)",
        figure=lambda e: float(e.samples),
    ),
    Rule(
        check="epoch order",
        level="fault",
        when=lambda e: bool(e.generators) and e.is_drawn,
        text=lambda e: f"{_reading_text(e)}{_generators_text(e.generators, e.follows)}",
        remedy=lambda e: (
            f"{restore_generators(e.generators)}, before iter(loader); so too loader.generator, if "
            "there is one"
        ),
        figure=lambda e: float(e.samples),
    ),
    Rule(
        check="epoch order",
        level="fault",
        when=lambda e: e.read is not None and e.read.batch == 1,
        text=lambda e: f"{_reading_text(e)}: the order of an earlier epoch again",
        remedy="save loader.generator.get_state() and load it before iter(loader), or a sampler's "
        "set_epoch(epoch)",
        figure=lambda e: float(e.samples),
    ),
    Rule(
        check="epoch order",
        level="fault",
        text=_reading_text,
        remedy="draw each epoch's order from its number, or save and load the state of the "
        "generator that draws it: loader.generator.get_state()",
        figure=lambda e: float(e.samples),
    ),
)

# Random numbers.

Origin = Literal["start", "worker 0", "other"]
"""Where states of generators come from that are not those of the whole: the beginning of the run,
worker 0, or neither."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Draws:
    """Random draws of the rest beside those of the whole."""

    number: int
    """Number of draws that were compared: augmented samples, masks of dropout."""

    differing: int
    update: int = 0
    """First update with other draws, counted from 1."""

    earlier: int = 0
    """Number of draws that the whole has earlier: of the same sample, or in the same place."""

    generators: tuple[str, ...] = ()
    """Generators whose states differ in this update."""

    origin: Origin = "other"
    processes: int = 0
    """Loader processes of a worker."""

    follows: tuple[str, ...] = ()
    """What else differs by these generators."""


def _origin_text(e: Draws) -> str:
    text = _generators_text(e.generators, e.follows)
    if text and e.origin == "start":
        text += ": it is that of the beginning of the run"
    return text


def _draws_text(e: Draws, noun: str) -> str:
    text = f"{e.differing:,} of {plural(e.number, noun)} differ from the whole's"
    text += f", from update {e.update:,} on"
    if e.earlier:
        text += f"; {e.earlier:,} are those of an earlier epoch"
    return text


AUGMENTATION: tuple[Rule[Draws], ...] = (
    Rule(
        check="augmentation",
        level="fine",
        when=lambda e: not e.differing,
        text=lambda e: f"{plural(e.number, 'sample')} bit for bit as in the whole",
    ),
    Rule(
        check="augmentation",
        level="fault",
        when=lambda e: bool(e.generators) and e.processes > 0,
        text=lambda e: (
            f"{_draws_text(e, 'sample')}, in "
            f"{plural(e.processes, 'loader process', 'loader processes')} seeded as before the "
            f"stop{_origin_text(e)}"
            if e.origin == "start"
            else f"{_draws_text(e, 'sample')}{_origin_text(e)}"
        ),
        remedy=lambda e: (
            "seed loader processes by epoch: loader.generator.manual_seed(seed + epoch) before "
            f"iter(loader); or {restore_generators(e.generators)}"
        ),
        figure=lambda e: e.differing / e.number,
    ),
    Rule(
        check="augmentation",
        level="fault",
        when=lambda e: bool(e.generators),
        text=lambda e: f"{_draws_text(e, 'sample')}{_origin_text(e)}",
        remedy=lambda e: f"{restore_generators(e.generators)}, before iter(loader)",
        figure=lambda e: e.differing / e.number,
    ),
    Rule(
        check="augmentation",
        level="fault",
        when=lambda e: e.processes > 0,
        text=lambda e: (
            f"{_draws_text(e, 'sample')}, in "
            f"{plural(e.processes, 'loader process', 'loader processes')}"
        ),
        remedy="seed loader processes by epoch: loader.generator.manual_seed(seed + epoch) before "
        "iter(loader), and in worker_init_fn all that torch.initial_seed() does not",
        figure=lambda e: e.differing / e.number,
    ),
    Rule(
        check="augmentation",
        level="fault",
        text=lambda e: _draws_text(e, "sample"),
        remedy="save and load the state of the generator that the data set draws from, before "
        "iter(loader)",
        figure=lambda e: e.differing / e.number,
    ),
)

DROPOUT: tuple[Rule[Draws], ...] = (
    Rule(
        check="dropout",
        level="fine",
        when=lambda e: not e.differing,
        text=lambda e: f"{plural(e.number, 'mask')} as in the whole",
    ),
    Rule(
        check="dropout",
        level="fault",
        when=lambda e: bool(e.generators),
        text=lambda e: f"{_draws_text(e, 'mask')}{_origin_text(e)}",
        remedy=lambda e: restore_generators(e.generators),
        figure=lambda e: e.differing / e.number,
    ),
    Rule(
        check="dropout",
        level="fault",
        text=lambda e: _draws_text(e, "mask"),
        remedy="keep the dropout layers, their rates and modes: model.train() after a resume",
        figure=lambda e: e.differing / e.number,
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Generators:
    """States of random generators before the rest's first update."""

    names: tuple[str, ...]
    """Generators whose states are not those of the whole on some worker."""

    used: int
    """Number of generators that the run draws from."""

    workers_of_one: int = 0
    """Number of workers that have worker 0's state, where the whole has one for each."""

    workers: int = 1
    follows: tuple[str, ...] = ()
    """What was seen to differ by them."""

    is_unexplained: bool = False
    """True if the updates differ from the whole's, and nothing that was seen explains it."""


RANDOM_NUMBERS: tuple[Rule[Generators], ...] = (
    Rule(
        check="random numbers",
        level="fine",
        when=lambda e: not e.names,
        text=lambda e: f"states of {plural(e.used, 'generator')} as in the whole",
    ),
    Rule(
        check="random numbers",
        level="fault",
        when=lambda e: e.workers_of_one > 0 and (bool(e.follows) or e.is_unexplained),
        text=lambda e: (
            f"{e.workers_of_one} of {e.workers} workers have worker 0's state of "
            f"{generators_of(e.names)}: they draw equal numbers"
            + (f" ({' and '.join(e.follows)})" if e.follows else "")
        ),
        remedy="save the states of all workers (torch.distributed.gather_object) and load each "
        "worker's own: states[rank]",
        figure=lambda e: float(e.workers_of_one),
    ),
    Rule(
        check="random numbers",
        level="fault",
        when=lambda e: e.is_unexplained and not e.follows,
        text=lambda e: (
            f"the state of {generators_of(e.names)} is not restored, and the loss of "
            "equal samples with equal weights differs: the loop draws from it"
        ),
        remedy=lambda e: restore_generators(e.names),
        figure=lambda e: float(len(e.names)),
    ),
    Rule(
        check="random numbers",
        level="note",
        when=lambda e: not e.follows,
        text=lambda e: (
            f"the state of {generators_of(e.names)} is not restored; no update depends on it"
        ),
        remedy=lambda e: f"for a later augmentation or dropout: {restore_generators(e.names)}",
    ),
)
