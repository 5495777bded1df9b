"""What can be wrong with the runs of a resumed training, and where they lead, in tables of rules.

Updates are counted from 1, as those of the whole run: the first update of the rest has the number
of the first that was not made before the stop.
"""

import math
from dataclasses import dataclass
from typing import Literal

from largebatch.formatting import plural, three_digits
from largebatch.rules import Rule

# The runs themselves.


@dataclass(frozen=True, slots=True, kw_only=True)
class NumbersOfUpdates:
    """Updates that each run made, and where the rest begins."""

    whole: int
    first: int
    """Updates of the first part before the checkpoint from which the rest begins."""

    made: int
    """Updates that the first part made."""

    rest: int
    begins_at: int | None
    """Update of the whole whose samples the rest reads first, counted from 1; None if none does."""


NUMBERS_OF_UPDATES: tuple[Rule[NumbersOfUpdates], ...] = (
    Rule(
        check="updates",
        level="unknown",
        when=lambda e: min(e.whole, e.first, e.rest) == 0,
        text=lambda e: (
            f"updates seen: {e.whole:,} of the whole, {e.first:,} of the first part, {e.rest:,} of "
            "the rest"
        ),
        remedy="make updates by step() of an optimizer of torch in each of the three commands",
    ),
    Rule(
        check="updates",
        level="fault",
        when=lambda e: e.first + e.rest != e.whole,
        text=lambda e: (
            f"the first part and the rest make {e.first:,} + {e.rest:,} updates, the whole makes "
            f"{e.whole:,}"
            + (
                f"; the rest begins with the samples of update {e.begins_at:,}, not of "
                f"{e.first + 1:,}"
                if e.begins_at not in {None, e.first + 1}
                else ""
            )
        ),
        remedy="begin the loop after what was saved: range(checkpoint['epoch'] + 1, epochs); keep "
        "the global batch; load what ends the training early (patience, best metric); or give "
        "commands that together train as long as the whole",
        figure=lambda e: float(e.first + e.rest - e.whole),
    ),
    Rule(
        check="updates",
        level="note",
        when=lambda e: e.made > e.first,
        text=lambda e: (
            f"the rest begins after update {e.first:,}, the first part made {e.made:,}: "
            f"{plural(e.made - e.first, 'update')} after its checkpoint are made again"
        ),
        remedy="nothing if it saved there; else load the newest file, by number and not by name",
        figure=lambda e: float(e.made - e.first),
    ),
)

Field = Literal[
    "number of updates",
    "order of samples",
    "contents of samples",
    "weights",
    "buffers",
    "dropout masks",
    "learning rates",
    "optimizer state",
    "averages",
    "loss scale",
    "loss",
    "gradients",
]
"""What two runs can differ in, causes before what follows from them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstDifference:
    """First update in which two runs differ that must be equal."""

    updates: int
    """Number of updates that were compared."""

    update: int = 0
    """Number of the update, counted from 1; 0 if all are equal."""

    fields: tuple[Field, ...] = ()
    """What differs in it."""

    generators: tuple[str, ...] = ()
    """Random generators whose states differ in it."""

    processes: int = 0
    """Loader processes of a worker."""

    @property
    def cause(self) -> Field | None:
        """First of the fields."""
        return self.fields[0] if self.fields else None


def _repeat_text(e: FirstDifference) -> str:
    return (
        f"two runs of the same command differ from update {e.update:,} on: in the "
        f"{' and the '.join(e.fields[:3])}"
    )


_DIFFERENT_RUNS = {
    "torch": "torch.manual_seed(seed)",
    "numpy": "numpy.random.seed(seed)",
    "python": "random.seed(seed)",
}


def _seeds(generators: tuple[str, ...]) -> str:
    seeds = dict.fromkeys(_DIFFERENT_RUNS.get(it, "torch.manual_seed(seed)") for it in generators)
    return "; ".join(seeds)


REPEATED_RUN: tuple[Rule[FirstDifference], ...] = (
    Rule(
        check="repeated run",
        level="fine",
        when=lambda e: e.cause is None,
        text=lambda e: f"two runs of the whole are equal in {plural(e.updates, 'update')}",
    ),
    Rule(
        check="repeated run",
        level="unknown",
        when=lambda e: bool(e.generators),
        text=lambda e: f"{_repeat_text(e)}; the seed of {', '.join(e.generators)} is not fixed",
        remedy=lambda e: (
            f"before the model and the loader are made: {_seeds(e.generators)}; then audit again"
        ),
    ),
    Rule(
        check="repeated run",
        level="unknown",
        when=lambda e: e.cause == "number of updates",
        text="two runs of the same command make different numbers of updates",
        remedy="end the training by a number of updates or epochs, not by time",
    ),
    Rule(
        check="repeated run",
        level="unknown",
        when=lambda e: e.cause == "order of samples",
        text=_repeat_text,
        remedy="give the loader a seed: generator=torch.Generator().manual_seed(seed), a sampler's "
        "seed=, a sorted list of files",
    ),
    Rule(
        check="repeated run",
        level="unknown",
        when=lambda e: e.cause == "contents of samples" and e.processes > 0,
        text=lambda e: f"{_repeat_text(e)}; {plural(e.processes, 'loader process', 'processes')}",
        remedy="draw in loader processes from torch's or Python's generator, which are seeded "
        "there, not from one that the data set made",
    ),
    Rule(
        check="repeated run",
        level="unknown",
        when=lambda e: e.cause == "contents of samples",
        text=_repeat_text,
        remedy="seed the generator that the data set draws from",
    ),
    Rule(
        check="repeated run",
        level="unknown",
        when=lambda e: e.cause == "weights" and e.update == 1,
        text=_repeat_text,
        remedy="seed the initial weights: torch.manual_seed(seed) before the model is made",
    ),
    Rule(
        check="repeated run",
        level="unknown",
        when=lambda e: e.cause == "dropout masks",
        text=_repeat_text,
        remedy="seed the generator of dropout: torch.manual_seed(seed)",
    ),
    Rule(
        check="repeated run",
        level="unknown",
        text=lambda e: (
            f"{_repeat_text(e)}, from equal samples and random numbers: an operation is not "
            "deterministic"
        ),
        remedy="torch.use_deterministic_algorithms(True), torch.backends.cudnn.benchmark = False",
    ),
)


def _first_text(e: FirstDifference) -> str:
    return (
        f"the first part is not the beginning of the whole: from update {e.update:,} on it differs "
        f"in the {' and the '.join(e.fields[:3])}; values after the stop are not compared"
    )


FIRST_PART: tuple[Rule[FirstDifference], ...] = (
    Rule(
        check="first part",
        level="fine",
        when=lambda e: e.cause is None,
        text=lambda e: f"its {plural(e.updates, 'update')} are those of the whole",
    ),
    Rule(
        check="first part",
        level="unknown",
        when=lambda e: "learning rates" in e.fields,
        text=_first_text,
        remedy="its schedule is as long as its command: give it the epochs of the whole, and stop "
        "it early (break after the checkpoint)",
    ),
    Rule(
        check="first part",
        level="unknown",
        text=_first_text,
        remedy="give it the arguments of the whole, and stop it early (break after the checkpoint)",
    ),
)

# What follows, and what nothing else explains.


@dataclass(frozen=True, slots=True, kw_only=True)
class BestCheckpoint:
    """Files that the rest writes where the whole does not, from equal weights, or the reverse."""

    name: str
    update: int
    """Number of updates after which the runs differ in it."""

    last: int | None
    """Updates after which the whole wrote it last before that; None if never."""

    is_written: bool
    """True if the rest writes it."""


BEST_CHECKPOINT: tuple[Rule[BestCheckpoint], ...] = (
    Rule(
        check="best checkpoint",
        level="fault",
        when=lambda e: e.is_written,
        text=lambda e: (
            f"after update {e.update:,} the rest writes {e.name}, the whole does not"
            + (f": it keeps that of update {e.last:,}" if e.last else "")
        ),
        remedy="save the best metric with the checkpoint and load it: best = checkpoint['best']",
        figure=lambda e: float(e.update),
    ),
    Rule(
        check="best checkpoint",
        level="fault",
        text=lambda e: f"after update {e.update:,} the whole writes {e.name}, the rest does not",
        remedy="save the best metric with the checkpoint and load it: best = checkpoint['best']",
        figure=lambda e: float(e.update),
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """How far the rest's updates lead from those of the whole."""

    updates: int
    update: int = 0
    """First update, counted from 1, whose loss, gradients or result differ; 0 if there is none."""

    fields: tuple[str, ...] = ()
    """What differs in it."""

    distance: float = 0.0
    """Largest relative distance of a tensor after the last update; NaN if it is not known."""

    is_exact: bool = True
    """True if bits can be equal: as many workers, with the same samples in each pass."""

    window: int = 0
    """Batches of the rest's first update that were read before the stop; 0 if that is another."""

    draws: tuple[str, ...] = ()
    """What differs by design on other workers, so that weights cannot be equal: dropout."""


WITHIN_ROUNDING = 1e-5
"""Largest relative distance of weights that only the order of sums explains, after some updates."""

COURSE: tuple[Rule[Course], ...] = (
    Rule(
        check="weights",
        level="fine",
        when=lambda e: e.update == 0,
        text=lambda e: f"equal after each of {plural(e.updates, 'update')}, bit for bit",
        figure=lambda _: 0.0,
    ),
    Rule(
        check="weights",
        level="fine",
        when=lambda e: not e.is_exact and e.distance < WITHIN_ROUNDING,
        text=lambda e: (
            f"equal within rounding after {plural(e.updates, 'update')}: "
            f"{three_digits(100 * e.distance)} %"
        ),
        figure=lambda e: e.distance,
    ),
    Rule(
        check="weights",
        level="note",
        when=lambda e: e.distance < WITHIN_ROUNDING,
        text=lambda e: (
            f"from update {e.update:,} on by rounding (in the {' and the '.join(e.fields[:2])}): "
            f"{three_digits(100 * e.distance)} % after {plural(e.updates, 'update')}"
        ),
        remedy="nothing; for equal bits, keep memory formats, foreach and fused as before the stop",
        figure=lambda e: e.distance,
    ),
    Rule(
        check="weights",
        level="note",
        when=lambda e: bool(e.draws),
        text=lambda e: (
            f"{three_digits(100 * e.distance)} % from the whole's after "
            f"{plural(e.updates, 'update')}: on other workers or batches "
            f"{' and '.join(e.draws)} differ"
        ),
        remedy="nothing if that is meant; to compare weights, resume on as many workers",
        figure=lambda e: e.distance,
    ),
    Rule(
        check="weights",
        level="fault",
        when=lambda e: e.window > 0,
        text=lambda e: (
            f"update {e.update:,} differs in the {' and the '.join(e.fields)}: "
            f"{plural(e.window, 'batch', 'batches')} of it, read before the stop, "
            f"{'is' if e.window == 1 else 'are'} lost"
        ),
        remedy="save after whole updates only, or save and load the gradients of all parameters",
        figure=lambda e: float(e.window),
    ),
    Rule(
        check="optimizer state",
        level="fault",
        when=lambda e: not {"loss", "gradients"} & {*e.fields},
        text=lambda e: (
            f"update {e.update:,} has the gradients, state and rates of the whole, and moves the "
            f"weights otherwise: by {three_digits(100 * e.distance)} % after "
            f"{plural(e.updates, 'update')}"
        ),
        remedy="keep what the optimizer counts in its state or param_groups, which state_dict() "
        "saves, not in attributes; restore what else moves weights",
        figure=lambda e: e.distance,
    ),
    Rule(
        check="weights",
        level="fault",
        text=lambda e: (
            f"update {e.update:,} differs in the {' and the '.join(e.fields[:2])}, from equal "
            "samples, weights and rates"
            + (
                f"; weights differ by {three_digits(100 * e.distance)} % after "
                f"{plural(e.updates, 'update')}"
                if math.isfinite(e.distance)
                else ""
            )
        ),
        remedy="restore what the loop has besides: modes (model.train()), the loss and its "
        "weights, clipping, frozen layers, counters",
        figure=lambda e: e.distance,
    ),
)
