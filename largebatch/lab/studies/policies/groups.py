"""The measured policies that a question is about: of which data, model, batch and optimizer."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from largebatch.errors import StudyError, shorten
from largebatch.lab.planner.suggest import IMAGENET
from largebatch.lab.studies.queue.results import CellResults
from largebatch.recipe.recipe import Recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The policies of one configuration of a study, which differ in the schedule alone."""

    storage: str
    """As it was given, without a password."""

    cells: tuple[CellResults, ...]

    @property
    def recipe(self) -> Recipe:
        """What the policies share, with the schedule of the first one."""
        return self.cells[0].recipe

    @property
    def batch(self) -> int:
        """The global batch, in samples, with which the runs begin."""
        return self.recipe.batch.global_batch

    @property
    def name(self) -> str:
        """Study and configuration."""
        return f"{self.cells[0].study}/{self.cells[0].configuration}"

    @property
    def described(self) -> str:
        """What it is of: data, model, batch, optimizer."""
        recipe = self.recipe
        return (
            f"{recipe.name}, {recipe.model.name}, batch {self.batch:,}, {recipe.optimizer.kind} "
            f"(study {self.name})"
        )


def groups_of(storage: str, cells: Iterable[CellResults]) -> list[Group]:
    """Return the cells of a storage by study and configuration."""
    found: dict[tuple[str, str], list[CellResults]] = {}
    for cell in cells:
        found.setdefault((cell.study, cell.configuration), []).append(cell)
    return [Group(storage=storage, cells=tuple(each)) for each in found.values()]


def is_of(group: Group, dataset: str) -> bool:
    """Return whether a group is of a data set, by the names it goes by.

    A recipe for a folder of images does not name them. So its name, that of the configuration or
    that of the study has to begin with the data set's, whole words, case and punctuation aside:
    fashion-mnist is fashion_mnist_resnet9_128, and mnist is not. ImageNet goes by its numbers too.
    """
    data = group.recipe.data
    own = data.train_samples, data.val_samples, data.classes
    imagenet = IMAGENET.samples, IMAGENET.val_samples, IMAGENET.classes
    if dataset == ("imagenet" if own == imagenet else data.source):
        return True
    names = (group.recipe.name, group.cells[0].configuration, group.cells[0].study)
    return any("".join(_words(dataset)) in _beginnings(name) for name in names)


def _words(name: str) -> list[str]:
    return "".join(one if one.isalnum() else " " for one in name.lower()).split()


def _beginnings(name: str) -> set[str]:
    words = _words(name)
    return {"".join(words[:number]) for number in range(1, len(words) + 1)}


def choose(
    groups: Sequence[Group],
    *,
    dataset: str | None = None,
    model: str | None = None,
    optimizer: str | None = None,
    batch: int | None = None,
) -> list[Group]:
    """Return the groups that a question is about; of other batches the nearest on either side.

    Raises StudyError, with what there is, where there is none.
    """
    found = [
        group
        for group in groups
        if (dataset is None or is_of(group, dataset))
        and (model is None or group.recipe.model.name == model)
        and (optimizer is None or group.recipe.optimizer.kind == optimizer)
    ]
    if not found:
        wanted = [one for one in (dataset, model, optimizer) if one is not None]
        there = shorten([group.described for group in groups], between="; ")
        raise StudyError(
            f"no study of {', '.join(wanted) or 'any policy'}: the database has {there}; measure "
            "it with: largebatch lr bench STUDY.yaml"
        )
    if batch is None:
        return found
    measured = {group.batch for group in found}
    below = max((one for one in measured if one <= batch), default=None)
    above = min((one for one in measured if one >= batch), default=None)
    return [group for group in found if group.batch in {below, above}]
