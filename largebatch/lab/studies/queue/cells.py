"""A cell of a study: one recipe with one policy or setting, and the recipes of its runs.

A policy is a shape. All rates of its schedule are multiples of one base rate, which is searched
for each shape (arXiv:2603.10301): at one common rate, a bench would rank base rates.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from largebatch.distributed.environment import BackendName
from largebatch.errors import LargebatchError, RecipeError, nearest
from largebatch.lab.studies.queue.study import (
    RATE,
    AnyStudy,
    ConfigurationStudy,
    Search,
    recipe_of,
    settings_of,
)
from largebatch.recipe.arithmetic.plan import Plan, make_plan
from largebatch.recipe.loading import validate_tree
from largebatch.recipe.recipe import Recipe
from largebatch.recipe.scaling import scaled, shortened
from largebatch.schedules.build import build_schedule

Values = Mapping[str, float]
"""Keys of a recipe and their values in a trial."""

_SHAPE = "schedule.decay."
"""Beginning of the keys of shapes; kinds of decays have different ones."""

RUNGS = 4
"""Number of equal parts of a trial; it may be stopped early after each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One recipe with one policy, or with one setting."""

    configuration: str
    variant: str
    """Name of the policy or setting."""

    recipe: Recipe
    """Recipe in the study file; its searched keys are the centre of the search."""

    search: Search | None
    """Search of the cell; None if nothing is searched."""

    workers: int = 1
    backend: BackendName = "auto"
    threads: int | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    """As in Setting."""

    @property
    def name(self) -> str:
        """Name within the study."""
        return f"{self.configuration}/{self.variant}"

    @property
    def plan(self) -> Plan:
        """Division of a run with this seed over workers."""
        return make_plan(self.recipe, workers=self.workers)

    @property
    def ranges(self) -> dict[str, tuple[float, float]]:
        """Lowest and highest value of every searched key that the recipe has."""
        keys = {} if self.search is None else self.search.keys
        return {
            key: (low * self.own(key), high * self.own(key))
            for key, (low, high) in keys.items()
            if self.has(key)
        }

    def has(self, key: str) -> bool:
        """Return True unless a key is one of shapes, which its policy has not."""
        if not key.startswith(_SHAPE):
            return True
        return value_at(self.recipe.model_dump(mode="json"), key) is not None

    def own(self, key: str) -> float:
        """Return the recipe's own value; raise RecipeError unless it is a number above 0."""
        value: Any = self.recipe.model_dump(mode="json")
        for word in key.split("."):
            if isinstance(value, dict) and word not in value:
                hint = nearest(word, value, otherwise=f"known keys: {', '.join(value)}")
                raise RecipeError(f"search.keys.{key}: unknown key; {hint}")
            value = value[word] if isinstance(value, dict) else None
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise RecipeError(
                f"search.keys.{key}: the recipe has {json.dumps(value)} there, expected a number "
                "above 0 to search around"
            )
        return float(value)

    def trial_recipe(self, values: Values) -> Recipe:
        """Return the recipe of a trial, which is evaluated on held-out training images."""
        search = self.search
        assert search is not None
        left = self.recipe.train_samples - search.held_out
        share = left / self.recipe.train_samples  # of the updates in an epoch
        epochs = steps = search.part
        if self.recipe.duration.epochs is not None:
            steps *= share
        else:
            epochs /= share
        tree = shortened(self.at(values), epochs, steps=steps).model_dump(mode="json")
        tree["seed"] = search.seed
        tree["data"]["held_out"] = {"samples": search.held_out}
        for section, key in ((tree["polish"], "statistics"), (tree, "optimizer")):
            _bound_samples(section and section[key], left)
        recipe = validate_tree(Recipe, tree, source=self.name)
        if not search.prune:
            return recipe
        plan = make_plan(recipe, workers=self.workers)
        every = max(1, plan.steps // RUNGS) / plan.steps_per_epoch
        tree["evaluation"] = {"every_epochs": every}
        return validate_tree(Recipe, tree, source=self.name)

    def seed_recipe(self, values: Values, *, seed: int, scale: float = 1.0) -> Recipe:
        """Return the recipe of one seed on all training images, at a multiple of the rate."""
        rate = values.get(RATE, self.own(RATE)) * scale
        return self.at({**values, RATE: rate}).model_copy(update={"seed": seed})

    def at(self, values: Values) -> Recipe:
        """Return the recipe with these values; all rates of the schedule scale with the peak."""
        tree = self.recipe.model_dump(mode="json")
        for key, value in values.items():
            if key == RATE:
                continue
            *words, last = key.split(".")
            section = tree
            for word in words:
                section = section[word]
            section[last] = value
        recipe = validate_tree(Recipe, tree, source=self.name)
        return scaled(recipe, values[RATE] / self.own(RATE)) if RATE in values else recipe

    def check(self) -> None:
        """Raise LargebatchError if a run of the cell cannot be made."""
        if self.recipe.protocol is not None:
            raise RecipeError(
                "the recipe has a protocol; `largebatch study staleness` compares protocols, and "
                "`largebatch report RUN RUN ...` runs"
            )
        if self.recipe.data.held_out is not None:
            raise RecipeError(
                "the recipe has data.held_out, and a study holds out images by itself; leave it "
                "out of the recipe"
            )
        for end in (0, 1):
            values = {key: bounds[end] for key, bounds in self.ranges.items()}
            trials = [self.trial_recipe(values)] if self.search else []
            for recipe in (*trials, self.seed_recipe(values, seed=1)):
                build_schedule(recipe.schedule, make_plan(recipe, workers=self.workers))


def cells_of(study: AnyStudy, folder: Path) -> list[Cell]:
    """Return the cells of a study whose file lies in `folder`, all checked.

    Cells of settings monitor the system. Raises LargebatchError naming the recipe and the policy
    or setting that do not fit each other.
    """
    cells = []
    monitor = ("system",) if isinstance(study, ConfigurationStudy) else ()
    for name, configuration in study.recipes.items():
        for variant, setting in settings_of(study).items():
            try:
                recipe = recipe_of(configuration, folder, setting.set)
                watched = tuple(dict.fromkeys((*recipe.monitor, *monitor)))
                cell = Cell(
                    configuration=name, variant=variant,
                    recipe=recipe.model_copy(update={"monitor": watched}), search=study.search,
                    workers=setting.workers, backend=setting.backend, threads=setting.threads,
                    environment=setting.environment,
                )  # fmt: skip
                cell.check()
            except LargebatchError as error:
                raise RecipeError(f"recipe {name} with {study.kind} {variant}: {error}") from None
            cells.append(cell)
    for key in study.search.keys if study.search else ():
        if not any(cell.has(key) for cell in cells):
            raise RecipeError(f"search.keys.{key}: no {study.kind} of the study has this key")
    return cells


def value_at(tree: Any, key: str) -> Any:  # noqa: ANN401 -- any JSON
    """Return what a recipe as JSON has at a dotted key; None where it has no such key."""
    for word in key.split("."):
        tree = tree.get(word) if isinstance(tree, dict) else None
    return tree


def rungs(plan: Plan) -> list[int]:
    """Return the updates after which a trial is compared: the evaluations next to equal parts.

    None lies within the warm-up, where a policy that rises for longer looks worse than it is.
    """
    near = {
        min(plan.evaluate_after, key=lambda step: abs(step - plan.steps * part / RUNGS), default=0)
        for part in range(1, RUNGS)
    }
    return [step for step in sorted(near) if plan.warmup_steps < step < plan.train_steps]


def _bound_samples(section: dict[str, Any] | None, most: int) -> None:
    """Limit the statistics to the number of training images."""
    for key in ("samples", "statistics_samples"):
        if section and section.get(key):
            section[key] = min(section[key], most)
