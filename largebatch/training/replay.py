"""Finds a worker that computes wrong numbers, with execution.replay_every.

In every N-th update each worker first computes the first micro-batch of another worker, its
partner, with the partner's samples and random numbers: both are functions of seed and position. In
the update itself it records its own first micro-batch. One sum over the workers then shows whose
two records differ. If any do, each worker computes the first micro-batch of a third worker and its
own once more, and the records decide which worker is wrong (training/verdict.py). The partner is
another one in each replay, so that all pairs come.

Buffers, statistics, generators and gradients are restored after each pass, and the last one is the
worker's own: the update has the same bits as without a replay, except that it corrects an error
that came once. It runs without a CUDA graph, whose results are the same bits; a graph hides its
gradients. The sums over the workers do not overlap with its backward pass.

Found are errors of computing, of reading and decoding, and of random numbers. Weights that differ
are found by `compare_every` too, running statistics by that alone: training does not read them. If
all workers share one BatchNorm span, and with a single worker, each repeats its own pass, which
finds errors that come and go; whether by the device or by the operation cannot be said then. If
replays name another worker each time, the operation that they name does not repeat.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from itertools import combinations
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from largebatch import accelerator
from largebatch.data.pipeline import Pipeline
from largebatch.data.types import Batch
from largebatch.distributed.agreement import gather_unequal, gather_values, sum_of_bits
from largebatch.distributed.backend import Backend
from largebatch.distributed.reducer import Reducer
from largebatch.errors import WrongCardError, shorten
from largebatch.formatting import plural
from largebatch.recipe.execution import OnWrongCard
from largebatch.tracking.environment import device_kind, host_name
from largebatch.tracking.events import StageName, Suspect, WrongCard
from largebatch.training.loop import EagerStep, Result, step_seeds
from largebatch.training.pass_record import PassRecord, record_pass
from largebatch.training.step_log import RunLog
from largebatch.training.verdict import Pass, Passes, Verdict, verdict

_LOW = 0xFFFF_FFFF


class _OwnPass(NamedTuple):
    """A pass of this worker."""

    owner: int
    """Worker that trains on these samples."""

    record: PassRecord


@dataclass(kw_only=True)
class Replay:
    """Compares passes of all workers in every N-th update. All workers call it together.

    `precision` is the type that passes are computed in: devices of different models may differ by
    half of its digits, as a part of the gradients' mean norm.
    """

    every: int
    action: OnWrongCard
    pipeline: Pipeline
    backend: Backend
    seed: int
    precision: torch.dtype
    log: RunLog
    found: list[WrongCard] = field(default_factory=list)
    """What this run has found so far."""

    last_equal: int | None = None
    """Update of the last replay in which all workers were equal; None before the first one."""

    _by_distance: bool | None = None
    """True if gradients are compared by their distance; None before the first replay."""

    def is_due(self, number: int) -> bool:
        """Return True if the update of this number, from 0, has a replay."""
        return (number + 1) % self.every == 0

    def checked(
        self, step: EagerStep, *, stage: StageName, steps: range, clean: bool
    ) -> "ReplayedStep":
        """Return a step that makes the updates `steps` of a stage by `step`, with replays."""
        return ReplayedStep(self, step, stage=stage, steps=steps, clean=clean)

    def first_pass(
        self, step: EagerStep, batch: Batch, number: int, *, stage: StageName, clean: bool
    ) -> None:
        """Do the first pass of update `number` over this worker's batch, after a replay.

        Raises WrongCardError on every worker if two of them differ, unless the run continues then.
        """
        rank = self.backend.rank
        first, second = offsets(number // self.every, self.backend.world_size // self.group)
        if self._by_distance is None:
            self._by_distance = self._needs_distances()
        restore = _save(step)

        def compute_again(owner: int) -> _OwnPass:
            accelerator.seed(step_seeds(self.seed, owner)(number), self.backend.device)
            positions = self.pipeline.plan.positions(number, 0, owner)
            with closing(self.pipeline.at([positions], clean=clean)) as batches:
                record = self._record(step, next(batches))
            restore()
            return _OwnPass(owner, record)

        replayed = compute_again(self._partner(first))
        own = _OwnPass(rank, self._record(step, batch))
        differing = self._differing([own, replayed])
        if not differing:
            self.last_equal = number
            return
        restore()
        state = _digest_of_state(step.model)
        other = compute_again(self._partner(second))
        # Its gradients are those of the update: an error that came once is not in them.
        repeated = _OwnPass(rank, self._record(step, batch))
        passes = [own, replayed, other, repeated]
        differing |= self._differing(passes)
        event = self._judge(passes, differing, state=state, stage=stage, number=number)
        if event is None:
            return
        self.found.append(event)
        self.log.emit(event)
        if self.action != "continue":
            self.backend.barrier()  # a launcher ends the others, with the log, when one has ended
            raise WrongCardError(event.text)

    @property
    def group(self) -> int:
        """Number of consecutive workers that compute a pass together."""
        return self.pipeline.plan.sync_workers

    def _partner(self, offset: int) -> int:
        return (self.backend.rank + offset * self.group) % self.backend.world_size

    def _record(self, step: EagerStep, batch: Batch) -> PassRecord:
        return record_pass(step, batch, sketches=bool(self._by_distance))

    def _needs_distances(self) -> bool:
        """Return True if healthy workers may compute different bits."""
        device = self.backend.device
        kinds = gather_unequal(device_kind(device), self.backend, device)
        if kinds is None:
            return False
        self.log.note_once(
            "train",
            f"replays: {plural(len(set(kinds)), 'model')} of devices "
            f"({shorten(sorted(set(kinds)))}): gradients are compared by their distance",
        )
        return True

    def _differing(self, passes: Sequence[_OwnPass]) -> set[int]:
        """Return the workers over whose samples some passes differ from the first of their own.

        `passes` are this worker's, the first over its own samples; all workers have as many.
        """
        backend = self.backend
        own = passes[0].record
        if self._by_distance:
            sketches = torch.stack([it.record.sketches for it in passes]).to(backend.device)
            owners = torch.tensor([it.owner for it in passes], device=backend.device)
            of_workers = backend.all_gather(sketches).cpu()  # sync: once in many updates
            return {
                owner
                for worker, its_owners in enumerate(backend.all_gather(owners).tolist())
                for place, owner in enumerate(its_owners)
                if self._first_far(of_workers[owner, 0], of_workers[worker, place]) is not None
            }
        # Each worker adds the digest of its own pass, and others subtract theirs over its samples:
        # the sum is zero if they are equal. In halves, so that no sum overflows.
        sums = torch.zeros(
            len(passes) - 1, backend.world_size, 2, dtype=torch.int64, device=backend.device
        )
        for row, (owner, record) in zip(sums, passes[1:], strict=True):
            row[backend.rank] += _halves(own.result)
            row[owner] -= _halves(record.result)
        backend.all_reduce(sums).wait()
        differs = sums.ne(0).any(2).any(0).tolist()  # sync: once in many updates
        return {owner for owner, value in enumerate(differs) if value}

    def _judge(
        self,
        passes: Sequence[_OwnPass],
        differing: set[int],
        *,
        state: int,
        stage: StageName,
        number: int,
    ) -> WrongCard | None:
        """Return which workers are wrong; None if passes do not repeat to the bit on any.

        `state` is a digest of what all passes began with: weights and running statistics.
        """
        size = self.group
        backend = self.backend
        groups = {owner // size for owner in differing}
        sent = [
            (
                owner,
                record.sketches.tolist()
                if self._by_distance
                else [state, *record.digests.tolist()],
            )
            for owner, record in passes
            if owner // size in groups
        ]
        here = asdict(suspect_here(backend)) if sent else None
        everyone = gather_values({"passes": sent, "here": here}, backend, backend.device)
        by_owner: dict[int, list[Pass[Any]]] = {}
        for worker, content in enumerate(everyone):
            for owner, record in content["passes"]:
                by_owner.setdefault(owner, []).append(Pass(worker, record))
        differ = self._first_far_in_lists if self._by_distance else first_unequal
        result = verdict(by_owner, differ, workers=backend.world_size, group=size)
        if not self._by_distance and (result is None or not _repeats(by_owner)):
            self._by_distance = True
            self.log.note_once(
                stage,
                f"replays: in update {number} passes over the samples of "
                f"{plural(len(differing), 'worker')} differ from their repetitions, and not by one "
                "device; from here on gradients are compared by their distance",
            )
            return None
        own = passes[0].record
        places = ["weights and running statistics", *own.places]
        if self._by_distance:
            places = [f"gradient of {it}" for it in own.gradients]
        has_partners = backend.world_size > size
        suspects: tuple[Suspect, ...] = ()
        place = "many places"
        if result is not None:
            suspects = tuple(Suspect(**everyone[worker]["here"]) for worker in result.workers)
            # The first worker of a group that shares spans counts these, so it has more operations.
            named = places[result.place] if result.place < len(places) else "the last operation"
            place = gather_values(named, backend, backend.device)[result.workers[0]]
        return WrongCard(
            stage=stage,
            step=number,
            suspects=suspects,
            # An operation that does not repeat, such as one that reads memory before it is
            # written, looks the same without a partner.
            is_certain=result is not None and result.is_certain and has_partners,
            place=place,
            last_equal=self.last_equal,
            text=f"{_accusation(suspects, result, has_partners=has_partners)}: in update {number} "
            f"gradients of the same samples differ, first at {place}; {_remedy(self.last_equal)}",
        )

    def _first_far(self, one: Tensor, other: Tensor) -> int | None:
        """Return the first gradient whose sketches differ by more than rounding."""
        norms = torch.maximum(one[:, 0], other[:, 0])
        # As a part of all gradients, because some are zero but for rounding, such as those of a
        # bias before BatchNorm.
        limit = math.sqrt(torch.finfo(self.precision).eps) * norms.square().mean().sqrt()
        distances = torch.linalg.vector_norm(one[:, 1:] - other[:, 1:], dim=1)
        # What is not finite on both is compared by that alone.
        unequal = one.isfinite().all(1) != other.isfinite().all(1)
        far = ((distances > limit) | unequal).nonzero()
        return int(far[0]) if len(far) else None

    def _first_far_in_lists(self, one: Any, other: Any) -> int | None:  # noqa: ANN401 -- JSON
        return self._first_far(
            torch.tensor(one, dtype=torch.float64), torch.tensor(other, dtype=torch.float64)
        )


class ReplayedStep:
    """A Step that replays the first pass of another worker in some updates: see Replay."""

    def __init__(
        self, replay: Replay, step: EagerStep, *, stage: StageName, steps: range, clean: bool
    ) -> None:
        self._replay = replay
        self._step = step
        self._stage = stage
        self._clean = clean
        self._numbers = iter(steps)
        self._eager: EagerStep | None = None
        """What makes the present update, if it has a replay."""

        self.model: nn.Module = step.model
        self.optimizer: Optimizer = step.optimizer
        self.reducer: Reducer = step.reducer
        self.frozen: list[nn.Parameter] = []

    def accumulate(self, batch: Batch, *, first: bool, last: bool) -> None:
        """Add the gradients of a micro-batch; raises as Replay.first_pass."""
        if first:
            number = next(self._numbers)
            self._step.frozen = self.frozen
            self._eager = self._step.without_graph() if self._replay.is_due(number) else None
        if self._eager is None:
            self._step.accumulate(batch, first=first, last=last)
        elif not first:
            self._eager.accumulate(batch, first=first, last=last)
        else:
            self._replay.first_pass(
                self._eager, batch, number, stage=self._stage, clean=self._clean
            )
            if last:  # nothing was sent while it was not known whether the pass is repeated
                self._eager.spans.reduce()
                self.reducer.arm(complete=True)

    def finish(self) -> Result:
        """Sum the gradients over the workers, and update the weights."""
        if self._eager is None:
            return self._step.finish()
        self._step.result = self._eager.finish()  # with the loss scale of the next update
        return self._step.result


def offsets(number: int, groups: int) -> tuple[int, int]:
    """Return the distances to the groups whose samples replay `number` computes, and a dispute.

    Groups are single workers, unless workers share BatchNorm spans. Two distances are different
    from three groups on; after `groups` - 1 replays each group has computed those of all others.

    >>> [offsets(number, 4) for number in range(4)]
    [(1, 2), (2, 3), (3, 1), (1, 2)]
    """
    if groups == 1:
        return 0, 0
    first = 1 + number % (groups - 1)
    return first, 1 + first % (groups - 1)


def suspect_here(backend: Backend) -> Suspect:
    """Return what identifies this worker's device."""
    return Suspect(
        worker=backend.rank,
        host=host_name(),
        device=device_kind(backend.device),
        unit=accelerator.uuid(backend.device),
    )


def first_unequal(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Return the number of the first place where two lists differ; None if they are equal."""
    if one == other:
        return None
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))


def _repeats(passes: Passes[Sequence[int]]) -> bool:
    """Return True if two passes over the samples of half of the workers or more are equal."""
    repeated = [
        any(a.record == b.record for a, b in combinations(of_owner, 2))
        for of_owner in passes.values()
    ]
    return 2 * sum(repeated) >= len(repeated)


def _halves(number: Tensor) -> Tensor:
    return torch.stack([number & _LOW, (number >> 32) & _LOW])


def _save(step: EagerStep) -> Callable[[], None]:
    """Return a function that restores buffers, statistics and generators as they are now."""
    buffers = [(buffer, buffer.clone()) for buffer in step.model.buffers()]
    restore_moments = step.spans.save()
    restore_generators = accelerator.save_generators(step.reducer.device)

    @torch.no_grad()
    def restore() -> None:
        for buffer, before in buffers:
            buffer.copy_(before)
        restore_moments()
        restore_generators()

    return restore


def _digest_of_state(model: nn.Module) -> int:
    return sum_of_bits(it for it in model.state_dict().values() if isinstance(it, Tensor))


def _accusation(suspects: Sequence[Suspect], result: Verdict | None, *, has_partners: bool) -> str:
    names = [_describe(it) for it in suspects]
    if result is None:
        return "more workers than a few wrong devices explain compute different numbers"
    if not has_partners:
        return (
            f"{' and '.join(names)} repeats a pass with different numbers, by its device or by an "
            "operation that does not repeat"
        )
    if result.is_certain:
        return f"wrong numbers are computed by {' and '.join(names)}"
    return f"wrong numbers are computed by one of {' and '.join(names)}"


def _describe(suspect: Suspect) -> str:
    unit = "" if suspect.unit is None else f", {suspect.unit}"
    return f"worker {suspect.worker} ({suspect.host}, {suspect.device}{unit})"


def _remedy(last_equal: int | None) -> str:
    since = "no replay before it was without a difference"
    if last_equal is not None:
        since = f"in update {last_equal} all were equal"
    return (
        f"{since}; leave that device out and continue with --resume, or examine it by "
        "`largebatch doctor --replay --workers N`"
    )
