"""The pieces of a run with the same global batch, and epochs as steps across them.

Position p of a run is its p-th sample, whatever the batches are. So a run with a batch schedule
trains on the same samples in the same order; only the number of steps in an epoch changes.
"""

import bisect
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from largebatch.errors import RecipeError
from largebatch.recipe.data import Data
from largebatch.recipe.keys import BatchSizes
from largebatch.recipe.section import Duration, Section

Rounding = Callable[[float], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPiece:
    """Consecutive updates with the same global batch."""

    step: int = 0
    """The first update."""

    position: int = 0
    """Samples of the run before the first update."""

    global_batch: int
    lr_factor: float = 1.0

    def samples_before(self, step: int) -> int:
        """Return the number of samples of the run before an update of this piece."""
        return self.position + (step - self.step) * self.global_batch


@dataclass(frozen=True, slots=True, kw_only=True)
class SizePiece:
    """Consecutive updates on images of the same size."""

    end: int
    """The first step after these updates."""

    image_size: int


Pieces = tuple[BatchPiece, ...]


def find_pieces(batch: BatchSizes, *, samples: int) -> Pieces:
    """Return the pieces of a run; raise RecipeError unless their changes are in order.

    `samples` are those of an epoch, here and below.
    """
    pieces = [BatchPiece(global_batch=batch.global_batch)]
    for place, change in enumerate(batch.schedule):
        before = pieces[-1]
        step = _count(before, samples, change.after)
        if step <= before.step:
            raise RecipeError(
                f"batch.schedule.{place}.after (step {step}) must come after step {before.step}, "
                "where the batch before begins"
            )
        pieces.append(
            BatchPiece(
                step=step,
                position=before.samples_before(step),
                global_batch=change.global_batch,
                lr_factor=change.lr_factor,
            )
        )
    return tuple(pieces)


def find_sizes(data: Data, pieces: Pieces, *, samples: int, end: int) -> tuple[SizePiece, ...]:
    """Return the image sizes of the updates before `end`; none if all have the same size.

    Raises RecipeError where a size has no update.
    """
    sizes: list[SizePiece] = []
    for place, part in enumerate(data.resolution):
        begin = sizes[-1].end if sizes else 0
        stop = end if part.until is None else steps_from_start(pieces, samples, part.until)
        if not begin < stop <= end:
            raise RecipeError(
                f"data.resolution.{place}.until (step {stop}) must be after step {begin}, where "
                f"this size begins, and at most {end}, the end of training on augmented images"
            )
        sizes.append(SizePiece(end=stop, image_size=part.image_size))
    if sizes and sizes[-1].end < end:
        sizes.append(SizePiece(end=end, image_size=data.image_size))
    return tuple(sizes)


def without_resolution(data: Section) -> dict[str, Any]:
    """Return the section of the data, with images of one size throughout."""
    own = data.model_dump()
    return own | {"resolution": ()} if "resolution" in own else own


def piece_at(pieces: Pieces, step: int) -> BatchPiece:
    """Return the piece of a step; the last piece has no end."""
    return pieces[bisect.bisect_right(pieces, step, key=attrgetter("step")) - 1]


def position_at(pieces: Pieces, step: int) -> int:
    """Return the number of samples in the updates before `step`."""
    return piece_at(pieces, step).samples_before(step)


def steps_from_start(
    pieces: Pieces, samples: int, duration: Duration, rounding: Rounding = round
) -> int:
    """Return the number of updates from the start of the run in a duration."""
    if duration.epochs is None:
        return _count(pieces[0], samples, duration)
    positions = [piece.position / samples for piece in pieces]
    place = bisect.bisect_right(positions, duration.epochs)
    return _count(pieces[place - 1], samples, duration, rounding)


def steps_for(pieces: Pieces, samples: int) -> int:
    """Return the fewest updates from the start of the run that take at least `samples`."""
    piece = pieces[bisect.bisect_right(pieces, samples, key=attrgetter("position")) - 1]
    return piece.step - (piece.position - samples) // piece.global_batch


def steps_to_end(pieces: Pieces, samples: int, duration: Duration, *, end: int) -> int:
    """Return the number of updates in a duration that ends at step `end`; epochs are rounded."""
    if duration.steps is not None:
        return duration.steps
    assert duration.epochs is not None
    last = piece_at(pieces, end - 1)
    steps = duration.epochs * (samples / last.global_batch)
    if last.step == 0 or steps <= end - last.step:
        return whole(steps)
    epochs = duration.epochs - (end - last.step) * last.global_batch / samples
    rest = Duration.model_construct(epochs=epochs)
    return end - last.step + steps_to_end(pieces, samples, rest, end=last.step)


def whole(steps: float, rounding: Rounding = round) -> int:
    """Return a whole number of steps, at least one; `steps` may have rounding errors."""
    return max(1, rounding(round(steps, 9)))


def steps_of(duration: Duration, *, samples: int, global_batch: int) -> int:
    """Return a length as updates of one global batch: the nearest number, but at least one."""
    if duration.steps is not None:
        return duration.steps
    assert duration.epochs is not None
    return whole(duration.epochs * (samples / global_batch))


def within(pieces: Pieces, steps: range) -> list[tuple[BatchPiece, range]]:
    """Divide steps into those of each piece."""
    ends = [*(piece.step for piece in pieces[1:]), max(steps.stop, pieces[-1].step)]
    starts = [piece.step for piece in pieces]
    cut = [
        range(max(start, steps.start), min(end, steps.stop))
        for start, end in zip(starts, ends, strict=True)
    ]
    return [(piece, part) for piece, part in zip(pieces, cut, strict=True) if part]


def _count(piece: BatchPiece, samples: int, duration: Duration, rounding: Rounding = round) -> int:
    """Return the number of updates from the start in a duration that ends in this piece."""
    if duration.steps is not None:
        return duration.steps
    assert duration.epochs is not None
    epochs = duration.epochs - piece.position / samples
    return whole(piece.step + epochs * (samples / piece.global_batch), rounding)
