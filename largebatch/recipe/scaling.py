"""A recipe of another length, in another batch, or with other learning rates, of the same shape."""

from typing import Any

from largebatch.recipe.loading import validate_tree
from largebatch.recipe.recipe import Recipe
from largebatch.recipe.schedule import Decay
from largebatch.recipe.section import Duration, Section

_RATES = {"peak_lr", "low_lr", "end_lr", "start_lr"}


def shortened(recipe: Recipe, epochs: float, *, steps: float) -> Recipe:
    """Return the recipe with all lengths multiplied by `epochs`, and decays per step scaled to
    match.

    `steps` is the factor of lengths in updates and of decays per step; it is another one if an
    epoch has another number of updates.
    """
    if epochs == steps == 1:
        return recipe
    tree = _shortened(recipe, epochs, steps).model_dump(mode="json")
    every = tree["evaluation"]["every_epochs"]
    if every is not None:
        tree["evaluation"]["every_epochs"] = every * epochs
        tree["evaluation"]["offset_epochs"] *= epochs
    return validate_tree(Recipe, tree, source=recipe.name)


def _shortened(value: Any, epochs: float, steps: float) -> Any:  # noqa: ANN401 -- any field
    if isinstance(value, tuple):
        return tuple(_shortened(item, epochs, steps) for item in value)
    if not isinstance(value, Section):
        return value
    changes = {
        key: _shortened(getattr(value, key), epochs, steps) for key in type(value).model_fields
    }
    if isinstance(value, Duration):
        if value.epochs is not None:
            changes["epochs"] = value.epochs * epochs
        elif value.steps is not None:
            changes["steps"] = max(1, round(value.steps * steps))
    # Settings per step have no unit that says so: only the policy knows them.
    if isinstance(value, Decay):
        changes |= value.at_other_steps(steps)
    return value.model_copy(update=changes)


def scaled(recipe: Recipe, factor: float) -> Recipe:
    """Return the recipe with all learning rates of its schedule multiplied by a positive factor.

    >>> from largebatch.recipe.loading import load_recipe
    >>> scaled(load_recipe("digits_96"), 3).schedule.peak_lr
    1.5
    """
    tree = recipe.model_dump(mode="json")
    tree["schedule"] = _scaled(tree["schedule"], factor)
    return validate_tree(Recipe, tree, source=recipe.name)


def _scaled(tree: Any, factor: float) -> Any:  # noqa: ANN401 -- any JSON
    """Multiply the rates of a schedule; gives 0.3, not 3 x 0.1 to the last bit."""
    if isinstance(tree, list):
        return [_scaled(item, factor) for item in tree]
    if not isinstance(tree, dict):
        return tree
    return {
        key: float(f"{value * factor:.12g}") if key in _RATES else _scaled(value, factor)
        for key, value in tree.items()
    }


def at_batch(
    recipe: Recipe, batch: int, *, epochs: float | None = None, rate: float | None = None
) -> Recipe:
    """Return the recipe in another batch; all lengths keep their shares of the run.

    Only the keys that it sets are set. Raises RecipeError where the batch does not fit the recipe.
    """
    # Epochs keep their number, so there are fewer updates in a larger batch.
    per_epoch = recipe.train_samples / recipe.batch.global_batch
    length = recipe.duration.epochs or (recipe.duration.steps or 0) / per_epoch
    factor = 1.0 if epochs is None else epochs / length
    resized = shortened(recipe, factor, steps=factor * recipe.batch.global_batch / batch)
    changed = scaled(resized, (rate or recipe.schedule.peak_lr) / recipe.schedule.peak_lr)
    set_keys = recipe.model_dump(mode="json", exclude_unset=True)
    tree = _only_set(changed.model_dump(mode="json"), set_keys)
    tree["batch"]["global_batch"] = batch
    if "execution" in tree:
        # It may not divide the new batch; without it the plan chooses one that does.
        tree["execution"].pop("device_batch", None)
    return validate_tree(Recipe, tree, source=recipe.name)


def _only_set(tree: Any, like: Any) -> Any:  # noqa: ANN401 -- any JSON
    """Return the keys of `tree` that `like` has, numbers in four digits."""
    if isinstance(tree, dict):
        return {key: _only_set(tree[key], like[key]) for key in like}
    if isinstance(tree, list):
        return [_only_set(value, other) for value, other in zip(tree, like, strict=True)]
    return tree if tree == like or not isinstance(tree, float) else float(f"{tree:.4g}")
