"""The measured shape of a schedule for a suggested recipe.

The shape alone is taken: warm-up and decay as parts of the run. A rate depends on the optimizer and
its settings, which are the suggestion's and not the study's.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from largebatch.lab.planner.suggest import Suggestion
from largebatch.lab.studies.metrics import Interval
from largebatch.lab.studies.policies.groups import Group
from largebatch.lab.studies.policies.recommend import Recommendation, describe_points, recommend
from largebatch.recipe.scaling import scaled, shortened
from largebatch.recipe.schedule import Schedule


@dataclass(frozen=True, slots=True)
class Shape:
    """A schedule at the suggested peak, or none, and what it is from."""

    schedule: Schedule | None
    words: str


def shape_for(found: Suggestion, groups: Sequence[Group]) -> Shape | None:
    """Return the schedule whose accuracy is highest among those measured; None where none is.

    It is of the same model and the same number of images and classes, of the batch that is nearest
    by ratio among those measured, and none beyond them.
    """
    same = [group for group in groups if _is_of(group, found)]
    if not same:
        return None
    smallest, largest = (choose(group.batch for group in same) for choose in (min, max))
    if not smallest <= found.batch <= largest:
        return Shape(
            None,
            f"policy: as the points have it; policies were measured here for {found.model} on "
            f"these images, in batches of {smallest:,} to {largest:,}, and {found.batch:,} lies "
            "beyond them",
        )
    nearest = min(same, key=lambda group: abs(math.log(group.batch / found.batch)))
    answer = recommend(nearest, by="accuracy")
    if answer.gaps or answer.first is None:
        return Shape(
            None,
            f"policy: as the points have it; {nearest.described} has insufficient data: "
            f"{'; '.join(answer.gaps)}",
        )
    return Shape(_schedule(found, answer), _words(answer, nearest))


def _is_of(group: Group, found: Suggestion) -> bool:
    data, other = group.recipe.data, found.data
    return (
        group.recipe.model.name == found.model
        and data.train_samples == other.samples
        and data.val_samples == other.val_samples
        and data.classes == other.classes
    )


def _schedule(found: Suggestion, answer: Recommendation) -> Schedule:
    """Return the policy's schedule over the suggested epochs, at the suggested peak."""
    assert answer.first is not None
    cell = answer.first.cell
    recipe, batch = cell.recipe, answer.group.batch
    epochs = recipe.duration.epochs
    if epochs is None:
        assert recipe.duration.steps is not None
        epochs = recipe.duration.steps * batch / recipe.train_samples
    part = found.epochs / epochs
    longer = shortened(recipe, part, steps=part * batch / found.batch)
    return scaled(longer, found.peak_lr / recipe.schedule.peak_lr).schedule


def _words(answer: Recommendation, group: Group) -> str:
    assert answer.first is not None
    first = answer.first.cell
    text = (
        f"policy: the shape of {first.policy}, which has the highest top-1 of "
        f"{len(group.cells)} policies in {group.described}, over {len(first.seeds)} seeds"
    )
    if answer.level:
        text += f"; within the noise of it: {', '.join(one.cell.policy for one in answer.level)}"
    elif isinstance(answer.standings[1].against, Interval):
        second = answer.standings[1]
        text += f"; {second.cell.policy} is {describe_points(answer.standings[1].against)} below"
    rates = ", ".join(f"{key} {value:g}" for key, value in first.values.items())
    return (
        f"{text}; warm-up and decay are taken over as parts of the run, its rate is not ({rates} "
        f"with {group.recipe.optimizer.kind}): the peak is the points'"
    )
